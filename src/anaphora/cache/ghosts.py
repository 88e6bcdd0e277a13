"""What was evicted of late, by name only: why a prompt lost its beginning, and what a larger cache would have kept.

An evicted block is farther down in the order of recency than all that is cached. The blocks evicted after it, without
those that came back since, stand between it and the cache: so many more blocks would have kept it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass

from anaphora.cache.hashing import BlockHash
from anaphora.cache.index import common_tokens

TAILS_A_PARENT = 8


@dataclass(frozen=True, slots=True)
class Evicted:
    """Blocks were given up at ``time`` (clock seconds) so that sequence ``by``, of root ``root``, could grow."""

    time: float
    by: str
    root: BlockHash | None


class Ghosts:
    """The last four times ``blocks`` evictions of full blocks, and as many of unfilled ones as there are blocks.

    Takes about 190 bytes for an evicted block. ``distance`` is exact for less than 128 blocks, else to a 64th of
    ``blocks``.
    """

    def __init__(self, blocks: int) -> None:
        self._capacity = 4 * blocks
        self._width = max(1, blocks // 64)
        self._count = 0
        self._serials: dict[BlockHash, int] = {}
        # By serial number, modulo their lengths; the last counts the ghosts of ``width`` serial numbers each.
        self._hashes: list[BlockHash] = []
        self._evictions: list[Evicted] = []
        self._live = [0] * (self._capacity // self._width + 2)
        self._tails: OrderedDict[BlockHash, list[tuple[bytes, Evicted]]] = OrderedDict()
        self._room_for_tails = blocks

    def add(self, digest: BlockHash, evicted: Evicted) -> None:
        """A full block has been evicted."""
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
        """The block has been computed again."""
        if (serial := self._serials.pop(digest, None)) is not None:
            self._live[self._bucket(serial)] -= 1

    def find(self, digest: BlockHash) -> int | None:
        """The serial number of the block's eviction."""
        return self._serials.get(digest)

    def eviction(self, serial: int) -> Evicted:
        return self._evictions[serial % self._capacity]

    def distance(self, serial: int) -> int:
        """The ghosts of this serial number and later ones: so many more blocks would have kept them all."""
        if serial >= self._count:
            return 0
        first, last = self._bucket(serial), self._bucket(self._count - 1)
        live = self._live
        return sum(live[first : last + 1]) if first <= last else sum(live[first:]) + sum(live[: last + 1])

    def kept_by(self, blocks: int) -> int:
        """The serial number from which on all ghosts would be kept if there were so many more blocks."""
        serial = self._count
        while serial > max(0, self._count - self._capacity):
            start = (serial - 1) // self._width * self._width
            blocks -= self._live[self._bucket(start)]
            if blocks < 0:
                break
            serial = start
        return serial

    def _bucket(self, serial: int) -> int:
        return serial // self._width % len(self._live)

    # --- unfilled blocks -------------------------------------------------------------------------------------------

    def add_tail(self, parent: BlockHash, tokens: bytes, evicted: Evicted) -> None:
        """An unfilled block has been evicted; a few are kept of each parent."""
        tails = self._tails.setdefault(parent, [])
        self._tails.move_to_end(parent)
        tails.append((tokens, evicted))
        if len(tails) > TAILS_A_PARENT:
            del tails[0]
        elif self._room_for_tails:
            self._room_for_tails -= 1
        else:
            _, dropped = self._tails.popitem(last=False)
            self._room_for_tails += len(dropped) - 1

    def find_tail(self, parent: BlockHash, wanted: bytes) -> tuple[int, Evicted] | None:
        """Of the unfilled blocks evicted under ``parent`` the last that shares most: how many tokens."""
        shared = [(common_tokens(tokens, wanted), evicted) for tokens, evicted in self._tails.get(parent, ())]
        return max(reversed(shared), key=lambda entry: entry[0], default=None)

    # --- the whole -------------------------------------------------------------------------------------------------

    def faults(self, cached: Container[BlockHash]) -> list[str]:
        """What does not balance: a ghost is not ``cached``, and each is counted where its serial number is."""
        found = [f"ghost {digest.hex()[:8]} is cached" for digest in self._serials if digest in cached]
        if sum(self._live) != len(self._serials):
            found.append(f"{len(self._serials)} ghosts are counted as {sum(self._live)}")
        return found

    def clear(self) -> None:
        """Forget all."""
        self._serials.clear()
        self._room_for_tails += sum(map(len, self._tails.values()))
        self._tails.clear()
        self._live = [0] * len(self._live)
