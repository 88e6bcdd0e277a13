"""What the engine gives to the faces, and the faces to the user."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from anaphora.types.batch import ModelInfo, TokenLogprobs
from anaphora.types.reports import CacheReport


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class PromptDone:
    """Sent with a request's first token. Seconds: in the queue, of those waiting for another's prefix, in prefill."""

    cache: CacheReport
    queue_s: float
    waited_s: float
    prefill_s: float
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class SequenceUpdate(NamedTuple):
    """What one step did for one choice of one request. ``token_ids`` is empty only with an error or an abort.

    ``stop_reason`` is the stop token's id where one of ``stop_token_ids`` ended it. ``time`` is time.monotonic().
    """

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    time: float
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt: PromptDone | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None


@dataclass(slots=True)
class EngineStats:
    """Gauges of this moment and counters since the start (never falling). Tokens unless said otherwise.

    A prompt counts once, when it is first scheduled: in ``queries`` with its length, in ``hits`` with its cached
    tokens, in ``requests_hit`` by ``is_hit``. ``misses`` counts requests by CacheReport.reason, ``isolated`` those that
    found nothing under their own salt and whose first block is cached under another. ``hits_half``, ``hits_twice`` and
    ``hits_four_times`` are what ``hits`` would be in a cache of other size. ``computed_prompt_tokens`` is the runner's
    count.
    """

    running: int = 0
    waiting: int = 0
    waiting_for_prefix: int = 0
    total_blocks: int = 0
    free_blocks: int = 0
    idle_cached_blocks: int = 0
    referenced_blocks: int = 0
    pinned_blocks: int = 0
    free_memory_bytes: int = 0
    queries: int = 0
    hits: int = 0
    requests: int = 0
    requests_hit: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    isolated: int = 0
    hits_half: int = 0
    hits_twice: int = 0
    hits_four_times: int = 0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    evicted_blocks: int = 0
    failed_steps: int = 0
    steps: int = 0
    last_step_tokens: int = 0
    prefill_seconds: float = 0.0
    prefill_seconds_saved: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the faces learn when the engine is ready. ``warnings`` say what was changed or cannot work as asked."""

    model: ModelInfo
    max_model_len: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """One message a step."""

    updates: tuple[SequenceUpdate, ...]
    stats: EngineStats


@dataclass(slots=True)
class CompletionOutput:
    """One choice. ``logprobs`` has one entry a token where asked for."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt, as vLLM's offline API names it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cache: CacheReport | None = None
