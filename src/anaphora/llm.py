"""The offline API: the engine in this process, with the names and results of vLLM's."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any, Self, TypedDict, Unpack

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from anaphora.checkpoint.resolve import resolve
from anaphora.config import engine_config
from anaphora.core.engine import Engine
from anaphora.errors import EngineDead, InvalidRequest
from anaphora.model.runner import load
from anaphora.text.chat_template import read_template
from anaphora.text.generation_config import load_defaults
from anaphora.text.output_processor import ChoiceDelta, OutputProcessor
from anaphora.text.tokenizer import Tokenizer
from anaphora.types.outputs import EngineInfo, EngineStats, FinishReason, RequestOutput, SequenceUpdate
from anaphora.types.request import MAX_SALT_LENGTH, Request
from anaphora.types.sampling import SamplingParams

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a dict with ``prompt`` or ``prompt_token_ids`` and optionally ``cache_salt``."""

Message = Mapping[str, Any]

_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


class Settings(TypedDict, total=False):
    """Keyword arguments of LLM: the fields of ModelConfig, CacheConfig and SchedulerConfig, described there."""

    served_model_name: str | Sequence[str]
    dtype: str
    device: str
    load_format: str
    seed: int
    max_model_len: int | None
    chat_template: str | None
    trust_remote_code: bool
    generation_config: str
    enforce_eager: bool
    enable_prefix_caching: bool
    block_size: int
    gpu_memory_utilization: float
    gpu_memory: float | None
    kv_cache_memory_bytes: int | str | None
    kv_cache_dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    shared_prefix_attention: bool


class TemplateOptions(TypedDict, total=False):
    """How ``LLM.chat`` renders a conversation. ``chat_template_kwargs`` are more variables for the template."""

    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: dict[str, Any] | None


class LLM:
    """A model with its cache, in this process.

    ``model`` is a folder in Hugging Face layout, a hub name or a GGUF file; None is the embedded model. ``settings``
    are named as in vLLM (see Settings). Raises ConfigError for a setting that is unknown or cannot work, ModelError
    for a model that cannot be run. Use it from one thread; ``close``, or the end of a ``with`` block, frees its memory.
    """

    def __init__(self, model: str | PathLike[str] | None = None, **settings: Unpack[Settings]) -> None:
        config = engine_config(settings)
        weights = config.model.load_format != "dummy"
        trusted = config.model.trust_remote_code
        source = resolve(model, trust_remote_code=trusted, weights=weights, progress=logger.info)
        names = config.model.served_model_name or (source.name,)
        placed = dataclasses.replace(config.model, model=str(source.folder), served_model_name=names)
        config = dataclasses.replace(config, model=placed)
        self._tokenizer = Tokenizer.load(source.folder)
        self._defaults = load_defaults(source.folder, config.model.generation_config, self._tokenizer)
        self._template = self._tokenizer.chat_template
        if config.model.chat_template is not None:
            self._template = read_template(config.model.chat_template, self._tokenizer.special_tokens)
        self._opened: Engine | None = Engine(config, load(config))
        self._ids = itertools.count()
        for warning in self.info.warnings:
            logger.warning("%s", warning)

    @property
    def info(self) -> EngineInfo:
        """The loaded model, its limits, and warnings about settings that could not be followed."""
        return self._engine.info

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate an answer to every prompt; returns them in the order of the prompts.

        ``sampling_params``: one for all, one for each, or None for the model's own defaults. A bad prompt raises
        InvalidRequest, with its index, before anything runs. A request that failed with its step has
        ``finish_reason`` "error" and the message as ``stop_reason``; the others are complete. Ctrl-C aborts all.
        ``use_tqdm`` shows a progress bar if stderr is a terminal.
        """
        items = _as_list(prompts)
        processors = []
        for index, (item, sampling) in enumerate(zip(items, self._sampling(sampling_params, len(items)), strict=True)):
            with _prompt_index(index):
                processors.append(self._processor(item, sampling))
        self._run(processors, use_tqdm)
        return [processor.output() for processor in processors]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template: Unpack[TemplateOptions],
    ) -> list[RequestOutput]:
        """Like ``generate``, for one conversation or a list of them, rendered by the model's chat template."""
        if unknown := set(template) - set(TemplateOptions.__annotations__):
            raise InvalidRequest(f"chat has no option {', '.join(sorted(unknown))}", param=min(unknown))
        if not _is_list(messages):
            raise InvalidRequest(
                f"messages must be a conversation or a list of them, got {messages!r:.80}", param="messages"
            )
        single = not messages or isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if single else messages
        prompts: list[Prompt] = []
        for index, conversation in enumerate(conversations):
            with _prompt_index(index):
                text = self._render(conversation, template)
                token_ids = self._tokenizer.encode(text, add_special_tokens=False)
                prompts.append({"prompt": text, "prompt_token_ids": token_ids})
        return self.generate(prompts, sampling_params, use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer: ``encode``, ``decode``, ``chat_template``."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a call without ``sampling_params``: generation_config.json, else vLLM's defaults."""
        return SamplingParams(**self._defaults.sampling)

    def reset_prefix_cache(self) -> bool:
        """Remove every cached prefix. Returns False, and removes nothing, while blocks are in use."""
        return self._engine.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """Current gauges, and counters since the start."""
        return self._engine.stats()

    def check(self) -> None:
        """Raise CacheInvariantError if a block of the cache is not accounted for."""
        self._engine.check()

    def close(self) -> None:
        """Free the memory of the model and the cache. The object cannot be used afterwards."""
        self._opened = None

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._opened is None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def _engine(self) -> Engine:
        if self._opened is None:
            raise EngineDead("this LLM is closed; make a new one")
        return self._opened

    # --- prompts to requests ----------------------------------------------------------------------------------------

    def _sampling(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * count
        if (
            not isinstance(given, Sequence)
            or len(given) != count
            or not all(isinstance(entry, SamplingParams) for entry in given)
        ):
            raise InvalidRequest(
                f"sampling_params must be one SamplingParams for all prompts or a list of {count}, one for each, "
                f"not {given!r:.80}",
                param="sampling_params",
            )
        return list(given)

    def _processor(self, prompt: Prompt, sampling: SamplingParams) -> OutputProcessor:
        text, token_ids, salt = self._read_prompt(prompt)
        if sampling.max_tokens == 0:
            raise InvalidRequest("max_tokens must be at least 1, or None for as many as fit", param="max_tokens")
        room = max(1, self.info.max_model_len - len(token_ids))  # the engine refuses a prompt that leaves none
        limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        request = Request(
            id=str(next(self._ids)),
            prompt_token_ids=token_ids,
            sampling=dataclasses.replace(sampling, max_tokens=limit),
            arrival=time.monotonic(),
            eos_token_ids=self._defaults.eos_token_ids,
            cache_salt=salt,
        )
        return OutputProcessor(request, self._tokenizer, text)

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, tuple[int, ...], str | None]:
        """Text (where there is one), token ids and cache salt."""
        if not isinstance(prompt, Mapping):
            prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
        if unknown := set(prompt) - _PROMPT_KEYS:
            names = ", ".join(sorted(map(str, unknown)))
            raise InvalidRequest(f"a prompt takes {', '.join(sorted(_PROMPT_KEYS))}, not {names}", param="prompt")
        text, token_ids, salt = (prompt.get(name) for name in ("prompt", "prompt_token_ids", "cache_salt"))
        if token_ids is None and isinstance(text, str):
            token_ids = self._tokenizer.encode(text)
        if not isinstance(token_ids, Sequence) or any(type(token) is not int for token in token_ids):
            raise InvalidRequest(
                f"a prompt is text, a list of token ids, or a dict with either, not {prompt!r:.80}", param="prompt"
            )
        if salt is not None and not (isinstance(salt, str) and 0 < len(salt) <= MAX_SALT_LENGTH):
            raise InvalidRequest(
                f"cache_salt must be text of 1 to {MAX_SALT_LENGTH} characters, got {salt!r:.80}", param="cache_salt"
            )
        return text, tuple(token_ids), salt

    def _render(self, conversation: Sequence[Message], options: TemplateOptions) -> str:
        if self._template is None:
            raise InvalidRequest(
                "the model has no chat template: give one as LLM(chat_template=...), or use generate", param="messages"
            )
        if not _is_list(conversation) or not all(isinstance(message, Mapping) for message in conversation):
            raise InvalidRequest("a conversation is a list of dicts with role and content", param="messages")
        if options.get("tools") and self._template.drops_tools:
            logger.warning("the chat template of this model ignores tools: the model will not see them")
        continues = options.get("continue_final_message", False)
        return self._template.render(
            [dict(message) for message in conversation],
            tools=options.get("tools"),
            add_generation_prompt=options.get("add_generation_prompt", not continues),
            continue_final_message=continues,
            kwargs=options.get("chat_template_kwargs"),
        )

    # --- running ----------------------------------------------------------------------------------------------------

    def _run(self, processors: list[OutputProcessor], use_tqdm: bool) -> None:
        running = {processor.request.id: processor for processor in processors}
        try:
            with _ProgressBar(len(processors), use_tqdm) as bar, _interrupts_between_steps() as stop_if_interrupted:
                for index, processor in enumerate(processors):
                    with _prompt_index(index):
                        self._engine.add(processor.request)
                while self._engine.has_work:
                    stop_if_interrupted()
                    for update in self._engine.step().updates:
                        # An unknown id belongs to an earlier call, aborted while this step was running.
                        if known := running.get(update.request_id):
                            bar.count(update, self._take(known, update), known.finished)
                    bar.show()
        except BaseException:
            for request_id in running:
                self._engine.abort(request_id)
            raise

    def _take(self, processor: OutputProcessor, update: SequenceUpdate) -> ChoiceDelta:
        delta = processor.update(update)
        if delta.stopped_by_string:
            self._engine.finish_choice(update.request_id, update.choice)
        if delta.finish_reason == FinishReason.ERROR:
            logger.error("request %s failed: %s", update.request_id, update.error)
        return delta


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list. A list of ints is one prompt of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not _is_list(prompts):
        raise InvalidRequest(f"prompts must be one prompt or a list of them, got {prompts!r:.80}", param="prompt")
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


@contextmanager
def _prompt_index(index: int) -> Iterator[None]:
    """Prefix an InvalidRequest raised inside with the index of the prompt."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"prompt {index}: {error.message}", param=error.param) from error


@contextmanager
def _interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Delay Ctrl-C until the caller asks for it, between two steps, where the engine's state is consistent.

    A second Ctrl-C interrupts at once. A SIGINT handler other than Python's own is left alone.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    pressed = False

    def note(signum: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    def stop_if_interrupted() -> None:
        if pressed:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield stop_if_interrupted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    stop_if_interrupted()


class _ProgressBar:
    """Progress on stderr: finished prompts, generated tokens per second, share of prompt tokens from the cache."""

    def __init__(self, total: int, wanted: bool) -> None:
        console = Console(stderr=True)
        self._done = self._generated = self._prompt_tokens = self._cached_tokens = 0
        self._started = time.monotonic()
        self._progress = Progress(
            TextColumn("prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:.1f} tokens/s, {task.fields[hit]:.0%} of prompt tokens from the cache"),
            TimeRemainingColumn(),
            console=console,
            disable=not (wanted and console.is_terminal),
        )
        self._task = self._progress.add_task("", total=total, rate=0.0, hit=0.0)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if not self._progress.disable:  # rich before 15 ends a disabled progress with an empty line
            self._progress.stop()

    def count(self, update: SequenceUpdate, delta: ChoiceDelta, finished: bool) -> None:
        self._generated += len(delta.token_ids)
        self._done += finished and delta.finish_reason is not None
        if update.prompt is not None:
            self._prompt_tokens += update.prompt.cache.prompt_tokens
            self._cached_tokens += update.prompt.cache.cached_tokens

    def show(self) -> None:
        self._progress.update(
            self._task,
            completed=self._done,
            rate=self._generated / max(time.monotonic() - self._started, 1e-9),
            hit=self._cached_tokens / max(self._prompt_tokens, 1),
        )
