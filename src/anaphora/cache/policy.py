"""Eviction policies: the order in which idle blocks are evicted. One small class per policy."""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain
from typing import Protocol

from anaphora.cache.block import Block


class EvictionPolicy(Protocol):
    """Holds the idle blocks. ``victim`` only chooses; the caller removes.

    ``keep_recent(count)`` marks the ``count`` most recently used full blocks, for which ``is_recent`` is then true:
    the blocks that a cache with that many idle blocks would still hold.
    """

    def add(self, block: Block) -> None:
        """Insert a block as the most recently used."""

    def remove(self, block: Block) -> None:
        """Take out a block that is here."""

    def victim(self) -> Block:
        """Return the block to evict next."""

    def keep_recent(self, count: int) -> None:
        """Mark the ``count`` most recently used full blocks."""

    def is_recent(self, block: Block) -> bool:
        """Return whether ``keep_recent`` has marked the block."""

    def __len__(self) -> int: ...

    def __contains__(self, block: object) -> bool: ...


class LRU:
    """Least recently used first; leaves before their parents, unfilled tails before full blocks.

    A sequence releases its deepest block first, so a block is almost never older than its children, and the search
    for a leaf ends at the first entry. It continues only if a child is in use through a private copy of this block;
    if no idle block is a leaf, the oldest one is evicted.
    """

    def __init__(self) -> None:
        self._tails: OrderedDict[int, Block] = OrderedDict()
        # Full blocks: every block in _others was used before every block in _recent.
        self._others: OrderedDict[int, Block] = OrderedDict()
        self._recent: OrderedDict[int, Block] = OrderedDict()

    def add(self, block: Block) -> None:
        """Insert a block as the most recently used."""
        (self._recent if block.hash else self._tails)[block.id] = block

    def remove(self, block: Block) -> None:
        """Take out a block that is here."""
        order = self._tails if not block.hash else self._recent if block.id in self._recent else self._others
        del order[block.id]

    def victim(self) -> Block:
        """Return the block to evict next."""
        if self._tails:
            return next(iter(self._tails.values()))
        for block in chain(self._others.values(), self._recent.values()):
            if not block.children:
                return block
        return next(chain(self._others.values(), self._recent.values()))

    def keep_recent(self, count: int) -> None:
        """Mark the ``count`` most recently used full blocks, in time proportional to the change of ``count``."""
        others, recent = self._others, self._recent
        while len(recent) > count:
            id, block = recent.popitem(last=False)
            others[id] = block
        while len(recent) < count and others:
            id, block = others.popitem()
            recent[id] = block
            recent.move_to_end(id, last=False)

    def is_recent(self, block: Block) -> bool:
        """Return whether ``keep_recent`` has marked the block."""
        return block.id in self._recent

    def __len__(self) -> int:
        return len(self._tails) + len(self._others) + len(self._recent)

    def __contains__(self, block: object) -> bool:
        id = getattr(block, "id", None)
        return id in self._tails or id in self._others or id in self._recent
