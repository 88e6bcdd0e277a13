"""From a step's queries and groups to the lists that the kernels work through: integers only, on the host.

Every row's keys are cut into ranges, and rows that have a range in common are put into tiles, so that its keys are
read once a tile::

    decode rows   0 1 2 3    range of a group       -> tiles of several rows
                  0          its own keys           -> a tile of one row
    chunk         4 5 6 7    all keys up to the last -> tiles of neighbouring rows, causal within

Long ranges are cut further where there are too few tiles to keep the device busy. What a row got from its ranges is
merged afterwards; a row with a single range is written in place.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anaphora.attention.base import QueryRange
from anaphora.types.batch import PrefixGroup

Ints = NDArray[np.int32]

MIN_SPLIT_TOKENS = 128
"""A range is not cut into pieces of fewer keys."""

MIN_SHARED_KEYS = 256
"""A group of fewer keys is attended together only if that alone saves ``MIN_SAVED_BYTES``."""

MIN_SAVED_BYTES = 64 * 2**20
"""What a step's groups in large tiles must save of reads in each layer to make up for their launch. Measured on an
H200 (``benchmarks/attention.py``): 9 µs, in which it reads this much."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the kernels are launched: query heads of a KV head, query rows of a small and a large tile, programs.

    ``programs`` is how many of them, divided by the KV heads, keep the device busy; ``key_bytes`` is what a layer
    reads of a token.
    """

    heads_per_group: int
    small: int
    large: int
    programs: int
    key_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class WorkList:
    """The arrays of ``kernels.py``. ``parts`` counts the partial results, ``positions`` is of every row."""

    small: Ints
    large: Ints
    members: Ints
    merges: Ints
    positions: Ints
    tables: Ints
    parts: int


@dataclass(slots=True, eq=False)
class _Tiles:
    """Rows of equal length: ``rows`` are flat, in the order of the tiles."""

    table: list[Ints]
    begin: list[Ints]
    end: list[Ints]
    lowest: list[Ints]
    length: list[Ints]
    rows: list[Ints]
    direct: list[Ints]

    @classmethod
    def none(cls) -> _Tiles:
        return cls([], [], [], [], [], [], [])

    def add(self, rows: Ints, lengths: Ints, table: Ints, keys: tuple[Ints, Ints], lowest: Ints, direct: bool) -> None:
        self.rows.append(rows)
        self.length.append(lengths)
        self.table.append(table)
        self.begin.append(keys[0])
        self.end.append(keys[1])
        self.lowest.append(lowest)
        self.direct.append(np.full(len(lengths), direct, np.int32))


@dataclass(frozen=True, slots=True, eq=False)
class _Decodes:
    """The queries of length 1, ``[B]`` each; ``offsets`` is where their tables begin."""

    slots: Ints
    rows: Ints
    starts: Ints
    offsets: Ints


def plan(queries: Sequence[QueryRange], groups: Sequence[PrefixGroup], block_size: int, tiling: Tiling) -> WorkList:
    """Plan a step, whose queries lie side by side. Members of ``groups`` that are not of length 1 are passed over."""
    slots, rows, lengths, starts = (np.array(column, np.int32) for column in list(zip(*queries, strict=True))[:4])
    needed = -(-(starts + lengths) // block_size)
    offsets = np.cumsum(needed, dtype=np.int32) - needed
    tables = [_ints(query.blocks, count) for query, count in zip(queries, needed.tolist(), strict=True)]
    tiles = _Tiles.none()
    single = lengths == 1
    decodes = _Decodes(slots[single], rows[single], starts[single], offsets[single])
    _decode_tiles(tiles, decodes, groups, block_size, tiling)
    for index in np.flatnonzero(~single):
        _chunk_tiles(tiles, queries[index], int(offsets[index]), tiling)
    positions = np.arange(lengths.sum(), dtype=np.int32) + np.repeat(starts - rows, lengths)
    return _cut(tiles, positions, np.concatenate(tables), tiling)


def _ints(blocks: Sequence[int], count: int) -> Ints:
    """The first ``count``, without a copy where they lie in memory as 32-bit integers already."""
    if isinstance(blocks, array) and blocks.typecode == "i":
        return np.frombuffer(blocks, np.int32, count)
    return np.asarray(blocks[:count], np.int32)


def _decode_tiles(
    tiles: _Tiles, decodes: _Decodes, groups: Sequence[PrefixGroup], block_size: int, tiling: Tiling
) -> None:
    """Groups, from the beginning on, and what is left of each row."""
    rows, starts, offsets = decodes.rows, decodes.starts, decodes.offsets
    shared = np.zeros(len(rows), np.int32)  # keys of each row that groups cover
    places = {slot: index for index, slot in enumerate(decodes.slots.tolist())} if groups else {}
    size = tiling.large // tiling.heads_per_group
    for members, end in worthwhile(_members(groups, places), block_size, tiling):
        cuts = np.arange(0, len(members), size)
        lengths = np.minimum(size, len(members) - cuts).astype(np.int32)
        begin = np.full_like(lengths, shared[members[0]])
        lowest = np.minimum.reduceat(starts[members], cuts)
        table = np.full_like(lengths, offsets[members[0]])
        tiles.add(rows[members], lengths, table, (begin, np.full_like(lengths, end)), lowest, False)
        shared[members] = end
    one = np.ones(len(rows), np.int32)
    alone = shared == 0
    for direct in (True, False):
        some = np.flatnonzero(alone if direct else ~alone)
        if len(some):
            keys = (shared[some], starts[some] + 1)
            tiles.add(rows[some], one[some], offsets[some], keys, starts[some], direct)


def _members(groups: Sequence[PrefixGroup], places: dict[int, int]) -> list[tuple[PrefixGroup, Ints]]:
    """Groups from the beginning on, with those of their members that decode in this step."""
    found = []
    for group in sorted(groups, key=lambda g: g.first):
        members = np.array(sorted(places[slot] for slot in group.slots if slot in places), np.int32)
        if len(members) > 1:
            found.append((group, members))
    return found


def worthwhile(groups: Sequence[tuple[PrefixGroup, Ints]], block_size: int, tiling: Tiling) -> list[tuple[Ints, int]]:
    """The cost gate: (members, end of their shared keys) of the groups with which the step is no slower than without.

    Keys of a group left out go to the groups below it.
    """

    def saved(group: PrefixGroup, members: Ints) -> int:
        return (group.last - group.first) * block_size * (len(members) - 1) * tiling.key_bytes

    def is_large(members: Ints) -> bool:
        return len(members) * tiling.heads_per_group > tiling.small

    in_large = sum(saved(group, members) for group, members in groups if is_large(members))
    return [
        (members, group.last * block_size)
        for group, members in groups
        if (not is_large(members) or in_large >= MIN_SAVED_BYTES)
        and ((group.last - group.first) * block_size >= MIN_SHARED_KEYS or saved(group, members) >= MIN_SAVED_BYTES)
    ]


def _chunk_tiles(tiles: _Tiles, query: QueryRange, offset: int, tiling: Tiling) -> None:
    size = tiling.large // tiling.heads_per_group
    cuts = np.arange(0, query.length, size, dtype=np.int32)
    lengths = np.minimum(size, query.length - cuts).astype(np.int32)
    lowest = query.start + cuts
    rows = np.arange(query.row, query.row + query.length, dtype=np.int32)
    keys = (np.zeros_like(lengths), lowest + lengths)
    tiles.add(rows, lengths, np.full_like(lengths, offset), keys, lowest, True)


def _cut(tiles: _Tiles, positions: Ints, tables: Ints, tiling: Tiling) -> WorkList:
    """Cut the ranges into pieces and give each of a row's pieces its part."""
    table, begin, end, lowest, length, direct = map(
        np.concatenate, (tiles.table, tiles.begin, tiles.end, tiles.lowest, tiles.length, tiles.direct)
    )
    rows = np.concatenate(tiles.rows)
    keys = end - begin
    least = max(MIN_SPLIT_TOKENS, -(-int(keys.sum()) // tiling.programs))
    pieces = np.maximum(1, np.round(keys / least).astype(np.int32))
    direct &= pieces == 1
    first = np.cumsum(length) - length

    # Parts of a row lie side by side, in the order of its tiles.
    count = np.where(direct, 0, pieces).astype(np.int32)
    of_member = np.repeat(count, length)
    order = np.argsort(rows, kind="stable")
    place = np.zeros(len(rows), np.int32)
    place[order] = np.cumsum(of_member[order]) - of_member[order]
    members = np.stack((rows, place), axis=1)

    sums = np.bincount(rows, weights=of_member, minlength=len(positions)).astype(np.int32)
    merged = np.flatnonzero(sums).astype(np.int32)
    merges = np.stack((merged, (np.cumsum(sums) - sums)[merged].astype(np.int32), sums[merged]), axis=1)

    tile = np.repeat(np.arange(len(pieces)), pieces)
    piece = np.arange(len(tile)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    step = -(-keys // pieces)
    step = -(-step // 16) * 16
    starts = np.minimum(begin[tile] + piece * step[tile], end[tile])
    ends = np.minimum(starts + step[tile], end[tile])
    items = np.stack(
        (table[tile], starts, ends, lowest[tile], first[tile], length[tile], piece, direct[tile]), axis=1
    ).astype(np.int32)
    items = items[np.argsort(starts - ends, kind="stable")]  # the longest first
    small = items[:, 5] * tiling.heads_per_group <= tiling.small
    return WorkList(
        items[small],
        items[~small],
        members.astype(np.int32),
        merges.astype(np.int32),
        positions,
        tables,
        int(count @ length),
    )
