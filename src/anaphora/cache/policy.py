"""Eviction order of idle blocks, one small class a policy."""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from anaphora.cache.block import Block


class EvictionPolicy(Protocol):
    """Holds the idle blocks. ``victim`` chooses, the caller removes.

    ``keep_recent`` parts the full blocks in the ``count`` used last, of which ``is_recent`` is true, and the others.
    """

    def add(self, block: Block) -> None: ...

    def remove(self, block: Block) -> None: ...

    def victim(self) -> Block: ...

    def keep_recent(self, count: int) -> None: ...

    def is_recent(self, block: Block) -> bool: ...

    def __len__(self) -> int: ...

    def __contains__(self, block: object) -> bool: ...


class LRU:
    """Least recently used first, leaves before what they continue, unfilled tails before full blocks.

    A sequence releases its blocks deepest first, so a block is hardly ever older than what continues it, and the
    search for a leaf ends at the first entry. It goes on only where a continuation is in use through a private copy
    of this block; if no idle block is a leaf, the oldest goes.
    """

    def __init__(self) -> None:
        self._tails: OrderedDict[int, Block] = OrderedDict()
        # Full blocks: all of the first were used before all of the second.
        self._others: OrderedDict[int, Block] = OrderedDict()
        self._recent: OrderedDict[int, Block] = OrderedDict()

    def add(self, block: Block) -> None:
        (self._recent if block.hash else self._tails)[block.id] = block

    def remove(self, block: Block) -> None:
        order = self._tails if not block.hash else self._recent if block.id in self._recent else self._others
        del order[block.id]

    def victim(self) -> Block:
        if self._tails:
            return next(iter(self._tails.values()))
        for block in chain(self._others.values(), self._recent.values()):
            if not block.children:
                return block
        return next(chain(self._others.values(), self._recent.values()))

    def keep_recent(self, count: int) -> None:
        others, recent = self._others, self._recent
        while len(recent) > count:
            id, block = recent.popitem(last=False)
            others[id] = block
        while len(recent) < count and others:
            id, block = others.popitem()
            recent[id] = block
            recent.move_to_end(id, last=False)

    def is_recent(self, block: Block) -> bool:
        return block.id in self._recent

    def __len__(self) -> int:
        return len(self._tails) + len(self._others) + len(self._recent)

    def __contains__(self, block: object) -> bool:
        id = getattr(block, "id", None)
        return id in self._tails or id in self._others or id in self._recent
