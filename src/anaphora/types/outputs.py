"""What the engine returns to server and LLM, and LLM to the user."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from anaphora.types.batch import ModelInfo, TokenLogprobs
from anaphora.types.reports import CacheReport


class FinishReason(enum.StrEnum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class PromptDone:
    """Sent with a request's first token.

    Seconds: ``queue_s`` from arrival to the first scheduled chunk, ``waited_s`` of them waiting for another request to
    compute the same prefix, ``prefill_s`` from the first chunk to the first token.
    """

    cache: CacheReport
    queue_s: float
    waited_s: float
    prefill_s: float
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class SequenceUpdate(NamedTuple):
    """The result of one step for one choice of one request.

    ``token_ids`` is empty only on an error or abort, or with ``max_tokens`` 0. ``stop_reason`` is the stop token's id
    if one of ``stop_token_ids`` ended the choice. ``time`` is time.monotonic().
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


GAUGE_FIELDS = frozenset(
    {
        *("running", "waiting", "waiting_for_prefix", "total_blocks", "free_blocks", "idle_cached_blocks"),
        *("referenced_blocks", "pinned_blocks", "free_memory_bytes", "last_step_tokens"),
    }
)
"""Fields of EngineStats that are values of the moment; all others are counters and never decrease."""


@dataclass(slots=True)
class EngineStats:
    """Current gauges, and counters since the start, which never decrease.

    A prompt counts once, when it is first scheduled: ``queries`` adds its tokens, ``hits`` its cached tokens, and
    ``requests_hit`` the request if ``is_hit``. ``reasons`` counts requests by CacheReport.reason, hits included;
    ``isolated`` requests that matched nothing under their own salt but whose first block is cached under another one.
    ``hits_half``, ``hits_twice`` and ``hits_four_times`` are what ``hits`` would be in a cache of half, twice and four
    times the size.
    ``computed_prompt_tokens`` is the runner's own count.
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
    reasons: dict[str, int] = field(default_factory=dict)
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
    """What server and LLM learn when the engine is ready.

    ``warnings`` say which settings were changed or have no effect.
    """

    model: ModelInfo
    max_model_len: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of one step: updates of all its sequences, and the statistics after it."""

    updates: tuple[SequenceUpdate, ...]
    stats: EngineStats


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a RequestOutput. ``logprobs`` has one entry per token if the request asked for them."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt, with the names of vLLM's offline API. ``cache`` explains ``num_cached_tokens``."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cache: CacheReport | None = None
