"""Plans a step's attention for the GPU: work items and merges as integer arrays, made on the host.

Each row's keys are cut into ranges. Rows that share a range are put into one tile, so its keys are read once per tile
and not once per row::

    decode rows   0 1 2 3    range of a prefix group  -> tiles of several rows
                  0          its own keys             -> a tile of one row
    chunk         4 5 6 7    all keys up to the last  -> tiles of neighbouring rows, causal inside the tile

Where there are too few tiles to keep the device busy, long ranges are split further (split-KV, as in FlashDecoding).
The partial results of a row are merged afterwards; a row with a single range is written directly.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anaphora.attention.base import QueryRange
from anaphora.types.batch import PrefixGroup

IntArray = NDArray[np.int32]

MIN_SPLIT_KEYS = 128
"""A range is not split into pieces of fewer keys."""

MIN_SHARED_KEYS = 256
"""A group with fewer shared keys is attended together only if it alone saves ``MIN_SAVED_BYTES``."""

MIN_SAVED_BYTES = 64 * 2**20
"""Reads that a step's groups in large tiles must save in each layer to pay for the extra launch.

Measured on an H200 (``benchmarks/attention.py``): the launch takes 9 µs, in which the device reads this much."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the kernels divide the work of a layer.

    ``queries_per_kv``: query heads per KV head. ``small_rows``, ``large_rows``: query rows times query heads per KV
    head in a small and a large tile. ``target_programs``: programs per KV head that keep the device busy.
    ``token_bytes``: bytes that a layer reads per token.
    """

    queries_per_kv: int
    small_rows: int
    large_rows: int
    target_programs: int
    token_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """A step's plan on the host; ``kernels/triton/attention.py`` describes the columns of the arrays.

    ``positions`` ``[T]`` holds the position of every row, ``tables`` all block tables one after the other.
    """

    small_items: IntArray
    large_items: IntArray
    item_rows: IntArray
    merges: IntArray
    positions: IntArray
    tables: IntArray
    num_partials: int

    @property
    def arrays(self) -> tuple[IntArray, ...]:
        """What is sent to the device, in this order."""
        return self.small_items, self.large_items, self.item_rows, self.merges, self.positions, self.tables


@dataclass(slots=True, eq=False)
class _Tiles:
    """Tiles under construction: each column has one entry per tile, ``rows`` the rows of all tiles in order."""

    table: list[IntArray]
    begin: list[IntArray]
    end: list[IntArray]
    lowest: list[IntArray]
    length: list[IntArray]
    rows: list[IntArray]
    direct: list[IntArray]

    @classmethod
    def empty(cls) -> _Tiles:
        return cls([], [], [], [], [], [], [])

    def add(
        self,
        rows: IntArray,
        lengths: IntArray,
        table: IntArray,
        keys: tuple[IntArray, IntArray],
        lowest: IntArray,
        direct: bool,
    ) -> None:
        """Append tiles of ``lengths`` rows; ``keys`` are each tile's first key and end of keys."""
        self.rows.append(rows)
        self.length.append(lengths)
        self.table.append(table)
        self.begin.append(keys[0])
        self.end.append(keys[1])
        self.lowest.append(lowest)
        self.direct.append(np.full(len(lengths), direct, np.int32))


@dataclass(frozen=True, slots=True, eq=False)
class _DecodeRows:
    """The queries of length 1, ``[B]`` each; ``offsets`` are the starts of their block tables in ``tables``."""

    slots: IntArray
    rows: IntArray
    starts: IntArray
    offsets: IntArray


def plan(
    queries: Sequence[QueryRange], groups: Sequence[PrefixGroup], block_size: int, tiling: Tiling
) -> AttentionPlan:
    """Plan one step. ``queries`` follow each other in the flat batch; of a group only queries of length 1 take part."""
    slots, rows, lengths, starts = (np.array(column, np.int32) for column in list(zip(*queries, strict=True))[:4])
    needed = -(-(starts + lengths) // block_size)
    offsets = np.cumsum(needed, dtype=np.int32) - needed
    tables = [_int_array(query.blocks, count) for query, count in zip(queries, needed.tolist(), strict=True)]
    tiles = _Tiles.empty()
    single = lengths == 1
    decodes = _DecodeRows(slots[single], rows[single], starts[single], offsets[single])
    _decode_tiles(tiles, decodes, groups, block_size, tiling)
    for index in np.flatnonzero(~single).tolist():
        _chunk_tiles(tiles, queries[index], int(offsets[index]), tiling)
    positions = np.arange(lengths.sum(), dtype=np.int32) + np.repeat(starts - rows, lengths)
    return _split_keys(tiles, positions, np.concatenate(tables), tiling)


def _int_array(blocks: Sequence[int], count: int) -> IntArray:
    """The first ``count`` block ids; no copy if they are an array of 32-bit integers already."""
    if isinstance(blocks, array) and blocks.typecode == "i":
        return np.frombuffer(blocks, np.int32, count)
    return np.asarray(blocks[:count], np.int32)


def _decode_tiles(
    tiles: _Tiles, decodes: _DecodeRows, groups: Sequence[PrefixGroup], block_size: int, tiling: Tiling
) -> None:
    """Add the tiles of the prefix groups, outermost first, then those of each row's remaining keys."""
    rows, starts, offsets = decodes.rows, decodes.starts, decodes.offsets
    shared = np.zeros(len(rows), np.int32)  # keys of each row that groups cover
    index_by_slot = {slot: index for index, slot in enumerate(decodes.slots.tolist())} if groups else {}
    size = tiling.large_rows // tiling.queries_per_kv
    for members, end in select_groups(_members(groups, index_by_slot), block_size, tiling):
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


def _members(groups: Sequence[PrefixGroup], index_by_slot: dict[int, int]) -> list[tuple[PrefixGroup, IntArray]]:
    """Groups by first block, each with the indices of its members that decode in this step."""
    found = []
    for group in sorted(groups, key=lambda g: g.first):
        members = np.array(sorted(index_by_slot[slot] for slot in group.slots if slot in index_by_slot), np.int32)
        if len(members) > 1:
            found.append((group, members))
    return found


def select_groups(
    groups: Sequence[tuple[PrefixGroup, IntArray]], block_size: int, tiling: Tiling
) -> list[tuple[IntArray, int]]:
    """The groups that are worth a shared read, as (members, end of their shared keys).

    The keys of a rejected group are left to the groups nested in it.
    """

    def saved(group: PrefixGroup, members: IntArray) -> int:
        return (group.last - group.first) * block_size * (len(members) - 1) * tiling.token_bytes

    def is_large(members: IntArray) -> bool:
        return len(members) * tiling.queries_per_kv > tiling.small_rows

    in_large = sum(saved(group, members) for group, members in groups if is_large(members))
    return [
        (members, group.last * block_size)
        for group, members in groups
        if (not is_large(members) or in_large >= MIN_SAVED_BYTES)
        and ((group.last - group.first) * block_size >= MIN_SHARED_KEYS or saved(group, members) >= MIN_SAVED_BYTES)
    ]


def _chunk_tiles(tiles: _Tiles, query: QueryRange, offset: int, tiling: Tiling) -> None:
    """Add the tiles of a chunk: neighbouring rows over all keys up to the last of them."""
    size = tiling.large_rows // tiling.queries_per_kv
    cuts = np.arange(0, query.length, size, dtype=np.int32)
    lengths = np.minimum(size, query.length - cuts).astype(np.int32)
    lowest = query.start + cuts
    rows = np.arange(query.row, query.row + query.length, dtype=np.int32)
    keys = (np.zeros_like(lengths), lowest + lengths)
    tiles.add(rows, lengths, np.full_like(lengths, offset), keys, lowest, True)


def _split_keys(tiles: _Tiles, positions: IntArray, tables: IntArray, tiling: Tiling) -> AttentionPlan:
    """Split long key ranges and number the partial results of each row."""
    table, begin, end, lowest, length, direct = map(
        np.concatenate, (tiles.table, tiles.begin, tiles.end, tiles.lowest, tiles.length, tiles.direct)
    )
    rows = np.concatenate(tiles.rows)
    keys = end - begin
    least = max(MIN_SPLIT_KEYS, -(-int(keys.sum()) // tiling.target_programs))
    splits = np.maximum(1, np.round(keys / least).astype(np.int32))
    direct &= splits == 1
    first = np.cumsum(length) - length

    # The partial results of a row follow each other, in the order of its tiles.
    count = np.where(direct, 0, splits).astype(np.int32)
    per_row = np.repeat(count, length)
    order = np.argsort(rows, kind="stable")
    first_partial = np.zeros(len(rows), np.int32)
    first_partial[order] = np.cumsum(per_row[order]) - per_row[order]
    item_rows = np.stack((rows, first_partial), axis=1)

    sums = np.bincount(rows, weights=per_row, minlength=len(positions)).astype(np.int32)
    merged = np.flatnonzero(sums).astype(np.int32)
    merges = np.stack((merged, (np.cumsum(sums) - sums)[merged].astype(np.int32), sums[merged]), axis=1)

    tile = np.repeat(np.arange(len(splits)), splits)
    split = np.arange(len(tile)) - np.repeat(np.cumsum(splits) - splits, splits)
    step = -(-keys // splits)
    step = -(-step // 16) * 16
    starts = np.minimum(begin[tile] + split * step[tile], end[tile])
    ends = np.minimum(starts + step[tile], end[tile])
    items = np.stack(
        (table[tile], starts, ends, lowest[tile], first[tile], length[tile], split, direct[tile]), axis=1
    ).astype(np.int32)
    items = items[np.argsort(starts - ends, kind="stable")]  # the longest first
    is_small = items[:, 5] * tiling.queries_per_kv <= tiling.small_rows
    return AttentionPlan(
        items[is_small],
        items[~is_small],
        item_rows.astype(np.int32),
        merges.astype(np.int32),
        positions,
        tables,
        int(count @ length),
    )
