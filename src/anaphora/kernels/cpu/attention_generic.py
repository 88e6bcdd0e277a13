"""Attention kernels for any CPU, dtype and block size, and for latents.

A work item is a task (some rows of the batch over a range of keys) for the query heads of one KV head. A chunk of a
prompt, rows that share a prefix, and a row over its own keys are all tasks; partial results are merged by log-sum-exp.
Each query is a column of a matrix of 16, and keys are processed in blocks::

    scores [keys of a block, 16 queries] = keys [keys, key_size] · queries [key_size, 16]
    sums   [value_size, 16 queries]     += values_t [value_size, keys] · weights [keys, 16 queries]

    pool   token slot 0   key of head 0 │ key of head 1 │ … │ value of head 0 │ value of head 1 │ …
           token slot 1   …                              (latents: one key, whose first elements are the value)

A kernel is a C function of the address of one record. All threads call it; each takes items from a counter.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray

from anaphora.kernels.cpu.amx import (
    TILE_BYTES,
    gemm_64x16,
    gemm_64x16_vectors,
    gemm_f32_vectors,
    load_tile_config,
    restore_tile_config,
)
from anaphora.kernels.cpu.attention_amx import KEY_BLOCK, attend_panels, put_mean
from anaphora.kernels.cpu.launch import fields
from anaphora.kernels.cpu.simd import (
    BFLOAT16,
    FLOAT32,
    LANES,
    add_scaled,
    atomic_add,
    convert,
    convert_rows,
    float32,
    inline,
    int32,
    kernel,
    prefetch_rows,
    put_float32,
    put_int32,
    put_int64,
    put_zeros,
    scale,
)
from anaphora.kernels.cpu.softmax import (
    cap,
    mask_columns,
    rescale_add,
    softmax,
    softmax_pairs,
    transpose,
    transpose_pairs,
)

ALIAS_PADDING = 576
"""Padding against 4 KiB aliasing between areas that are used together."""

VECTORS = 1
"""In place of the address of tile configurations: bfloat16 GEMMs by AVX-512 BF16."""

TASK = ("first", "count", "table", "begin", "end", "base", "all_see_from", "all_see_to")
"""Fields of a task: its rows (first and count in ``members``), the start of its block table, its range of keys, its
first partial result (-1: it covers all keys of its rows and writes the output), and the keys that every row sees."""

ATTEND = fields(
    "left",  # int64 [merged rows]: remaining items
    "tasks",  # int32 [tasks, 8]: see TASK
    "num_tasks",
    "members",  # int32: rows of the batch
    "lows",  # int32 [rows of the batch]: first key that a row sees
    "ends",  # int32 [rows of the batch]: one past the last
    "tables",  # int32: block tables, concatenated
    "merged",  # int32 [rows of the batch]: which merged row it is
    "merges",  # int32 [merged rows, 3]: row of the batch, first share and end
    "shares",  # int32: indices into outs and logs
    "block_size",
    "heads",
    "kv_heads",
    "key_size",
    "value_size",
    "value_offset",  # of a token's values from its first key, in elements
    "width",
    "outs",  # float32 [shares, heads, value_size]
    "logs",  # float32 [shares, heads]: log-sum-exp
    "scratch",
    "scratch_bytes",  # of one thread
    "columns",  # of a task, at most; a multiple of 16
    # Set for each layer:
    "tiles",  # address of the tile configurations: bfloat16 GEMMs by AMX; VECTORS: by AVX-512 BF16; 0: in float32
    "panels",  # whether the pool is in panels: see attention_amx.py
    "pool",
    "pool_kind",
    "query",
    "query_head",  # strides in elements
    "query_row",
    "query_kind",
    "out",  # [rows of the batch, heads, value_size], of the query's kind
    "sinks",  # float32 [heads], or 0
    real=["scale", "softcap"],
)


@inline
def padded_key(size):  # type: ignore[no-untyped-def]
    return (size + 31) // 32 * 32


@inline
def padded_value(size):  # type: ignore[no-untyped-def]
    return (size + 63) // 64 * 64


@inline
def scratch_layout(key_size, value_size, columns):  # type: ignore[no-untyped-def]
    """Byte offsets of the areas in a thread's scratch; the last is its size. See ``_attend_rows``."""
    key, value = 4 * padded_key(key_size), 4 * padded_value(value_size)
    keys = 64  # after the saved tile configuration
    values = keys + KEY_BLOCK * key + ALIAS_PADDING
    values_t = values + KEY_BLOCK * value + ALIAS_PADDING  # values, transposed
    scores = values_t + KEY_BLOCK * value // 2 + ALIAS_PADDING
    weights = scores + 4 * KEY_BLOCK * LANES + ALIAS_PADDING
    rows = weights + 4 * KEY_BLOCK * LANES + ALIAS_PADDING  # 16 queries or sums, before or after a transpose
    queries = rows + LANES * max(key, value)
    sums = queries + columns * key  # of values
    states = sums + columns * value  # six numbers of a column: largest, total, rescale, low, end, row
    return keys, values, values_t, scores, weights, rows, queries, sums, states, states + 24 * columns


# --- One item ---------------------------------------------------------------------------------------------------------


@inline
def _run(a, table, position, end):  # type: ignore[no-untyped-def]
    """Returns the address of the token at ``position``, and how many tokens up to ``end`` are contiguous there."""
    index = position // a.block_size
    within = position - index * a.block_size
    token_slot = int32(a.tables, table + index) * a.block_size + within
    size = 2 if a.pool_kind == BFLOAT16 else 4
    return a.pool + token_slot * a.width * size, min(a.block_size - within, end - position)


@inline
def _prefetch(a, table, first, count, kv_head):  # type: ignore[no-untyped-def]
    """Prefetches keys and values of a head."""
    number_bytes = 2 if a.pool_kind == BFLOAT16 else 4
    key, value = kv_head * a.key_size * number_bytes, (a.value_offset + kv_head * a.value_size) * number_bytes
    position = first
    while position < first + count:
        token, run = _run(a, table, position, first + count)
        prefetch_rows(token + key, a.width * number_bytes, run, a.key_size * number_bytes)
        prefetch_rows(token + value, a.width * number_bytes, run, a.value_size * number_bytes)
        position += run


@inline
def _gather(a, kind, table, first, count, rows, kv_head, keys, values):  # type: ignore[no-untyped-def]
    """Gathers ``count`` keys and values of a head into contiguous rows, padded with zeros to ``rows``."""
    key_size, value_size = padded_key(a.key_size), padded_value(a.value_size)
    number_bytes, bytes_here = 2 if a.pool_kind == BFLOAT16 else 4, 2 if kind == BFLOAT16 else 4
    key, value = kv_head * a.key_size * number_bytes, (a.value_offset + kv_head * a.value_size) * number_bytes
    key_step, value_step = bytes_here * key_size, bytes_here * value_size
    pool_step, done = a.width * number_bytes, np.int64(0)
    if key_size != a.key_size:
        put_zeros(keys, 0, rows * key_size, kind)
    if value_size != a.value_size:
        put_zeros(values, 0, rows * value_size, kind)
    while done < count:
        token, run = _run(a, table, first + done, first + count)
        at = keys + done * key_step
        convert_rows(token + key, pool_step, a.pool_kind, at, key_step, kind, run, a.key_size)
        at = values + done * value_step
        convert_rows(token + value, pool_step, a.pool_kind, at, value_step, kind, run, a.value_size)
        done += run
    put_zeros(keys, count * key_size, rows * key_size, kind)
    put_zeros(values, count * value_size, rows * value_size, kind)


@inline
def _columns(a, kind, task, kv_head, columns, scratch):  # type: ignore[no-untyped-def]
    """Loads the queries of a task as columns, head by head, and initializes their states."""
    _, _, _, _, _, row_area, query_area, _, state_area, _ = scratch_layout(a.key_size, a.value_size, a.columns)
    rows, queries = scratch + row_area, scratch + query_area
    size, group = padded_key(a.key_size), a.heads // a.kv_heads
    words = size // 2 if kind == BFLOAT16 else size
    first, count = int32(task, 0), int32(task, 1)
    used = count * group
    for start in range(0, columns, LANES):
        state = scratch + state_area + 24 * start
        put_zeros(rows, 0, LANES * words, FLOAT32)
        for lane in range(LANES):
            column = start + lane
            row, low, end = np.int64(0), np.int64(0), np.int64(0)
            if column < used:
                member = column % count
                row = int32(a.members, first + member)
                low, end = int32(a.lows, row), min(int32(a.ends, row), int32(task, 4))
                head = kv_head * group + column // count
                offset = head * a.query_head + row * a.query_row
                convert(a.query, offset, a.query_kind, rows, lane * size, kind, a.key_size)
            put_float32(state, lane, np.float32(-1e30))
            put_float32(state, LANES + lane, np.float32(0.0))
            put_int32(state, 3 * LANES + lane, np.int32(low))
            put_int32(state, 4 * LANES + lane, np.int32(end))
            put_int32(state, 5 * LANES + lane, np.int32(row))
        for word in range(0, words, LANES):
            transpose(rows + 4 * word, words, queries + 4 * (start * words + word * LANES), LANES)


@inline
def _block(a, kind, start, first, rows, masked, fresh, scratch):  # type: ignore[no-untyped-def]
    """Attention of 16 columns from ``start`` on over ``rows`` keys (a multiple of 64) from ``first`` on."""
    key_area, value_area, values_t_area, score_area, weight_area, _, query_area, sum_area, state_area, _ = (
        scratch_layout(a.key_size, a.value_size, a.columns)
    )
    keys, values, values_t = scratch + key_area, scratch + value_area, scratch + values_t_area
    scores, weights = scratch + score_area, scratch + weight_area
    key_size, value_size = padded_key(a.key_size), padded_value(a.value_size)
    sums, state = scratch + sum_area + 4 * start * value_size, scratch + state_area + 24 * start
    if kind == BFLOAT16:
        queries = scratch + query_area + 2 * start * key_size
        for row in range(0, rows, 64):
            at = keys + 2 * row * key_size
            target = scores + 4 * LANES * row
            if a.tiles == VECTORS:
                gemm_64x16_vectors(at, 2 * key_size, 32 * key_size, 64, queries, target, key_size // 32)
            else:
                gemm_64x16(at, 2 * key_size, 32 * key_size, 64, queries, target, key_size // 32)
    else:
        queries = scratch + query_area + 4 * start * key_size
        gemm_f32_vectors(keys, key_size, 1, queries, scores, rows, a.key_size)
    factor = a.scale
    if a.softcap != 0.0:
        cap(scores, rows, np.float32(a.scale / a.softcap))
        factor = a.softcap
    if masked:
        mask_columns(scores, rows, first, state + 3 * 4 * LANES, state + 4 * 4 * LANES)
    total, rescale = state + 4 * LANES, state + 2 * 4 * LANES
    if kind == BFLOAT16:
        softmax_pairs(scores, rows, np.float32(factor / math.log(2.0)), state, total, rescale, weights)
    else:
        softmax(scores, rows, np.float32(factor / math.log(2.0)), state, total, rescale, weights)
    # Via the scores' area: a tile load from bytes that vectors have just stored would stall (no store forwarding).
    tile = KEY_BLOCK // 32 * TILE_BYTES
    for column in range(0, value_size, 64):
        target = sums + 4 * LANES * column
        found = target if fresh else scores
        if a.tiles == VECTORS:
            gemm_64x16_vectors(values_t + column // 16 * tile, 64, tile, TILE_BYTES, weights, found, rows // 32)
        elif kind == BFLOAT16:
            gemm_64x16(values_t + column // 16 * tile, 64, tile, TILE_BYTES, weights, found, rows // 32)
        else:
            gemm_f32_vectors(values + 4 * column, 1, value_size, weights, found, 64, rows)
        if not fresh:
            rescale_add(target, found, 64, rescale)


@inline
def _finish(a, task, kv_head, columns, scratch):  # type: ignore[no-untyped-def]
    """Writes the results of all columns of a task."""
    _, _, _, _, _, row_area, _, sum_area, state_area, _ = scratch_layout(a.key_size, a.value_size, a.columns)
    rows, size, group = scratch + row_area, padded_value(a.value_size), a.heads // a.kv_heads
    count, base = int32(task, 1), int32(task, 5)
    used = count * group
    for start in range(0, columns, LANES):
        state = scratch + state_area + 24 * start
        sums = scratch + sum_area + 4 * start * size
        for word in range(0, size, LANES):
            transpose(sums + 4 * word * LANES, LANES, rows + 4 * word, size)
        for lane in range(min(LANES, used - start)):
            column = start + lane
            head = kv_head * group + column // count
            total = float32(state, LANES + lane)
            share = base if base < 0 else base + column % count
            row = int32(state, 5 * LANES + lane)
            put_mean(a, rows + 4 * lane * size, float32(state, lane), total, row, head, share)


@inline
def _attend_rows(a, task, kv_head, scratch):  # type: ignore[no-untyped-def]
    kind = BFLOAT16 if a.tiles else FLOAT32
    key_area, value_area, values_t_area, _, _, _, _, _, _, _ = scratch_layout(a.key_size, a.value_size, a.columns)
    keys, values, values_t = scratch + key_area, scratch + value_area, scratch + values_t_area
    table, begin, end = int32(task, 2), int32(task, 3), int32(task, 4)
    all_from, all_to = int32(task, 6), int32(task, 7)
    columns = (int32(task, 1) * (a.heads // a.kv_heads) + LANES - 1) // LANES * LANES
    value_size = padded_value(a.value_size)
    _prefetch(a, table, begin, min(KEY_BLOCK, end - begin), kv_head)
    _columns(a, kind, task, kv_head, columns, scratch)
    for first in range(begin, end, KEY_BLOCK):
        count = min(KEY_BLOCK, end - first)
        rows = (count + 63) // 64 * 64
        _gather(a, kind, table, first, count, rows, kv_head, keys, values)
        _prefetch(a, table, first + count, min(KEY_BLOCK, end - first - count), kv_head)
        if kind == BFLOAT16:
            for column in range(0, value_size, LANES):
                for row in range(0, rows, 32):
                    target = values_t + (column // LANES * (KEY_BLOCK // 32) + row // 32) * TILE_BYTES
                    transpose_pairs(values + 2 * (row * value_size + column), value_size, target)
        masked = first < all_from or first + rows > all_to
        for start in range(0, columns, LANES):
            _block(a, kind, start, first, rows, masked, first == begin, scratch)
    _finish(a, task, kv_head, columns, scratch)


# --- The merge --------------------------------------------------------------------------------------------------------


@inline
def _merge(a, merge, total):  # type: ignore[no-untyped-def]
    """Merges a row's partial results and the sink by log-sum-exp, for all heads; ``total`` is scratch."""
    row, first, last = int32(a.merges, 3 * merge), int32(a.merges, 3 * merge + 1), int32(a.merges, 3 * merge + 2)
    for head in range(a.heads):
        largest = float32(a.sinks, head) if a.sinks else np.float32(-np.inf)
        for share in range(first, last):
            largest = max(largest, float32(a.logs, int32(a.shares, share) * a.heads + head))
        weights = np.float32(math.exp(float32(a.sinks, head) - largest)) if a.sinks else np.float32(0.0)
        put_zeros(total, 0, a.value_size, FLOAT32)
        for share in range(first, last):
            place = int32(a.shares, share) * a.heads + head
            weight = np.float32(math.exp(float32(a.logs, place) - largest))
            weights += weight
            if weight > 0:
                add_scaled(a.outs, place * a.value_size, weight, total, a.value_size)
        scale(total, a.value_size, np.float32(1.0) / weights)
        convert(total, 0, FLOAT32, a.out, (row * a.heads + head) * a.value_size, a.query_kind, a.value_size)


# --- The kernels ------------------------------------------------------------------------------------------------------


@inline
def attend_item(a, item, scratch):  # type: ignore[no-untyped-def]
    """Runs one item; the thread that finishes a row's last partial result merges the row."""
    task = a.tasks + 32 * (item // a.kv_heads)
    if a.panels:
        attend_panels(a, item, scratch)
    else:
        _attend_rows(a, task, item % a.kv_heads, scratch)
    if int32(task, 5) >= 0:
        for member in range(int32(task, 1)):
            merge = int32(a.merged, int32(a.members, int32(task, 0) + member))
            if atomic_add(a.left, merge, -1) == 1:
                shares = int32(a.merges, 3 * merge + 2) - int32(a.merges, 3 * merge + 1)
                put_int64(a.left, merge, shares * a.kv_heads)
                _merge(a, merge, scratch + 64)


@kernel(ATTEND)
def attend(pointer):  # type: ignore[no-untyped-def]
    """Attention of a layer."""
    a = carray(pointer, 1)[0]
    scratch = a.scratch + a.scratch_bytes * atomic_add(a.counters, 1, 1)
    if a.tiles > VECTORS:
        load_tile_config(a.tiles, scratch)
    while True:
        item = atomic_add(a.counters, 0, 1)
        if item >= a.num_tasks * a.kv_heads:
            break
        attend_item(a, item, scratch)
    if a.tiles > VECTORS:
        restore_tile_config(scratch)
