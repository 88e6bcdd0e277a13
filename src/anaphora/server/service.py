"""What all routes share: the engine, the text side, the names, and the books of every request."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from anaphora.config import ServerConfig
from anaphora.errors import NotFound
from anaphora.observe.log import HitRates, LoadLog, describe_request
from anaphora.observe.metrics import Metrics
from anaphora.observe.record import RecordWriter, RequestRecord, add_block_hashes
from anaphora.server.api import prompts
from anaphora.server.api.answers import Answer, Engine, merge
from anaphora.server.api.protocol import ChatRequest, CompletionRequest, sampling_params
from anaphora.server.cache_api import prompt_positions
from anaphora.text import sandbox
from anaphora.text.chat_template import ChatTemplate
from anaphora.text.generation_config import GenerationDefaults
from anaphora.text.output_processor import ChoiceDelta
from anaphora.text.tokenizer import Tokenizer
from anaphora.types.outputs import EngineInfo, EngineStats, StepResult
from anaphora.types.reports import CacheReport, PinReport, Prefix, PrefixList
from anaphora.types.request import Request
from anaphora.types.sampling import SamplingParams

logger = logging.getLogger("anaphora.server")

R = TypeVar("R")

HELD_BYTES = 64
"""About what a prompt token keeps in memory until its record is written: its id, and its text where bodies are."""

WORKERS = 4
"""Threads that parse, render and encode: the tokenizer releases the interpreter lock, so a few are of use."""


class EngineFace(Engine, Protocol):
    """What the routes need of core.client.EngineClient."""

    info: EngineInfo
    stats: EngineStats
    dead: str | None
    on_step: list[Callable[[StepResult], None]]

    @property
    def hung(self) -> str | None: ...
    async def reset_prefix_cache(self) -> bool: ...
    async def pin(self, prefixes: Sequence[Prefix]) -> tuple[PinReport, ...]: ...
    async def unpin(self, prefixes: Sequence[Prefix] = (), ids: Sequence[str] = ()) -> tuple[PinReport, ...]: ...
    async def list_prefixes(self, cache_salt: str | None, limit: int) -> PrefixList: ...
    async def explain(self, request: Request) -> CacheReport: ...


@dataclass(frozen=True)
class TextSide:
    """Tokenizer, chat template (the model's or the one given at the start) and default sampling parameters."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: GenerationDefaults


@dataclass(frozen=True, slots=True)
class Call:
    """One checked API request: the parsed body, the body as plain values, and the ids that the client sees.

    ``arrival`` is time.monotonic() when the body was there.
    """

    request: Any
    plain: dict[str, Any]
    route: str
    arrival: float
    client_id: str | None
    created: int = field(default_factory=lambda: int(time.time()))
    unique: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True)
class Names:
    """``served`` are the model's names in the API, the first of which it answers under; ``root`` is its own."""

    served: tuple[str, ...]
    root: str


class Service:
    """One model behind the API. Belongs to the event loop that serves it."""

    def __init__(
        self, engine: EngineFace, text: TextSide, names: Names, config: ServerConfig, cache_config: dict[str, str]
    ) -> None:
        self.engine = engine
        self.text = text
        self.names = names.served
        self.root = names.root
        self.config = config
        self.started = int(time.time())
        self.in_flight = 0
        self.metrics = Metrics(engine.info, self.names[0], cache_config)
        self.recorder = RecordWriter(config.record) if config.record else None
        if self.recorder is not None:
            recorder = self.recorder
            self.metrics.count_dropped(lambda: recorder.dropped)
        self._rates = HitRates()
        self._threads = ThreadPoolExecutor(WORKERS, "text")
        self._aside = ThreadPoolExecutor(1, "aside")
        self.firm_pins: set[str] = set()
        """Ids of the pins whose prefixes were computed by the call that pinned them."""
        self._warned_of: set[str] = set()
        self._load_log = LoadLog(
            config.log_interval,
            lambda seconds, function: asyncio.get_running_loop().call_later(seconds, function),
            lambda: self.in_flight > 0,
            lambda: self._rates.describe(self.metrics.totals.read()),
        )
        self.metrics.totals.update(engine.stats)
        engine.on_step.append(self.metrics.step)

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    def close(self) -> None:
        self._load_log.close()
        for threads in (self._threads, self._aside):
            threads.shutdown(wait=False, cancel_futures=True)
        sandbox.shared().kill()  # a thread that waits for it would hold up the end
        if self.recorder is not None:
            self.recorder.close()

    async def in_thread(self, function: Callable[..., R], *args: Any) -> R:
        """Run what takes long (parsing, rendering, encoding) beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    async def aside(self, function: Callable[..., R], *args: Any) -> R:
        """As ``in_thread``, for texts of any length: one at a time, so that they hold up no answer."""
        return await asyncio.get_running_loop().run_in_executor(self._aside, function, *args)

    def model_name(self, asked: str | None) -> str:
        """The name to answer under; NotFound for a model that is not served."""
        if asked is not None and asked not in self.names:
            raise NotFound(
                f"the model {asked!r:.200} does not exist; this server has {', '.join(self.names)}", param="model"
            )
        return asked or self.names[0]

    # --- from a body to running answers -----------------------------------------------------------------------------

    async def answers(self, call: Call) -> list[Answer]:
        """The prompts of a call as engine requests that have not started yet."""
        ready = await self.in_thread(self.engine_requests, call)
        answers: list[Answer] = []
        for prompt, request in ready:
            first = len(answers) * request.sampling.n
            answers.append(Answer(request, prompt, self.text.tokenizer, first, call.request))
        return answers

    def run(self, call: Call, answers: Sequence[Answer]) -> AsyncGenerator[ChoiceDelta, None]:
        """Start the answers and give their pieces as they come."""
        self._load_log.touch()
        about: dict[str, Any] = {
            "model": self.names[0],
            "route": call.route,
            "client_id": call.client_id or "",
            "stream": bool(call.request.stream),
            "block_size": self.info.model.block_size,
            "body": self._recorded_body(call.plain),
        }
        streams = [answer.pieces(self.engine, self, about) for answer in answers]
        return streams[0] if len(streams) == 1 else merge(streams)

    def engine_requests(self, call: Call) -> list[tuple[prompts.Prompt, Request]]:
        """The prompts of a call, each with what the engine is asked. For a worker thread."""
        body: ChatRequest | CompletionRequest = call.request
        tokenizer, defaults = self.text.tokenizer, self.text.defaults
        sampling = sampling_params(body, defaults.sampling)
        sampling.check_vocabulary(self.info.model.vocab_size)
        self._warn(body, sampling)
        if isinstance(body, ChatRequest):
            limit = self.info.max_model_len if body.truncate_prompt_tokens is None else None
            given = [prompts.chat_prompt(body, tokenizer, self.text.template, limit)]
        else:
            given = prompts.completion_prompts(body, tokenizer, self.info.max_model_len)
        ready = []
        for index, prompt in enumerate(given):
            prompt, max_tokens = prompts.fit(prompt, sampling, body, self.info)
            request = Request(
                id=f"{internal_id(call)}-{index}" if len(given) > 1 else internal_id(call),
                prompt_token_ids=prompt.token_ids,
                sampling=dataclasses.replace(sampling, max_tokens=max_tokens),
                arrival=call.arrival,
                eos_token_ids=defaults.eos_token_ids,
                cache_salt=body.cache_salt,
            )
            ready.append((prompt, request))
        return ready

    def _warn(self, body: ChatRequest | CompletionRequest, sampling: SamplingParams) -> None:
        """Of what a client may not know, once each: tools that are not shown, prompts that reuse nothing."""
        template = self.text.template
        if isinstance(body, ChatRequest) and body.tools and template is not None and template.drops_tools:
            self._warn_once("requests give tools, but the chat template leaves them out: the model never sees them")
        if sampling.prompt_logprobs is not None:
            self._warn_once(
                "requests ask for prompt_logprobs (or echo with logprobs), which need every position computed: they "
                "reuse nothing of the cache. Send them to a server of their own, or ask for logprobs of the answer"
            )

    def _warn_once(self, text: str) -> None:
        if text not in self._warned_of:
            self._warned_of.add(text)
            logger.warning("%s", text)

    def _recorded_body(self, plain: dict[str, Any]) -> dict[str, Any] | None:
        """The body for the log; the salt never gets there."""
        if self.recorder is None or not self.config.record_prompts:
            return None
        return {name: value for name, value in plain.items() if name != "cache_salt"}

    # --- what answers report (server.answers.Observer) --------------------------------------------------------------

    def prompt_done(self, prompt_tokens: int, cached_tokens: int) -> None:
        self._rates.add(prompt_tokens, cached_tokens)

    def token_gap(self, seconds: float) -> None:
        self.metrics.token_gap(seconds)

    def finished(self, record: RequestRecord, answer: Answer) -> None:
        longest = max(len(choice.token_ids) for choice in answer.choices)
        self.metrics.request(record, max_tokens=answer.request.sampling.max_tokens or 0, longest=longest)
        logger.info("%s", describe_request(record))
        if self.recorder is not None:
            complete = functools.partial(self._complete, answer)
            self.recorder.write(record, complete, size=record.prompt_tokens * HELD_BYTES)

    def _complete(self, answer: Answer, record: RequestRecord) -> None:
        """What of a record takes long; runs in the recorder's thread."""
        add_block_hashes(self.info.model.identity, answer.request, record)
        if answer.body is not None and answer.done is not None:
            record.place = prompt_positions.find(self.text, answer.body, answer.prompt, answer.done.cache)


def public_id(call: Call, kind: str) -> str:
    """The id in the answer: the client's own where it gave one."""
    return f"{kind}-{call.client_id or call.unique}"


def internal_id(call: Call) -> str:
    """The engine's id, never the client's: two running requests may carry the same id of a client."""
    return f"{'chatcmpl' if isinstance(call.request, ChatRequest) else 'cmpl'}-{call.unique}"
