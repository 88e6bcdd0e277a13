"""Ghosts: recently evicted blocks, by hash only. They tell why a prefix is gone and which size would have kept it.

In the order of recency an evicted block comes after everything that is cached. Between them lie the blocks that were
evicted later and have not been computed again: a cache with that many more blocks would have kept it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass

from anaphora.cache.hashing import BlockHash
from anaphora.cache.index import common_tokens

TAILS_PER_PARENT = 8


@dataclass(frozen=True, slots=True)
class Evicted:
    """One round of evictions: at ``time`` (clock seconds), to make room for request ``by``, whose root is ``root``."""

    time: float
    by: str
    root: BlockHash | None


class Ghosts:
    """The last ``4 * num_blocks`` evictions of full blocks, and up to ``num_blocks`` evicted unfilled tails.

    Each full block gets a serial number when it is evicted. ``distance`` is exact in caches of fewer than 128 blocks
    and precise to 1/64 of the cache in larger ones. Takes about 190 bytes of memory per ghost.
    """

    def __init__(self, num_blocks: int) -> None:
        self._capacity = 4 * num_blocks
        self._width = max(1, num_blocks // 64)
        self._count = 0
        self._serials: dict[BlockHash, int] = {}
        # Ring buffers, indexed by serial number modulo their length. _live counts ghosts per _width serial numbers.
        self._hashes: list[BlockHash] = []
        self._evictions: list[Evicted] = []
        self._live = [0] * (self._capacity // self._width + 2)
        self._tails: OrderedDict[BlockHash, list[tuple[bytes, Evicted]]] = OrderedDict()
        self._room_for_tails = num_blocks

    def add(self, digest: BlockHash, evicted: Evicted) -> None:
        """Record the eviction of a full block."""
        serial = self._count
        at = serial % self._capacity
        if serial < self._capacity:
            self._hashes.append(digest)
            self._evictions.append(evicted)
        else:
            oldest = self._hashes[at]
            if self._serials.get(oldest) == serial - self._capacity:
                self.discard(oldest)
            self._hashes[at], self._evictions[at] = digest, evicted
        bucket = self._bucket(serial)
        if serial % self._width == 0:
            self._live[bucket] = 0
        self._live[bucket] += 1
        self._serials[digest] = serial
        self._count += 1

    def discard(self, digest: BlockHash) -> None:
        """Forget a block that has been computed again."""
        if (serial := self._serials.pop(digest, None)) is not None:
            self._live[self._bucket(serial)] -= 1

    def find(self, digest: BlockHash) -> int | None:
        """Return the serial number of the block's eviction, or None if it is not a ghost."""
        return self._serials.get(digest)

    def eviction(self, serial: int) -> Evicted:
        """Return when and for whom the block of this serial number was evicted."""
        return self._evictions[serial % self._capacity]

    def distance(self, serial: int) -> int:
        """Return how many more blocks would have kept the ghosts from this serial number on."""
        if serial >= self._count:
            return 0
        first, last = self._bucket(serial), self._bucket(self._count - 1)
        live = self._live
        return sum(live[first : last + 1]) if first <= last else sum(live[first:]) + sum(live[: last + 1])

    def kept_by(self, more_blocks: int) -> int:
        """Return the lowest serial number that a cache with ``more_blocks`` more blocks would have kept."""
        serial = self._count
        while serial > max(0, self._count - self._capacity):
            start = (serial - 1) // self._width * self._width
            more_blocks -= self._live[self._bucket(start)]
            if more_blocks < 0:
                break
            serial = start
        return serial

    def _bucket(self, serial: int) -> int:
        return serial // self._width % len(self._live)

    # --- unfilled blocks -------------------------------------------------------------------------------------------

    def add_tail(self, parent: BlockHash, tokens: bytes, evicted: Evicted) -> None:
        """Record the eviction of an unfilled tail. Keeps the last ``TAILS_PER_PARENT`` of each parent."""
        tails = self._tails.setdefault(parent, [])
        self._tails.move_to_end(parent)
        tails.append((tokens, evicted))
        if len(tails) > TAILS_PER_PARENT:
            del tails[0]
        elif self._room_for_tails:
            self._room_for_tails -= 1
        else:
            _, dropped = self._tails.popitem(last=False)
            self._room_for_tails += len(dropped) - 1

    def find_tail(self, parent: BlockHash, wanted: bytes) -> tuple[int, Evicted] | None:
        """Return the evicted tail under ``parent`` that shares most tokens with ``wanted``: (shared tokens, eviction).

        Of several that share equally many, the latest.
        """
        shared = [(common_tokens(tokens, wanted), evicted) for tokens, evicted in self._tails.get(parent, ())]
        return max(reversed(shared), key=lambda entry: entry[0], default=None)

    # --- all ghosts ------------------------------------------------------------------------------------------------

    def faults(self, cached: Container[BlockHash]) -> list[str]:
        """Return violated invariants: no ghost is ``cached``, and the counts per bucket add up."""
        found = [f"ghost {digest.hex()[:8]} is cached" for digest in self._serials if digest in cached]
        if sum(self._live) != len(self._serials):
            found.append(f"{len(self._serials)} ghosts are counted as {sum(self._live)}")
        return found

    def clear(self) -> None:
        """Forget all ghosts."""
        self._serials.clear()
        self._room_for_tails += sum(map(len, self._tails.values()))
        self._tails.clear()
        self._live = [0] * len(self._live)
