"""What the cache says of itself: why a lookup found no more, and what was given up for whom."""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass

from anaphora.cache.hashing import BlockHash


class Reason(enum.StrEnum):
    """Why a lookup did not find more. HIT: nothing more was ever there to find."""

    HIT = "hit"
    COLD = "cold"
    DIVERGED = "diverged"
    EVICTED = "evicted"
    BYPASSED = "bypassed"


@dataclass(frozen=True, slots=True)
class Evicted:
    """A full block was given up at ``time`` (clock seconds) so that sequence ``by``, of root ``root``, could grow."""

    time: float
    by: str
    root: BlockHash | None


class Ghosts:
    """The hashes of recently evicted full blocks, oldest forgotten first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._evicted: OrderedDict[BlockHash, Evicted] = OrderedDict()

    def add(self, digest: BlockHash, evicted: Evicted) -> None:
        self._evicted[digest] = evicted
        self._evicted.move_to_end(digest)
        if len(self._evicted) > self._capacity:
            self._evicted.popitem(last=False)

    def discard(self, digest: BlockHash) -> None:
        self._evicted.pop(digest, None)

    def get(self, digest: BlockHash) -> Evicted | None:
        return self._evicted.get(digest)

    def clear(self) -> None:
        self._evicted.clear()
