"""Which block holds which tokens: full blocks by hash, and what continues a prefix, for matches to the token.

::

    root ──► [The cat sat on] ──► [the mat and slept]      full blocks, found by their chained hash
                     │
                     └──────────► [the mat and]            an unfilled tail, found under its parent by its tokens

A prompt "The cat sat on the mat and purred" takes the first block by hash. Nothing has its second block's hash, so the
blocks that continue the first one are asked for the longest common beginning: "the mat and", which ends inside either
of the two. Continuations are kept sorted by their tokens, so the longest common beginning stands next to the place
where the wanted tokens would be inserted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from anaphora.cache.block import Block
from anaphora.cache.hashing import TOKEN_BYTES, BlockHash

NEIGHBOURS = 8


@dataclass(frozen=True, slots=True)
class Match:
    """Longest indexed beginning of a prompt.

    ``blocks`` are full blocks in order. ``tail`` is a block of which ``tokens - len(blocks) * block_size`` more
    tokens match. ``wait`` is the hash of the next full block where a running sequence is about to compute it.
    """

    blocks: tuple[Block, ...] = ()
    tail: Block | None = None
    tokens: int = 0
    wait: BlockHash | None = None


def common_tokens(a: bytes | bytearray, b: bytes | bytearray) -> int:
    """Length in tokens of the common beginning of two packed token strings."""
    low, high = 0, min(len(a), len(b)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if a[: middle * TOKEN_BYTES] == b[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low


class PrefixIndex:
    """Hash to block, parent to continuations, and the hashes that somebody is about to compute (pending)."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.full: dict[BlockHash, Block] = {}
        self.pending: dict[BlockHash, object] = {}
        self._continuations: dict[BlockHash, list[tuple[bytes, int, Block]]] = {}
        self._latest: dict[BlockHash, Block] = {}

    def match(self, root: BlockHash, hashes: list[BlockHash], packed: bytes | None) -> Match:
        """Longest match of a prompt with these full-block hashes and packed tokens (None: full blocks only)."""
        size = self.block_size * TOKEN_BYTES
        blocks: list[Block] = []
        for digest in hashes:
            block = self.full.get(digest)
            if block is None:
                break
            blocks.append(block)
        found = len(blocks)
        if packed is not None:
            held = b"".join([block.tokens for block in blocks])
            if not packed.startswith(held):  # a digest that two blocks have in common
                found = common_tokens(held, packed) // self.block_size
                del blocks[found:]
        tokens = found * self.block_size
        if found < len(hashes) and hashes[found] in self.pending:
            return Match(tuple(blocks), None, tokens, wait=hashes[found])
        parent = hashes[found - 1] if found else root
        if packed is None or len(packed) == found * size:
            return Match(tuple(blocks), None, tokens)
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

    def holder(self, parent: BlockHash, tokens: bytes) -> Block | None:
        """A computed block that continues ``parent`` with all of these tokens."""
        block, known = self._longest_continuation(parent, tokens)
        return block if known * TOKEN_BYTES == len(tokens) else None

    def continuations(self, digest: BlockHash) -> Iterator[Block]:
        """The computed full blocks that continue a hash or a root."""
        return (block for _, _, block in self._continuations.get(digest, ()) if block.hash is not None)

    def made_by(self, key: str, parents: Iterable[BlockHash]) -> list[Block]:
        """The computed blocks, full or not, by which the sequence of that key went on from one of ``parents``."""
        found = (block for parent in parents for _, _, block in self._continuations.get(parent, ()))
        return [block for block in found if block.made_by == key]

    def neighbour(self, parent: BlockHash, wanted: bytes, shared: int) -> Block | None:
        """A computed block under ``parent`` that begins with the first ``shared`` tokens of ``wanted`` and goes on.

        Of several the one that was made last, chosen among the one that was indexed last and the ``NEIGHBOURS`` on
        either side of the place where ``wanted`` would be.
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
                best = block if best is None or block.made > best.made else best
        return best

    def continuation(self, block: Block) -> Block | None:
        """What follows a full block in the sequence that made it; None where that is not to be found quickly."""
        if block.hash is None:
            return None
        entries = self._continuations.get(block.hash, ())
        alike = [self._latest.get(block.hash), *(other for _, _, other in entries[:NEIGHBOURS])]
        return next((other for other in alike if other is not None and other.made_by == block.made_by), None)

    def add_full(self, block: Block, digest: BlockHash, parent: BlockHash, tokens: bytes = b"") -> None:
        """Index a full block; it can be referenced from now on, and copied from once it is ready."""
        if block.indexed:
            self.remove(block)
        block.hash, block.parent, block.tokens, block.filled = digest, parent, tokens, self.block_size
        block.children = len(self._continuations.get(digest, ()))
        self.full[digest] = block

    def set_ready(self, block: Block) -> list[Block]:
        """The block's contents are computed. Returns tails that it makes redundant (they are its beginning)."""
        block.ready = True
        return self._add_continuation(block)

    def add_tail(self, block: Block, parent: BlockHash, tokens: bytes) -> list[Block] | None:
        """Index a computed unfilled block, or what has been added to it since.

        Returns tails that it makes redundant; None (and nothing done) where all of its tokens are indexed already.
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
        """Forget a block. What continues it stays, and is found again when its own tokens are computed again."""
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
        block.forget()
        block.children = 0
