"""The compiled kernels of the CPU: rows that attend to their own keys in place, and the merge with what they share.

numba compiles them once and keeps the result beside this file, or in the user's cache folder. It notices a change of
this file only: after one of ``vectors.py``, touch this file. A kernel is a C function that gets the address of one
record. All threads call it at once; inside, they take items of work from a counter until none is left.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray, cfunc, from_dtype, types

from anaphora.attention.vectors import (
    BFLOAT16,
    FLOAT32,
    OPTIONS,
    accumulate,
    add_scaled,
    atomic_add,
    bfloat16,
    dots,
    exp,
    float32,
    from_float32,
    inline,
    int32,
    int64,
    padded,
    padded_size,
    prefetch,
    put_float32,
    put_int64,
    put_uint16,
    put_zeros,
    scale,
    to_float32,
    uint16,
)

TILE = 32
"""Keys of which the scores are known at once; a multiple of 4."""

WRITE_ROWS = 32
"""New tokens that are written to the pool as one item of work."""

ATTEND = np.dtype(
    [
        (name, np.int64)
        for name in (
            "counters",  # items taken, threads come, then for each row the segments that are left
            "segments",  # int32 [segments, 3]: row, first key, key behind the last
            "num_segments",
            "rows",  # int32 [rows, 6]: place in the batch, table's start, first segment and end, first share and end
            "tables",  # int32: the block tables, one behind the other
            "shares",  # int32 [shares, 2]: part, row in it
            "parts",  # int64 [parts, 10]: see _merge
            "part_kind",
            "block_size",
            "heads",
            "kv_heads",
            "key_size",
            "value_size",
            "value_offset",  # of a token's values from its first key, in elements
            "pool",
            "pool_kind",
            "width",
            "query",
            "query_head",  # strides in elements
            "query_row",
            "query_kind",
            "out",  # [rows of the batch, heads, value_size], of the query's kind
            "outs",  # float32 [segments, heads, value_size padded]
            "logs",  # float32 [segments, heads]
            "scratch",
            "scratch_bytes",  # of one thread
            "sinks",  # float32 [heads], or 0
        )
    ]
    + [("scale", np.float64), ("softcap", np.float64)],
    align=True,
)

WRITE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "counters",
            "num_rows",
            "slots",  # int64 [rows]
            "pool",
            "pool_kind",
            "width",
            "kind",  # of key and value
            "heads",
            "key",
            "key_size",
            "key_head",  # strides in elements
            "key_row",
            "value",
            "value_size",  # 0: there is none
            "value_head",
            "value_row",
        )
    ],
    align=True,
)


def scratch_bytes(key_size: int, value_size: int, heads: int) -> int:
    """What one thread needs: where the tokens of two tiles are; a tile's keys, values and scores; queries; sums."""
    key_size, value_size = padded(key_size), padded(value_size)
    numbers = TILE * (key_size + value_size + 1) + heads * (key_size + 2) + value_size
    return -(-(16 * TILE + 4 * numbers) // 64) * 64


# --- Own keys ---


@inline
def _weights(scores, count, rows, softcap, largest):  # type: ignore[no-untyped-def]
    """Scores to weights relative to the largest score, ``largest`` included; that and the sum of the weights."""
    if softcap != 0.0:
        for j in range(count):
            put_float32(scores, j, np.float32(softcap * math.tanh(float32(scores, j) / softcap)))
    for j in range(count):
        score = float32(scores, j)
        largest = score if score > largest else largest
    for j in range(count, rows):
        put_float32(scores, j, np.float32(-np.inf))
    total = np.float32(0.0)
    for j in range(rows):
        weight = exp(float32(scores, j) - largest)
        put_float32(scores, j, weight)
        total += weight
    return largest, total


@inline
def _tile(a, kv_head, count, rows, starts, keys, values):  # type: ignore[no-untyped-def]
    """Bring one head's ``count`` keys and values to float32, side by side, and zeros to what is left of ``rows``."""
    key_size, value_size = padded_size(a.key_size), padded_size(a.value_size)
    for j in range(count):
        start = int64(starts, j)
        to_float32(a.pool, start + kv_head * a.key_size, a.pool_kind, keys, j * key_size, a.key_size)
        put_zeros(keys, j * key_size + a.key_size, (j + 1) * key_size)
        at = start + a.value_offset + kv_head * a.value_size
        to_float32(a.pool, at, a.pool_kind, values, j * value_size, a.value_size)
        put_zeros(values, j * value_size + a.value_size, (j + 1) * value_size)
    put_zeros(keys, count * key_size, rows * key_size)
    put_zeros(values, count * value_size, rows * value_size)


@inline
def _starts(a, table, first, count, starts):  # type: ignore[no-untyped-def]
    """Where in the pool the tokens of ``count`` positions from ``first`` on start, in elements."""
    index = first // a.block_size
    within = first - index * a.block_size
    slot = np.int64(0)
    for j in range(count):
        if j == 0 or within == a.block_size:
            within = within if j == 0 else 0
            slot = int32(a.tables, table + index) * a.block_size + within
            index += 1
        put_int64(starts, j, slot * a.width)
        slot += 1
        within += 1


@inline
def _segment(a, index, scratch):  # type: ignore[no-untyped-def]
    """All heads of one row over some of its keys, tile by tile: the mean of the values, and the log-sum-exp."""
    row = int32(a.segments, 3 * index)
    begin, end = int32(a.segments, 3 * index + 1), int32(a.segments, 3 * index + 2)
    key_size, value_size = padded_size(a.key_size), padded_size(a.value_size)
    keys = scratch + 16 * TILE
    values = keys + 4 * TILE * key_size
    scores = values + 4 * TILE * value_size
    queries = scores + 4 * TILE
    largests = queries + 4 * a.heads * key_size
    sums = largests + 4 * a.heads
    means = a.outs + 4 * index * a.heads * value_size
    place, group = int32(a.rows, 6 * row), a.heads // a.kv_heads
    put_zeros(queries, 0, a.heads * key_size)
    for head in range(a.heads):
        offset = head * a.query_head + place * a.query_row
        to_float32(a.query, offset, a.query_kind, queries, head * key_size, a.key_size)
        put_float32(largests, head, np.float32(-np.inf))
        put_float32(sums, head, np.float32(0.0))
    scale(queries, a.heads * key_size, np.float32(a.scale))
    put_zeros(means, 0, a.heads * value_size)
    table = int32(a.rows, 6 * row + 1)
    number_bytes = 2 if a.pool_kind == BFLOAT16 else 4
    _starts(a, table, begin, min(TILE, end - begin), scratch)
    for first in range(begin, end, TILE):
        count, turn = min(TILE, end - first), (first - begin) // TILE % 2
        rows = (count + 3) // 4 * 4
        starts, coming = scratch + 8 * TILE * turn, scratch + 8 * TILE * (1 - turn)
        following = min(TILE, end - first - count)
        _starts(a, table, first + count, following, coming)
        for j in range(following):
            token = a.pool + int64(coming, j) * number_bytes
            for line in range(0, a.width * number_bytes, 64):
                prefetch(token + line)
        for kv_head in range(a.kv_heads):
            _tile(a, kv_head, count, rows, starts, keys, values)
            for head in range(kv_head * group, (kv_head + 1) * group):
                for j in range(0, rows, 4):
                    dots(queries + 4 * head * key_size, keys + 4 * j * key_size, key_size, scores + 4 * j)
                before, mean = float32(largests, head), means + 4 * head * value_size
                largest, total = _weights(scores, count, rows, a.softcap, before)
                if largest != before:
                    factor = exp(before - largest)
                    scale(mean, value_size, factor)
                    put_float32(largests, head, largest)
                    put_float32(sums, head, float32(sums, head) * factor)
                put_float32(sums, head, float32(sums, head) + total)
                accumulate(scores, values, value_size, rows, mean)
    for head in range(a.heads):
        total = float32(sums, head)
        put_float32(a.logs, index * a.heads + head, float32(largests, head) + np.float32(math.log(total)))
        scale(means + 4 * head * value_size, value_size, np.float32(1.0) / total)


# --- The merge --------------------------------------------------------------------------------------------------------


@inline
def _share(a, share, head):  # type: ignore[no-untyped-def]
    """Where a row's share of a part is: the address of the part's fields, the offsets of its output and its log."""
    part = a.parts + 8 * 10 * int32(a.shares, 2 * share)
    group = a.heads // a.kv_heads
    row = head % group * int64(part, 3) + int32(a.shares, 2 * share + 1)
    out = head // group * int64(part, 5) + row * int64(part, 6)
    log = head // group * int64(part, 8) + row * int64(part, 9)
    return part, out, log


@inline
def _merge(a, row, total):  # type: ignore[no-untyped-def]
    """One softmax over a row's segments, its shares and the sink, for all heads, to the output; ``total`` is scratch.

    The fields of a part: out, log, pieces, rows; strides of the output by piece, head and row; of the logs likewise.
    """
    place = int32(a.rows, 6 * row)
    first, last = int32(a.rows, 6 * row + 2), int32(a.rows, 6 * row + 3)
    first_share, last_share = int32(a.rows, 6 * row + 4), int32(a.rows, 6 * row + 5)
    for head in range(a.heads):
        largest = float32(a.sinks, head) if a.sinks else np.float32(-np.inf)
        for segment in range(first, last):
            largest = max(largest, float32(a.logs, segment * a.heads + head))
        for share in range(first_share, last_share):
            part, _, log = _share(a, share, head)
            for piece in range(int64(part, 2)):
                largest = max(largest, float32(int64(part, 1), piece * int64(part, 7) + log))
        weights = np.float32(math.exp(float32(a.sinks, head) - largest)) if a.sinks else np.float32(0.0)
        put_zeros(total, 0, a.value_size)
        for segment in range(first, last):
            weight = np.float32(math.exp(float32(a.logs, segment * a.heads + head) - largest))
            weights += weight
            if weight > 0:
                add_scaled(
                    a.outs, (segment * a.heads + head) * padded_size(a.value_size), FLOAT32, weight, total, a.value_size
                )
        for share in range(first_share, last_share):
            part, out, log = _share(a, share, head)
            for piece in range(int64(part, 2)):
                weight = np.float32(math.exp(float32(int64(part, 1), piece * int64(part, 7) + log) - largest))
                weights += weight
                if weight > 0:
                    at = piece * int64(part, 4) + out
                    add_scaled(int64(part, 0), at, a.part_kind, weight, total, a.value_size)
        scale(total, a.value_size, np.float32(1.0) / weights)
        from_float32(total, 0, a.out, (place * a.heads + head) * a.value_size, a.query_kind, a.value_size)


# --- The kernels ------------------------------------------------------------------------------------------------------


@cfunc(types.void(types.CPointer(from_dtype(ATTEND))), cache=True, **OPTIONS)
def attend_own(pointer):  # type: ignore[no-untyped-def]
    """Segments in any order; who ends a row's last segment merges the row."""
    a = carray(pointer, 1)[0]
    scratch = a.scratch + a.scratch_bytes * atomic_add(a.counters, 1, 1)
    while True:
        segment = atomic_add(a.counters, 0, 1)
        if segment >= a.num_segments:
            break
        _segment(a, segment, scratch)
        row = int32(a.segments, 3 * segment)
        if atomic_add(a.counters, 2 + row, -1) == 1:
            put_int64(a.counters, 2 + row, int32(a.rows, 6 * row + 3) - int32(a.rows, 6 * row + 2))
            _merge(a, row, scratch + a.scratch_bytes - 4 * (a.value_size))


@inline
def _copy(source, offset, kind, target, a, count):  # type: ignore[no-untyped-def]
    if kind == BFLOAT16 and a.pool_kind == BFLOAT16:
        for i in range(count):
            put_uint16(a.pool, target + i, uint16(source, offset + i))
    elif kind == BFLOAT16:
        for i in range(count):
            put_float32(a.pool, target + i, bfloat16(source, offset + i))
    else:
        from_float32(source, offset, a.pool, target, a.pool_kind, count)


@cfunc(types.void(types.CPointer(from_dtype(WRITE))), cache=True, **OPTIONS)
def write_rows(pointer):  # type: ignore[no-untyped-def]
    """New keys and values to their slots in the pool."""
    a = carray(pointer, 1)[0]
    while True:
        first = atomic_add(a.counters, 0, 1) * WRITE_ROWS
        if first >= a.num_rows:
            break
        for row in range(first, min(first + WRITE_ROWS, a.num_rows)):
            slot = int64(a.slots, row) * a.width
            for head in range(a.heads):
                _copy(a.key, head * a.key_head + row * a.key_row, a.kind, slot + head * a.key_size, a, a.key_size)
            slot += a.heads * a.key_size
            if a.value_size:
                for head in range(a.heads):
                    at = head * a.value_head + row * a.value_row
                    _copy(a.value, at, a.kind, slot + head * a.value_size, a, a.value_size)
