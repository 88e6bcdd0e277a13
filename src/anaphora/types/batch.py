"""One step, between the engine and the model: Batch goes in, StepOutput comes out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from anaphora.types.sampling import SamplingParams


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
