"""One step, between the engine and the model: a Batch goes in, a StepOutput comes out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from anaphora.types.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Join:
    """A sequence starts to run in a slot, with all that the sampler needs. Valid until the slot's next Join.

    ``token_ids`` are the tokens known by now: the prompt (the first ``num_prompt``) and, after a preemption, the
    generated ones. ``block_table`` holds the first block ids; chunks add to it.
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

    - ``token_ids``: None (then ``length`` is 1) for the token that was sampled last in this slot
    - ``write_from``: keys and values of positions below it are cached already and must not be written (a full hit
      computes its last token only to get logits)
    - ``table_changes``: (index, block id) pairs to set in the slot's block table before this step
    - ``sample``: the chunk ends with the last known token, so a new token is sampled from its last row
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
    """Copy the first ``filled`` slots of block ``source`` to ``target``, in all layers, before the forward pass."""

    source: int
    target: int
    filled: int


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Decode rows that share blocks: entries ``first`` to ``last - 1`` of the block tables of ``slots`` are the same.

    Groups form a tree: the ranges of one slot's groups follow each other from 0 without a gap; the blocks after them
    belong to the slot alone.
    """

    first: int
    last: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. It is executed in this order: joins, copies, table changes, forward pass, sampling."""

    step: int
    joins: tuple[Join, ...]
    copies: tuple[BlockCopy, ...]
    chunks: tuple[Chunk, ...]
    groups: tuple[PrefixGroup, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token, its rank (1: most likely), and ``top``: (token id, logprob), most likely first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Results of a step, by slot.

    - ``tokens``: the new token of each chunk with ``sample``; ``logprobs``: for chunks whose requests asked for them
    - ``prompt_logprobs``: entries for the prompt tokens that *follow* the chunk's positions, in order
    - ``prompt_tokens_computed``: the runner's own count of rows that it computed for given (not sampled) tokens
    """

    step: int
    tokens: dict[int, int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    prompt_tokens_computed: int = 0


class Pending(Protocol):
    """A step in flight."""

    def result(self) -> StepOutput:
        """Wait for the step and return its results. Raises if the step failed."""
        ...


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine and the server need to know about a loaded model and its KV pool.

    - ``identity``: a name for weights and KV dtype; it enters the root of every block hash
    - ``context_length``: the longest sequence that the model supports, in tokens
    - ``num_blocks``: includes the null block (id 0), which padding writes to and the cache never allocates
    - ``activation_bytes``: temporary memory of the largest step; ``graph_bytes``: memory of CUDA graphs; 0 on a CPU
    """

    name: str
    identity: str
    vocab_size: int
    context_length: int
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
    """The model as the engine sees it.

    ``lookahead`` is how many further steps may be submitted before the result of one is taken. ``warnings`` say which
    settings were changed while loading or have no effect.
    """

    info: ModelInfo
    lookahead: int
    warnings: tuple[str, ...]

    def submit(self, batch: Batch) -> Pending:
        """Start a step."""
        ...

    def free_memory(self) -> int:
        """Return the free bytes of the device's memory (on a CPU: the host's)."""
        ...
