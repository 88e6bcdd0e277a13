"""The prefix index: finds full blocks by hash, and the blocks that continue a prefix, for matches exact to the token.

::

    root ──► [The cat sat on] ──► [the mat and slept]      full blocks, found by their chained hash
                     │
                     └──────────► [the mat and]            an unfilled tail, found under its parent by its tokens

A prompt "The cat sat on the mat and purred" matches the first block by hash. No block has its second hash, so the
index looks among the blocks that continue the first one for the longest common beginning: "the mat and", which both of
them contain. Continuations are sorted by their tokens, so the longest common beginning is next to the position where
the wanted tokens would be inserted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from anaphora.cache.block import Block
from anaphora.cache.hashing import TOKEN_BYTES, BlockHash

NEIGHBOURS = 8
"""Continuations that ``neighbour`` and ``next_block`` look at, on each side of a position."""


@dataclass(frozen=True, slots=True)
class Match:
    """The longest indexed prefix of a prompt: ``tokens`` tokens.

    ``blocks`` are the full blocks in order; ``tail`` is a block whose first ``tokens - len(blocks) * block_size``
    tokens match too. ``pending`` is the hash of the next full block if a running sequence is about to compute it.
    """

    blocks: tuple[Block, ...] = ()
    tail: Block | None = None
    tokens: int = 0
    pending: BlockHash | None = None


def common_tokens(a: bytes | bytearray, b: bytes | bytearray) -> int:
    """Return the length in tokens of the common prefix of two packed token strings."""
    low, high = 0, min(len(a), len(b)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if a[: middle * TOKEN_BYTES] == b[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low


class PrefixIndex:
    """All indexed blocks.

    ``full`` maps hashes to full blocks. ``pending`` maps hashes that a running sequence is about to compute to that
    sequence's block table.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.full: dict[BlockHash, Block] = {}
        self.pending: dict[BlockHash, object] = {}
        # Computed blocks by parent: sorted (tokens, block id, block), and the one that was added last.
        self._continuations: dict[BlockHash, list[tuple[bytes, int, Block]]] = {}
        self._latest: dict[BlockHash, Block] = {}

    # --- looking up ------------------------------------------------------------------------------------------------

    def match(self, root: BlockHash, hashes: list[BlockHash], packed: bytes) -> Match:
        """Return the longest match of a prompt with these packed tokens and hashes of its full blocks."""
        size = self.block_size * TOKEN_BYTES
        blocks: list[Block] = []
        for digest in hashes:
            block = self.full.get(digest)
            if block is None:
                break
            blocks.append(block)
        held = b"".join([block.tokens for block in blocks])
        if not packed.startswith(held):  # two different blocks have the same digest
            del blocks[common_tokens(held, packed) // self.block_size :]
        found = len(blocks)
        tokens = found * self.block_size
        if found < len(hashes) and hashes[found] in self.pending:
            return Match(tuple(blocks), None, tokens, pending=hashes[found])
        if len(packed) == found * size:
            return Match(tuple(blocks), None, tokens)
        parent = hashes[found - 1] if found else root
        tail, more = self._longest_continuation(parent, packed[found * size : (found + 1) * size])
        return Match(tuple(blocks), tail, tokens + more)

    def _longest_continuation(self, parent: BlockHash, wanted: bytes) -> tuple[Block | None, int]:
        entries = self._continuations.get(parent)
        if not entries:
            return None, 0
        at = bisect_left(entries, (wanted, -1))
        best, length = None, 0
        for tokens, _, block in entries[max(at - 1, 0) : at + 1]:
            if (common := common_tokens(tokens, wanted)) > length:
                best, length = block, common
        return best, length

    def find_continuation(self, parent: BlockHash, tokens: bytes) -> Block | None:
        """Return a computed block that continues ``parent`` and begins with all of ``tokens``."""
        block, known = self._longest_continuation(parent, tokens)
        return block if known * TOKEN_BYTES == len(tokens) else None

    def computed_by(self, request_id: str, parents: Iterable[BlockHash]) -> list[Block]:
        """Return the blocks, full or not, that this request computed and that continue one of ``parents``."""
        found = (block for parent in parents for _, _, block in self._continuations.get(parent, ()))
        return [block for block in found if block.computed_by == request_id]

    def neighbour(self, parent: BlockHash, wanted: bytes, shared: int) -> Block | None:
        """Return a computed block under ``parent`` that shares the first ``shared`` tokens of ``wanted`` and continues.

        Of several, the one whose request came last, chosen among the block that was indexed last and the
        ``NEIGHBOURS`` blocks on each side of the position of ``wanted``.
        """
        entries = self._continuations.get(parent)
        if not entries:
            return None
        prefix = wanted[: shared * TOKEN_BYTES]
        at = bisect_left(entries, (wanted, -1))
        best = None
        for block in (
            self._latest.get(parent),
            *(block for _, _, block in entries[max(at - NEIGHBOURS, 0) : at + NEIGHBOURS]),
        ):
            if block is not None and block.filled > shared and block.tokens.startswith(prefix):
                best = block if best is None or block.arrival > best.arrival else best
        return best

    def next_block(self, block: Block) -> Block | None:
        """Return the block that follows a full block in the request that computed it.

        None also if it is not among the latest and the first ``NEIGHBOURS`` continuations.
        """
        if block.hash is None:
            return None
        entries = self._continuations.get(block.hash, ())
        candidates = [self._latest.get(block.hash), *(other for _, _, other in entries[:NEIGHBOURS])]
        return next((other for other in candidates if other and other.computed_by == block.computed_by), None)

    # --- adding and removing ---------------------------------------------------------------------------------------

    def add_full(self, block: Block, digest: BlockHash, parent: BlockHash, tokens: bytes) -> None:
        """Index a full block. It can be referenced from now on, and copied from once ``set_ready`` was called."""
        if block.indexed:
            self.remove(block)
        block.hash, block.parent, block.tokens, block.filled = digest, parent, tokens, self.block_size
        block.children = len(self._continuations.get(digest, ()))
        self.full[digest] = block

    def set_ready(self, block: Block) -> list[Block]:
        """Mark the block as computed. Returns the tails that are now redundant, since it begins with their tokens."""
        block.ready = True
        return self._add_continuation(block)

    def add_tail(self, block: Block, parent: BlockHash, tokens: bytes) -> list[Block] | None:
        """Index a computed unfilled block; call it again when its tokens have grown to ``tokens``.

        Returns the tails that are now redundant. Returns None, and does nothing, if another indexed block begins with
        all of its tokens.
        """
        _, known = self._longest_continuation(parent, tokens)
        if known * TOKEN_BYTES == len(tokens) and block.tokens != tokens:
            return None
        if block.indexed:
            self.remove(block)
        block.parent, block.tokens, block.filled = parent, tokens, len(tokens) // TOKEN_BYTES
        return self.set_ready(block)

    def _add_continuation(self, block: Block) -> list[Block]:
        assert block.parent is not None
        entries = self._continuations.setdefault(block.parent, [])
        at = bisect_left(entries, (block.tokens, block.id))
        redundant = []
        for tokens, _, other in reversed(entries[:at]):
            if other.hash or not block.tokens.startswith(tokens):
                break
            redundant.append(other)
        entries.insert(at, (block.tokens, block.id, block))
        self._latest[block.parent] = block
        if (parent := self.full.get(block.parent)) is not None:
            parent.children += 1
        return redundant

    def remove(self, block: Block) -> None:
        """Remove a block. Its continuations stay, and are found again once its own tokens are computed again."""
        assert block.parent is not None
        if block.hash is not None:
            del self.full[block.hash]
        if block.ready:
            entries = self._continuations[block.parent]
            at = bisect_left(entries, (block.tokens, block.id))
            assert entries[at][2] is block
            del entries[at]
            if not entries:
                del self._continuations[block.parent]
            if self._latest.get(block.parent) is block:
                del self._latest[block.parent]
            if (parent := self.full.get(block.parent)) is not None:
                parent.children -= 1
        block.clear()
        block.children = 0

    def faults(self) -> list[str]:
        """Return violated invariants of full and pending blocks."""
        faults = [f"hash {h.hex()[:8]} leads to {b}" for h, b in self.full.items() if b.hash != h]
        faults += [f"{b} is idle but not computed" for b in self.full.values() if not b.ready and not b.ref_count]
        faults += [f"pending {h.hex()[:8]} has a block" for h in self.pending if h in self.full]
        return faults
