"""Which beginnings save most. A hit is counted where its match ends, so counting costs the same for any length.

::

    [system 900 hits] ──► [turn 1 7 hits] ──► [turn 2 2 hits]       counted: ends of matches
    [system 909     ] ──► [turn 1 9     ] ──► [turn 2 2     ]       asked for: all that pass through

What ends deeper passes through what is above it; that sum is made when somebody asks. An evicted block leaves its hits
to the block that it continued.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from anaphora.cache.hashing import BlockHash
from anaphora.cache.index import PrefixIndex
from anaphora.cache.pool import Block


@dataclass(frozen=True, slots=True)
class Used:
    """A beginning that ends in ``block`` with ``depth`` full blocks, ``own`` of them beyond the one that it extends.

    ``hits`` prompts reused all of it since it was computed, the last one at ``last_hit`` (clock seconds).
    """

    block: Block
    depth: int
    own: int
    hits: int
    last_hit: float

    @property
    def saved(self) -> int:
        """Blocks that were not computed, those of the beginning that it extends left out."""
        return self.hits * self.own


class Usage:
    """The hits of all indexed full blocks."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._ends: dict[int, Block] = {}

    def hit(self, blocks: tuple[Block, ...], now: float) -> None:
        """A prompt reuses these full blocks."""
        if blocks:
            self._add(blocks[-1], len(blocks), 1, now)

    def _add(self, block: Block, depth: int, hits: int, last_hit: float) -> None:
        block.hits += hits
        block.last_hit = max(block.last_hit, last_hit)
        block.depth = depth
        self._ends[block.id] = block

    def evicted(self, block: Block) -> None:
        """To be called while the index still knows the block."""
        if block.hits and block.parent is not None and (parent := self._index.full.get(block.parent)) is not None:
            self._add(parent, block.depth - 1, block.hits, block.last_hit)

    def shared(self, root: BlockHash) -> list[Used]:
        """The reused beginnings under ``root`` behind which prompts part or end, those first that save most.

        Takes time in proportion to the blocks that were ever hit.
        """
        through = self._sums()
        found: list[Used] = []
        open_ends = [(block, 1, 0) for block in self._index.continuations(root) if block.id in through]
        while open_ends:
            block, depth, above = open_ends.pop()
            assert block.hash is not None
            hits, last_hit = through[block.id]
            behind = [b for b in self._index.continuations(block.hash) if b.id in through]
            if hits > max((through[b.id][0] for b in behind), default=0):
                found.append(Used(block, depth, depth - above, hits, last_hit))
                above = depth
            open_ends += ((b, depth + 1, above) for b in behind)
        return sorted(found, key=lambda used: (-used.saved, -used.last_hit))

    def _sums(self) -> dict[int, tuple[int, float]]:
        """Block id to the hits that pass through it or end there, and the time of the last."""
        self._ends = {id: block for id, block in self._ends.items() if block.hits}
        levels: defaultdict[int, list[Block]] = defaultdict(list)
        through: dict[int, tuple[int, float]] = {}
        for block in self._ends.values():
            levels[block.depth].append(block)
            through[block.id] = block.hits, block.last_hit
        for depth in range(max(levels, default=0), 1, -1):
            for block in levels.pop(depth, ()):
                assert block.parent is not None
                if (parent := self._index.full.get(block.parent)) is None:
                    continue
                hits, last_hit = through[block.id]
                if parent.id not in through:
                    through[parent.id] = 0, 0.0
                    levels[depth - 1].append(parent)
                before, time = through[parent.id]
                through[parent.id] = before + hits, max(time, last_hit)
        return through

    def packed(self, block: Block) -> bytes:
        """The packed tokens of the beginning that ends in ``block``."""
        parts = []
        at: Block | None = block
        while at is not None:
            parts.append(at.tokens)
            assert at.parent is not None
            at = self._index.full.get(at.parent)
        return b"".join(reversed(parts))
