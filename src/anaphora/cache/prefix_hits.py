"""Hits per prefix: which prefixes save the most computation.

A hit is counted in the block where the match ended, so counting costs the same for any length of match::

    [system 900 hits] ──► [turn 1 7 hits] ──► [turn 2 2 hits]       counted: matches that end in the block
    [system 909     ] ──► [turn 1 9     ] ──► [turn 2 2     ]       reported: all matches that contain the block

The sums are made when somebody asks. An evicted block passes its hits on to its parent.
"""

from __future__ import annotations

from dataclasses import dataclass

from anaphora.cache.block import Block
from anaphora.cache.hashing import BlockHash
from anaphora.cache.index import PrefixIndex


@dataclass(frozen=True, slots=True)
class ReusedPrefix:
    """A prefix of ``depth`` full blocks that ends in ``block``; ``own`` of them follow the next shorter reused prefix.

    ``hits`` prompts have reused all of it since it was computed, the last one at ``last_hit`` (clock seconds).
    """

    block: Block
    depth: int
    own: int
    hits: int
    last_hit: float

    @property
    def saved(self) -> int:
        """Blocks that did not have to be computed, without those saved by the next shorter reused prefix."""
        return self.hits * self.own


class _Node:
    """A block where matches ended or where paths join; ``hits`` includes, in the end, all below it."""

    __slots__ = ("block", "depth", "hits", "last_hit", "parent", "root")

    def __init__(self, block: Block, depth: int) -> None:
        self.block = block
        self.depth = depth
        self.hits = block.hits
        self.last_hit = block.last_hit
        self.parent: _Node | None = None
        self.root: BlockHash | None = None


class _PrefixPath:
    """The path from a match's end up to the first block of another path, ``joins``, or to the root, ``root``."""

    __slots__ = ("joins", "nodes", "root")

    def __init__(self) -> None:
        self.nodes: dict[int, _Node] = {}
        self.joins: _Node | None = None
        self.root: BlockHash | None = None

    def node(self, block: Block, depth: int) -> _Node:
        """Return the path's node for a block, made if there is none yet."""
        return self.nodes.setdefault(block.id, _Node(block, depth))

    def linked(self) -> list[_Node]:
        """Return the nodes from top to bottom, each linked to its parent."""
        nodes = sorted(self.nodes.values(), key=lambda node: node.depth)
        parent = self.joins
        for node in nodes:
            node.parent, node.root = parent, self.root
            parent = node
        return nodes


class PrefixHits:
    """Counts the hits of all indexed full blocks."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._ends: dict[int, Block] = {}

    def add(self, blocks: tuple[Block, ...], now: float) -> None:
        """Count a prompt that reuses these full blocks."""
        if blocks:
            self._add(blocks[-1], len(blocks), 1, now)

    def _add(self, block: Block, depth: int, hits: int, last_hit: float) -> None:
        block.hits += hits
        block.last_hit = max(block.last_hit, last_hit)
        block.depth = depth
        self._ends[block.id] = block

    def evicted(self, block: Block) -> None:
        """Pass a block's hits on to its parent. Called while the index still contains the block."""
        if block.hits and block.parent is not None and (parent := self._index.full.get(block.parent)) is not None:
            self._add(parent, block.depth - 1, block.hits, block.last_hit)

    def reused(self, root: BlockHash) -> list[ReusedPrefix]:
        """Return the reused prefixes under ``root`` where prompts part or end, those that save most first.

        Takes time in proportion to the number of blocks that were ever hit.
        """
        nodes = sorted(self._tree(), key=lambda node: node.depth)
        for node in reversed(nodes):
            if node.parent is not None:
                node.parent.hits += node.hits
                node.parent.last_hit = max(node.parent.last_hit, node.last_hit)
        found = []
        for node in nodes:
            parent = node.parent
            if parent is not None:
                node.root = parent.root
            if node.root == root:
                own = node.depth - (parent.depth if parent is not None else 0)
                found.append(ReusedPrefix(node.block, node.depth, own, node.hits, node.last_hit))
        return sorted(found, key=lambda prefix: (-prefix.saved, -prefix.last_hit))

    def _tree(self) -> list[_Node]:
        """Return the blocks where matches ended or where their paths to the root join, linked to their parents."""
        self._ends = {id: block for id, block in self._ends.items() if block.hits}
        full = self._index.full
        paths: list[_PrefixPath] = []
        path_of: dict[int, _PrefixPath] = {}
        for end in self._ends.values():
            path = _PrefixPath()
            at: Block | None = end
            depth = end.depth
            while at is not None and at.id not in path_of:
                path_of[at.id] = path
                assert at.parent is not None
                path.root = at.parent
                at = full.get(at.parent)
                depth -= 1
            if at is not None:
                path.joins = path_of[at.id].node(at, depth)
            path_of[end.id].node(end, end.depth)
            paths.append(path)
        return [node for path in paths for node in path.linked()]

    def prefix_tokens(self, block: Block) -> bytes:
        """Return the packed tokens of the prefix that ends in ``block``."""
        parts = []
        at: Block | None = block
        while at is not None:
            parts.append(at.tokens)
            assert at.parent is not None
            at = self._index.full.get(at.parent)
        return b"".join(reversed(parts))
