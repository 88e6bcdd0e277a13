"""Eviction order of idle blocks, one small class a policy."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from anaphora.cache.pool import Block


class EvictionPolicy(Protocol):
    """Holds the idle blocks. ``victim`` chooses, the caller removes."""

    def add(self, block: Block) -> None: ...

    def remove(self, block: Block) -> None: ...

    def victim(self) -> Block: ...

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
        self._full: OrderedDict[int, Block] = OrderedDict()

    def _order(self, block: Block) -> OrderedDict[int, Block]:
        return self._full if block.hash else self._tails

    def add(self, block: Block) -> None:
        self._order(block)[block.id] = block

    def remove(self, block: Block) -> None:
        del self._order(block)[block.id]

    def victim(self) -> Block:
        if self._tails:
            return next(iter(self._tails.values()))
        for block in self._full.values():
            if not block.children:
                return block
        return next(iter(self._full.values()))

    def __len__(self) -> int:
        return len(self._tails) + len(self._full)

    def __contains__(self, block: object) -> bool:
        id = getattr(block, "id", None)
        return id in self._tails or id in self._full
