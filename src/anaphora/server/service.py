"""What all routes share: engine, text components, model names, worker threads, metrics and the request log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from anaphora.config import ServerConfig
from anaphora.errors import NotFound
from anaphora.observe.log_lines import HitRates, LoadLog, describe_request
from anaphora.observe.metrics import Metrics
from anaphora.observe.record import Complete, RecordWriter, RequestRecord
from anaphora.text import sandbox
from anaphora.text.chat_template import ChatTemplate
from anaphora.text.generation_config import GenerationDefaults
from anaphora.text.tokenizer import Tokenizer
from anaphora.types.outputs import EngineInfo, EngineStats, SequenceUpdate, StepResult
from anaphora.types.reports import CacheReport, PinReport, Prefix, PrefixList
from anaphora.types.request import Request

logger = logging.getLogger("anaphora.server")

R = TypeVar("R")

HELD_BYTES_PER_TOKEN = 64
"""Approximate memory per prompt token until its record is written: the id, and the text if bodies are recorded."""

TEXT_THREADS = 4
"""Threads that parse, render and encode. The tokenizer releases the interpreter lock, so a few run in parallel."""


class Engine(Protocol):
    """What the routes need of remote.client.EngineClient; its docstrings say what each method does."""

    info: EngineInfo
    stats: EngineStats
    dead: str | None
    cache_fault: str | None
    on_step: list[Callable[[StepResult], None]]

    @property
    def hung(self) -> str | None: ...
    def generate(self, request: Request) -> AsyncGenerator[SequenceUpdate, None]: ...
    async def finish_choice(self, request_id: str, choice: int) -> None: ...
    async def reset_prefix_cache(self) -> bool: ...
    async def pin(self, prefixes: Sequence[Prefix]) -> tuple[PinReport, ...]: ...
    async def unpin(self, prefixes: Sequence[Prefix] = (), ids: Sequence[str] = ()) -> tuple[PinReport, ...]: ...
    async def list_prefixes(self, cache_salt: str | None, limit: int) -> PrefixList: ...
    async def explain(self, request: Request) -> CacheReport: ...


@dataclass(frozen=True)
class TextComponents:
    """Tokenizer, chat template (the model's or that of --chat-template) and default sampling parameters."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: GenerationDefaults


@dataclass(frozen=True)
class ModelNames:
    """``served`` are the model's names in the API, the first being the default; ``root`` is its own name."""

    served: tuple[str, ...]
    root: str


class Service:
    """One model behind the API. Belongs to the event loop that serves it.

    Args:
        engine: the engine client.
        text: tokenizer, template and sampling defaults.
        names: the model's names.
        config: the server's settings.
        cache_config: labels of the metric vllm:cache_config_info.
    """

    def __init__(
        self,
        engine: Engine,
        text: TextComponents,
        names: ModelNames,
        config: ServerConfig,
        cache_config: dict[str, str],
    ) -> None:
        self.engine = engine
        self.text = text
        self.names = names.served
        self.root = names.root
        self.config = config
        self.started = int(time.time())
        self.in_flight = 0
        self.completed_pins: set[str] = set()
        """Ids of the pins whose prefixes were computed in full by the request that pinned them."""
        self.metrics = Metrics(engine.info, self.names[0], cache_config)
        self.recorder = RecordWriter(config.record) if config.record else None
        if self.recorder is not None:
            recorder = self.recorder
            self.metrics.count_dropped(lambda: recorder.dropped)
        self._hit_rates = HitRates()
        self._text_threads = ThreadPoolExecutor(TEXT_THREADS, "text")
        self._background_thread = ThreadPoolExecutor(1, "background")
        self._warned: set[str] = set()
        self._load_log = LoadLog(
            config.log_interval,
            lambda seconds, function: asyncio.get_running_loop().call_later(seconds, function),
            lambda: self.in_flight > 0,
            lambda: self._hit_rates.describe(self.metrics.totals.read()),
        )
        self.metrics.totals.update(engine.stats)
        engine.on_step.append(self.metrics.step)

    @property
    def info(self) -> EngineInfo:
        """The engine's model and limits."""
        return self.engine.info

    def close(self) -> None:
        """Stops the threads, drops what they have not begun, and closes the request log. The engine stays open."""
        self._load_log.close()
        for threads in (self._text_threads, self._background_thread):
            threads.shutdown(wait=False, cancel_futures=True)
        sandbox.shared().kill()  # a thread that waits for it would delay the exit
        if self.recorder is not None:
            self.recorder.close()

    async def in_thread(self, function: Callable[..., R], *args: Any) -> R:
        """Runs ``function`` (parsing, rendering, encoding) outside the event loop and returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self._text_threads, function, *args)

    async def in_background_thread(self, function: Callable[..., R], *args: Any) -> R:
        """As ``in_thread``, one call at a time, for texts of any length: they must not delay other requests."""
        return await asyncio.get_running_loop().run_in_executor(self._background_thread, function, *args)

    def model_name(self, requested: str | None) -> str:
        """Returns the name for the response's ``model`` field. Raises NotFound for a model that is not served."""
        if requested is not None and requested not in self.names:
            raise NotFound(
                f"the model {requested!r:.200} does not exist; this server has {', '.join(self.names)}", param="model"
            )
        return requested or self.names[0]

    def warn_once(self, text: str) -> None:
        """Logs a warning the first time it is given."""
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)

    # --- per-request accounting -------------------------------------------------------------------------------------

    def request_started(self) -> None:
        """Starts the periodic load line."""
        self._load_log.touch()

    def prompt_done(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Counts a prompt, once, at its first token."""
        self._hit_rates.add(prompt_tokens, cached_tokens)

    def token_gap(self, seconds: float) -> None:
        """Counts the time between two tokens of one choice."""
        self.metrics.token_gap(seconds)

    def request_finished(self, record: RequestRecord, *, max_tokens: int, longest: int, complete: Complete) -> None:
        """Counts, logs and records a finished request.

        Args:
            record: what is known of it without work.
            max_tokens: its limit.
            longest: tokens of its longest choice.
            complete: fills in the record's other fields; runs in the recorder's thread.
        """
        self.metrics.request(record, max_tokens=max_tokens, longest=longest)
        logger.info("%s", describe_request(record))
        if self.recorder is not None:
            self.recorder.write(record, complete, size=record.prompt_tokens * HELD_BYTES_PER_TOKEN)
