"""AMX attention over a pool in panels, for bfloat16 and block sizes that are multiples of 16.

A panel is 16 tokens of the pool. It holds their keys head by head, then their values, each as the B operand of an AMX
GEMM: a word of 4 bytes is a pair along the summed dimension::

    keys of a head           token 0     1        15          values of a head        value 0     1       15
    elements 0, 1            ██ ██    ██ ██  …  ██ ██          tokens 0, 1            ██ ██    ██ ██  …  ██ ██
    elements 2, 3            ██ ██    ██ ██  …  ██ ██          tokens 2, 3            ██ ██    ██ ██  …  ██ ██
       ⋮                                                          ⋮         (8 rows, then values 16 to 31 …)
    elements D-2, D-1        ██ ██    ██ ██  …  ██ ██          tokens 14, 15          ██ ██    ██ ██  …  ██ ██

Keys are used in place; values are copied, two panels to a tile. Each row of scores and sums is a query, 16 at a time.
The running maximum of a row is updated, and its sums are rescaled, only when a score exceeds it by more than
``SLACK``; weights relative to an older maximum are as exact.
"""

from __future__ import annotations

import math

import numpy as np

from anaphora.kernels.cpu.amx import (
    TILE_BYTES,
    gemm_16x32,
    gemm_16x32_add,
    gemm_16x64,
    gemm_16x64_add,
    gemm_16x64_scattered,
    set_tile_rows,
)
from anaphora.kernels.cpu.simd import (
    BFLOAT16,
    FLOAT32,
    LANES,
    convert,
    copy_lines,
    float32,
    inline,
    int32,
    int64,
    prefetch_rows,
    put_float32,
    put_int32,
    put_int64,
    put_uint16,
    put_zeros,
    scale,
    uint16,
)
from anaphora.kernels.cpu.softmax import cap, mask_lanes, max_of, softmax_weights, sum_of

PANEL = 16
"""Tokens of a panel."""

KEY_BLOCK = 128
"""Keys of a block, a multiple of 64."""

SLACK = 8.0
"""A score may exceed the maximum that weights are relative to by this much (exponent of 2)."""

_STRIDE = 64
"""Keys per GEMM and partial sum. Blocks of keys begin and end at the same positions in every step, so a prompt row's
result is the same to the bit, whatever else is in the batch and however much of the prompt is cached."""

_TILE = KEY_BLOCK // 32 * TILE_BYTES  # from 16 values of all keys of a block to the next


@inline
def put_key(row, size, pool, token_slot, width, offset):  # type: ignore[no-untyped-def]
    """Writes one head's key, bfloat16 at ``row``, to its token slot; ``offset`` is the head's, in elements."""
    lane = token_slot % PANEL
    target = pool + 2 * (token_slot - lane) * width + 2 * PANEL * offset + 4 * lane
    for word in range(size // 2):
        put_int32(target, PANEL * word, np.int32(int32(row, word)))


@inline
def put_value(row, size, pool, token_slot, width, offset):  # type: ignore[no-untyped-def]
    lane = token_slot % PANEL
    target = pool + 2 * (token_slot - lane) * width + 2 * PANEL * offset + 64 * (lane // 2) + 2 * (lane % 2)
    for i in range(size):
        put_uint16(target, i // 16 * 256 + i % 16 * 2, uint16(row, i))


@inline
def panel_scratch_layout(key_size, value_size, columns):  # type: ignore[no-untyped-def]
    """Byte offsets of the areas in a thread's scratch; the last is its size."""
    panels = 64  # int64 [KEY_BLOCK / 16], after the saved tile configuration
    states = panels + 64  # float32 or int32 [columns, 4]: maximum, first key, one past the last, row of the batch
    totals = states + 16 * columns  # float32 [columns, 16]
    queries = totals + 64 * columns  # bfloat16 [columns, key_size]
    sums = queries + 2 * key_size * columns  # float32 [columns, value_size]
    scores = sums + 4 * value_size * columns  # float32 [2, 16, KEY_BLOCK]
    weights = scores + 2 * 64 * KEY_BLOCK  # bfloat16 [16, KEY_BLOCK]
    values = weights + 32 * KEY_BLOCK  # bfloat16 [value_size / 16, KEY_BLOCK / 32, a tile]
    return panels, states, totals, queries, sums, scores, weights, values, values + 2 * KEY_BLOCK * value_size


@inline
def _panel(a, table, position):  # type: ignore[no-untyped-def]
    index = position // a.block_size
    token_slot = int32(a.tables, table + index) * a.block_size + position - index * a.block_size
    return a.pool + 2 * a.width * token_slot


@inline
def _prefetch(a, table, first, count, kv_head):  # type: ignore[no-untyped-def]
    """Prefetches keys and values of a head."""
    for position in range(first, first + count, PANEL):
        panel = _panel(a, table, position)
        prefetch_rows(panel + 32 * a.key_size * kv_head, 0, 1, 32 * a.key_size)
        prefetch_rows(panel + 32 * (a.value_offset + a.value_size * kv_head), 0, 1, 32 * a.value_size)


@inline
def _queries(a, task, kv_head, columns, scratch):  # type: ignore[no-untyped-def]
    """Loads the queries of a task as rows, head by head, and initializes their states."""
    _, state_area, total_area, query_area, _, _, _, _, _ = panel_scratch_layout(a.key_size, a.value_size, columns)
    group, first, count = a.heads // a.kv_heads, int32(task, 0), int32(task, 1)
    for column in range(count * group):
        state = scratch + state_area + 16 * column
        row = int32(a.members, first + column % count)
        head = kv_head * group + column // count
        offset = head * a.query_head + row * a.query_row
        convert(a.query, offset, a.query_kind, scratch + query_area, column * a.key_size, BFLOAT16, a.key_size)
        put_float32(state, 0, np.float32(-1e30))
        put_int32(state, 1, np.int32(max(int32(a.lows, row), int32(task, 3))))
        put_int32(state, 2, np.int32(min(int32(a.ends, row), int32(task, 4))))
        put_int32(state, 3, np.int32(row))
    put_zeros(scratch + total_area, 0, LANES * count * group, FLOAT32)


@inline
def _gather(a, table, first, begin, end, rows, kv_head, panels, values):  # type: ignore[no-untyped-def]
    """Finds the panels of a block of keys and copies their values to tiles; zeros outside of ``begin`` to ``end``."""
    for index in range(rows // PANEL):
        position = first + PANEL * index
        target = values + index // 2 * TILE_BYTES + index % 2 * (TILE_BYTES // 2)
        known = min(end - position, PANEL) if position >= begin else np.int64(0)
        panel = _panel(a, table, position if known > 0 else begin)
        put_int64(panels, index, panel + 32 * a.key_size * kv_head)
        if known > 0:
            source = panel + 32 * (a.value_offset + a.value_size * kv_head)
            copy_lines(source, TILE_BYTES // 2, target, _TILE, a.value_size // LANES, TILE_BYTES // 2)
        if known < PANEL:
            known = max(known, 0)
            for column in range(0, a.value_size, LANES):
                tile = target + column // LANES * _TILE
                if known % 2 == 1:
                    for lane in range(LANES):
                        put_uint16(tile, 32 * (known // 2) + 2 * lane + 1, np.uint16(0))
                put_zeros(tile, 32 * ((known + 1) // 2), 32 * (PANEL // 2), BFLOAT16)


@inline
def _scores(a, start, rows, columns, which, scratch):  # type: ignore[no-untyped-def]
    """Scores of the 16 queries from ``start`` on with a block of keys."""
    panel_area, _, _, query_area, _, score_area, _, _, _ = panel_scratch_layout(a.key_size, a.value_size, columns)
    query, panels = scratch + query_area + 2 * a.key_size * start, scratch + panel_area
    scores = scratch + score_area + which * 64 * KEY_BLOCK
    for index in range(0, rows // PANEL, 4):
        first, second = int64(panels, index), int64(panels, index + 1)
        third, fourth = int64(panels, index + 2), int64(panels, index + 3)
        target, count = scores + 64 * index, a.key_size // 32
        gemm_16x64_scattered(query, 2 * a.key_size, first, second, third, fourth, target, 4 * KEY_BLOCK, count)


@inline
def _softmax_rows(a, start, used, first, rows, masked, fresh, columns, which, scratch):  # type: ignore[no-untyped-def]
    """Softmax weights from scores, row by row."""
    _, state_area, total_area, _, sum_area, score_area, weight_area, _, _ = panel_scratch_layout(
        a.key_size, a.value_size, columns
    )
    factor = np.float32(a.scale / math.log(2.0))
    if a.softcap != 0.0:
        factor = np.float32(a.softcap / math.log(2.0))
    for lane in range(min(LANES, used - start)):
        state, total = scratch + state_area + 16 * (start + lane), scratch + total_area + 64 * (start + lane)
        scores = scratch + score_area + which * 64 * KEY_BLOCK + 4 * KEY_BLOCK * lane
        if a.softcap != 0.0:
            cap(scores, rows // LANES, np.float32(a.scale / a.softcap))
        if masked:
            mask_lanes(scores, rows, int32(state, 1) - first, int32(state, 2) - first)
        before, top = float32(state, 0), max_of(scores, rows) * factor
        if fresh or top > before + np.float32(SLACK):
            top = max(before, top)
            put_float32(state, 0, top)
            if not fresh:
                change = np.float32(math.exp((before - top) * math.log(2.0)))
                scale(total, LANES, change)
                scale(scratch + sum_area + 4 * a.value_size * (start + lane), a.value_size, change)
            before = top
        softmax_weights(scores, rows, factor, before, total, scratch + weight_area + 2 * KEY_BLOCK * lane)


@inline
def _sums(a, start, rows, fresh, columns, scratch):  # type: ignore[no-untyped-def]
    """Adds the weighted values of a block of keys to the sums of 16 queries."""
    _, _, _, _, sum_area, _, weight_area, value_area, _ = panel_scratch_layout(a.key_size, a.value_size, columns)
    weights, values, step = scratch + weight_area, scratch + value_area, 4 * a.value_size
    sums, count, column = scratch + sum_area + step * start, rows // 32, np.int64(0)
    while column + 64 <= a.value_size:
        place, kept = values + column // LANES * _TILE, sums + 4 * column
        if fresh:
            gemm_16x64(weights, 2 * KEY_BLOCK, place, _TILE, kept, step, count)
        else:
            gemm_16x64_add(weights, 2 * KEY_BLOCK, place, _TILE, kept, step, count)
        column += 64
    if column < a.value_size:
        place, kept = values + column // LANES * _TILE, sums + 4 * column
        if fresh:
            gemm_16x32(weights, 2 * KEY_BLOCK, place, _TILE, kept, step, count)
        else:
            gemm_16x32_add(weights, 2 * KEY_BLOCK, place, _TILE, kept, step, count)


@inline
def put_mean(a, sums, largest, total, row, head, share):  # type: ignore[no-untyped-def]
    """Normalizes the sums of one head of a row, and writes them to the output (``share`` -1) or as a partial result.

    ``largest`` is the power of 2 that the weights are relative to, ``total`` their sum.
    """
    log = np.float32(largest * np.float32(math.log(2.0)))
    log = np.float32(log + math.log(total)) if total > 0 else np.float32(-np.inf)
    factor = np.float32(1.0) / total if total > 0 else np.float32(0.0)
    if share < 0 and a.sinks:
        factor = factor * np.float32(1.0 / (1.0 + math.exp(float32(a.sinks, head) - log)))
    scale(sums, a.value_size, factor)
    if share < 0:
        convert(sums, 0, FLOAT32, a.out, (row * a.heads + head) * a.value_size, a.query_kind, a.value_size)
    else:
        place = share * a.heads + head
        convert(sums, 0, FLOAT32, a.outs, place * a.value_size, FLOAT32, a.value_size)
        put_float32(a.logs, place, log)


@inline
def _finish(a, task, kv_head, columns, scratch):  # type: ignore[no-untyped-def]
    """Writes the results of all queries of a task."""
    _, state_area, total_area, _, sum_area, _, _, _, _ = panel_scratch_layout(a.key_size, a.value_size, columns)
    group, count, base = a.heads // a.kv_heads, int32(task, 1), int32(task, 5)
    for column in range(count * group):
        state, head = scratch + state_area + 16 * column, kv_head * group + column // count
        mean = scratch + sum_area + 4 * a.value_size * column
        total = sum_of(scratch + total_area + 64 * column)
        share = base if base < 0 else base + column % count
        put_mean(a, mean, float32(state, 0), total, int32(state, 3), head, share)


@inline
def attend_panels(a, item, scratch):  # type: ignore[no-untyped-def]
    """Attention of one item: a task's rows, for the query heads of one KV head, over its keys.

    The scores of the next 16 queries are computed while the weights of the last are still being stored.
    """
    task, kv_head = a.tasks + 32 * (item // a.kv_heads), item % a.kv_heads
    used = int32(task, 1) * (a.heads // a.kv_heads)
    columns = (used + LANES - 1) // LANES * LANES
    panel_area, _, _, _, _, _, _, value_area, _ = panel_scratch_layout(a.key_size, a.value_size, columns)
    table, end = int32(task, 2), int32(task, 4)
    begin = int32(task, 3) // PANEL * PANEL
    all_from, all_to = max(int32(task, 6), int32(task, 3)), int32(task, 7)
    if used < LANES:
        set_tile_rows(a.tiles, used)
    _prefetch(a, table, begin, min(KEY_BLOCK, end - begin), kv_head)
    _queries(a, task, kv_head, columns, scratch)
    first = begin // _STRIDE * _STRIDE
    fresh = True
    while first < end:
        behind = min(first // KEY_BLOCK * KEY_BLOCK + KEY_BLOCK, end)
        rows = (behind - first + _STRIDE - 1) // _STRIDE * _STRIDE
        _gather(a, table, first, begin, end, rows, kv_head, scratch + panel_area, scratch + value_area)
        _prefetch(a, table, behind, min(KEY_BLOCK, end - behind), kv_head)
        masked = first < all_from or first + rows > all_to
        _scores(a, 0, rows, columns, 0, scratch)
        for start in range(0, columns, LANES):
            which = start // LANES % 2
            _softmax_rows(a, start, used, first, rows, masked, fresh, columns, which, scratch)
            if start + LANES < columns:
                _scores(a, start + LANES, rows, columns, 1 - which, scratch)
            _sums(a, start, rows, fresh, columns, scratch)
        first, fresh = behind, False
    if used < LANES:
        set_tile_rows(a.tiles, LANES)
    _finish(a, task, kv_head, columns, scratch)
