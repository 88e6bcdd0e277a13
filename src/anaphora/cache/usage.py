"""Which beginnings save most. A hit is counted where its match ends, so counting costs the same for any length.

::

    [system 900 hits] ──► [turn 1 7 hits] ──► [turn 2 2 hits]       counted: ends of matches
    [system 909     ] ──► [turn 1 9     ] ──► [turn 2 2     ]       asked for: all that pass through

What ends deeper passes through what is above it; that sum is made when somebody asks. An evicted block leaves its hits
to the block that it continued.
"""

from __future__ import annotations

from dataclasses import dataclass

from anaphora.cache.block import Block
from anaphora.cache.hashing import BlockHash
from anaphora.cache.index import PrefixIndex


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


class _Node:
    """A block where matches ended or ways meet; ``hits`` are first its own, then all that pass through."""

    __slots__ = ("above", "block", "depth", "hits", "last_hit", "root")

    def __init__(self, block: Block, depth: int) -> None:
        self.block = block
        self.depth = depth
        self.hits = block.hits
        self.last_hit = block.last_hit
        self.above: _Node | None = None
        self.root: BlockHash | None = None


class _Way:
    """The blocks from an end up to the first one that another way has, or to ``root``; ``nodes`` lie on it."""

    __slots__ = ("meets", "nodes", "root")

    def __init__(self) -> None:
        self.nodes: dict[int, _Node] = {}
        self.meets: _Node | None = None
        self.root: BlockHash | None = None

    def node(self, block: Block, depth: int) -> _Node:
        return self.nodes.setdefault(block.id, _Node(block, depth))

    def linked(self) -> list[_Node]:
        nodes = sorted(self.nodes.values(), key=lambda node: node.depth)
        above = self.meets
        for node in nodes:
            node.above, node.root = above, self.root
            above = node
        return nodes


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

        Takes time in proportion to the blocks that were ever hit: each is looked at once.
        """
        nodes = sorted(self._tree(), key=lambda node: node.depth)
        for node in reversed(nodes):
            if node.above is not None:
                node.above.hits += node.hits
                node.above.last_hit = max(node.above.last_hit, node.last_hit)
        found = []
        for node in nodes:
            above = node.above
            if above is not None:
                node.root = above.root
            if node.root == root:
                own = node.depth - (above.depth if above is not None else 0)
                found.append(Used(node.block, node.depth, own, node.hits, node.last_hit))
        return sorted(found, key=lambda used: (-used.saved, -used.last_hit))

    def _tree(self) -> list[_Node]:
        """Where matches ended and where the ways up from these ends meet, each with the next one above it."""
        self._ends = {id: block for id, block in self._ends.items() if block.hits}
        full = self._index.full
        ways: list[_Way] = []
        way_of: dict[int, _Way] = {}
        for end in self._ends.values():
            way = _Way()
            at: Block | None = end
            depth = end.depth
            while at is not None and at.id not in way_of:
                way_of[at.id] = way
                assert at.parent is not None
                way.root = at.parent
                at = full.get(at.parent)
                depth -= 1
            if at is not None:
                way.meets = way_of[at.id].node(at, depth)
            way_of[end.id].node(end, end.depth)
            ways.append(way)
        return [node for way in ways for node in way.linked()]

    def packed(self, block: Block) -> bytes:
        """The packed tokens of the beginning that ends in ``block``."""
        parts = []
        at: Block | None = block
        while at is not None:
            parts.append(at.tokens)
            assert at.parent is not None
            at = self._index.full.get(at.parent)
        return b"".join(reversed(parts))
