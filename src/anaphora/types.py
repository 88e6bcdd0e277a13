"""What passes between the parts: plain values, standard library only, encodable as messages."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from anaphora.errors import InvalidRequest

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_LOGIT_BIAS = 1024
MAX_SALT_LENGTH = 256
HIT_TOKENS = 16
"""From so many reused tokens on a request counts as a hit: fewer are what a chat template puts before every prompt."""


def _number(name: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    """Refuse what is no finite number within ``[low, high]`` (or ``(low, high]``)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidRequest(f"{name} must be a finite number, got {value!r:.80}", param=name)
    if value > high or value < low or (low_open and value == low):
        edge = f"above {low:g}" if low_open else f"at least {low:g}"
        top = "" if math.isinf(high) else f" and at most {high:g}"
        raise InvalidRequest(f"{name} must be {edge}{top}, got {value!r}", param=name)


def _flag(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false, got {value!r:.80}", param=name)


def _integer(name: str, value: int | None, low: int, high: float = math.inf, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, got {value!r:.80}", param=name)
    _number(name, value, low, high)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token. Names and defaults are vLLM's; out-of-range values raise InvalidRequest.

    ``max_tokens`` None means: as many as the window allows. ``top_k`` 0 or -1 means all. ``logprobs`` k reports
    the sampled token and the k most likely at each generated position, ``prompt_logprobs`` the same for the prompt.
    The noise of a draw is a function of (seed + choice, position) alone, so a seeded request gives the same tokens
    in any batch.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_CHOICES)
        _number("temperature", self.temperature, 0, 100)
        _number("top_p", self.top_p, 0, 1, low_open=True)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("min_p", self.min_p, 0, 1)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _integer("seed", self.seed, -(2**63), 2**63 - 1, optional=True)
        for name in ("include_stop_str_in_output", "skip_special_tokens", "ignore_eos"):
            _flag(name, getattr(self, name))
        _integer("max_tokens", self.max_tokens, 0, optional=True)
        _integer("min_tokens", self.min_tokens, 0)
        _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, optional=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}", param="min_tokens"
            )
        self._check_bias()
        self._check_stop()

    def _check_bias(self) -> None:
        if self.logit_bias is None:
            object.__setattr__(self, "logit_bias", {})
        if not isinstance(self.logit_bias, dict):
            raise InvalidRequest(
                f"logit_bias maps token ids to numbers, got {self.logit_bias!r:.80}", param="logit_bias"
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"logit_bias takes at most {MAX_LOGIT_BIAS} entries, got {len(self.logit_bias)}", param="logit_bias"
            )
        for token, bias in self.logit_bias.items():
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise InvalidRequest(f"logit_bias takes token ids as keys, got {token!r:.80}", param="logit_bias")
            _number("logit_bias", bias, -100, 100)
        if not isinstance(self.allowed_token_ids, (list, tuple, type(None))):
            raise InvalidRequest(
                f"allowed_token_ids must be a list, got {self.allowed_token_ids!r:.80}", param="allowed_token_ids"
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids must not be empty", param="allowed_token_ids")

    def _check_stop(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            given = getattr(self, name)
            if not isinstance(given, (list, tuple, type(None))):
                raise InvalidRequest(f"{name} must be a list, got {given!r:.80}", param=name)
            object.__setattr__(self, name, tuple(given or ()))
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}", param="stop")
        for text in self.stop:
            if not isinstance(text, str) or not text or len(text) > MAX_STOP_LENGTH:
                raise InvalidRequest(
                    f"stop strings must be text of 1 to {MAX_STOP_LENGTH} characters, got {text!r:.80}", param="stop"
                )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids outside ``range(vocab_size)``, naming the field."""
        named: tuple[tuple[str, Seq[int]], ...] = (
            ("logit_bias", tuple(self.logit_bias)),
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
        )
        for name, ids in named:
            for token in ids:
                if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                    raise InvalidRequest(
                        f"{name} holds token id {token!r}; this model's ids run from 0 to {vocab_size - 1}", param=name
                    )


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt as the engine takes it. ``arrival`` is time.monotonic(); ``sampling.max_tokens`` is a number here.

    ``eos_token_ids`` end a choice unless ``sampling.ignore_eos``. ``read_cache`` False computes the whole prompt
    (it may still be stored); a request with prompt_logprobs is treated so in any case.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival: float
    eos_token_ids: tuple[int, ...] = ()
    cache_salt: str | None = None
    read_cache: bool = True


# --- Engine to model: one step ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Join:
    """A sequence takes a slot; everything that the sampler must know of it. Valid until another Join of the slot.

    ``token_ids`` are the tokens known at that time: the prompt (its first ``num_prompt``) and, after a preemption,
    what was generated. ``block_table`` is its first block ids; chunks add to it.
    """

    slot: int
    sampling: SamplingParams
    choice: int
    token_ids: tuple[int, ...]
    num_prompt: int
    eos_token_ids: tuple[int, ...]
    block_table: tuple[int, ...]


class Chunk(NamedTuple):
    """Tokens of one sequence to compute in a step: positions ``start`` to ``start + length - 1``.

    ``token_ids`` None (then length is 1) stands for the token sampled last in this slot. Keys and values of positions
    below ``write_from`` are in the cache already and must not be written (a full hit computes its last token only to
    get logits). ``table_changes`` are (index, block id) to set in the slot's block table before this step.
    ``sample`` says that this chunk reaches the last known token, so its last row yields a new one.
    """

    slot: int
    start: int
    length: int
    token_ids: tuple[int, ...] | None
    write_from: int
    table_changes: tuple[tuple[int, int], ...]
    sample: bool


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first ``filled`` token slots of block ``source`` to ``target``, all layers, before the step's writes."""

    source: int
    target: int
    filled: int


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Decode rows that share blocks: entries ``first`` to ``last - 1`` of the block tables of ``slots`` are the same.

    Groups nest as a tree: the ranges of one slot's groups are disjoint and, taken together, start at 0 without a gap;
    what lies behind is the slot's own.
    """

    first: int
    last: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. Order of execution: joins, copies, table changes, forward, sampling."""

    step: int
    joins: tuple[Join, ...]
    copies: tuple[BlockCopy, ...]
    chunks: tuple[Chunk, ...]
    groups: tuple[PrefixGroup, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token, its rank (1 = most likely) and the most likely ones, best first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Results of a step. ``tokens`` maps each sampling slot to its new token, ``logprobs`` where asked for.

    ``prompt_logprobs`` maps a slot to the entries for the tokens *after* the chunk's positions that are known prompt
    tokens, in order. ``prompt_tokens_computed`` is the runner's own count of the rows that it ran through the model
    for tokens that were given to it (not sampled in the slot).
    """

    step: int
    tokens: dict[int, int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    prompt_tokens_computed: int = 0


class Pending(Protocol):
    """A step on its way. ``result`` waits for it; it raises if the step failed."""

    def result(self) -> StepOutput: ...


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine and the server must know of a loaded model and its pool.

    ``num_blocks`` includes the null block (id 0), which padding writes to and which the cache never hands out.
    ``identity`` covers weights and KV dtype and is the root of every block hash. ``activation_bytes`` is what the
    largest step takes for a while, ``graph_bytes`` what CUDA graphs hold; both are 0 on a CPU.
    """

    name: str
    identity: str
    vocab_size: int
    window: int
    num_blocks: int
    block_size: int
    bytes_per_block: int
    dtype: str
    kv_dtype: str
    device: str
    weights_bytes: int = 0
    activation_bytes: int = 0
    graph_bytes: int = 0


class Runner(Protocol):
    """The model as the engine sees it. ``lookahead`` is how many steps may be submitted before a result is taken.

    ``warnings`` say what was changed while loading, or cannot work as asked.
    """

    info: ModelInfo
    lookahead: int
    warnings: tuple[str, ...]

    def submit(self, batch: Batch) -> Pending: ...

    def free_memory(self) -> int:
        """Free bytes of the device's memory (of the host's on a CPU)."""
        ...


# --- Engine to the faces ------------------------------------------------------------------------------------------


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Neighbour:
    """An earlier request of the same salt that begins like this one and then has other tokens.

    ``request_id`` is that of the request that computed them, ``seconds_ago`` when it came, ``token_ids`` some of what
    it has from the first other token on.
    """

    request_id: str
    seconds_ago: float
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Eviction:
    """Tokens that were cached once and had to go.

    ``by`` is the request that needed their block, empty where it has another salt. Of the prompt ``lost_tokens`` more
    would have hit in a cache that holds ``more_tokens`` more than this one; 0 where that is not known.
    """

    seconds_ago: float
    by: str
    lost_tokens: int
    more_tokens: int


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What one lookup found, and why not more. Fixed when the request is first scheduled.

    ``reason`` is one of cache.events.Reason; ``detail`` says it in words that hold nothing of another tenant.
    ``position`` is the first token that was not reused; ``waited`` says that the request waited for another's
    computation of the same prefix. ``neighbour`` is there where it diverged, ``eviction`` where it was evicted (but
    for a block that had no room for a copy), ``feature`` names the field or flag that bypassed the cache.
    """

    prompt_tokens: int
    cached_tokens: int
    reason: str
    detail: str = ""
    position: int = 0
    waited: bool = False
    neighbour: Neighbour | None = None
    eviction: Eviction | None = None
    feature: str = ""


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


@dataclass(frozen=True, slots=True)
class Prefix:
    """A beginning of prompts, as the commands on pins name it."""

    token_ids: tuple[int, ...]
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class PinReport:
    """A pinned beginning of ``tokens`` tokens, of which the first ``kept_tokens`` are computed and kept.

    ``new`` is False where it was pinned before. ``start`` and ``end``, in lists, are its first and last token ids,
    ``start`` all of them if few.
    """

    id: str
    tokens: int
    kept_tokens: int
    new: bool = False
    start: tuple[int, ...] = ()
    end: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A beginning that prompts reused: its ``tokens`` (whole blocks), and what that saved since it was computed.

    ``tokens_saved`` leaves out what the next shorter one in the list saved, so those of a list add up. ``idle_s`` is
    how long ago it was used. ``start`` and ``end`` are as in PinReport.
    """

    tokens: int
    hits: int
    tokens_saved: int
    idle_s: float
    pinned: bool
    start: tuple[int, ...]
    end: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefixList:
    """What one salt shares and has pinned. ``total`` counts the shared ones, of which those listed save most.

    ``pinned_blocks`` (of all salts) can be at most ``max_pinned_blocks``.
    """

    shared: tuple[SharedPrefix, ...]
    total: int
    pins: tuple[PinReport, ...]
    pinned_blocks: int
    max_pinned_blocks: int


def is_hit(prompt_tokens: int | None, cached_tokens: int) -> bool:
    """Whether a request counts as a hit: HIT_TOKENS reused, or, of a shorter prompt, all but its last token."""
    enough = HIT_TOKENS if prompt_tokens is None else max(1, min(HIT_TOKENS, prompt_tokens - 1))
    return cached_tokens >= enough


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


# --- The faces to the user ----------------------------------------------------------------------------------------


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
