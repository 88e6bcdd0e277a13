"""The AMX kernel of the fused decoder: all layers of a step in one call.

A layer is seven phases of work items. Threads take items until a phase has none left, wait for each other, and go on::

    norm → query, key, value (+ norm, rotation, to the pool) → attention → output, added
         → norm → gate and value, gate_up → down, added

A thread that is descheduled between two items delays no other thread. Buffers are contiguous bfloat16, one row per
token; a row's result does not depend on the other rows::

    hidden, normed       [rows, hidden_size]
    query, attended      [rows, heads · head_size]          head 0 │ head 1 │ …
    qkv (weight)         query heads │ key heads │ value heads, each head_size outputs
    gate_up (weight)     16 gates │ their 16 ups │ 16 gates │ …
"""

from __future__ import annotations

import numpy as np
from numba import carray

from anaphora.kernels.cpu.amx import load_tile_config, restore_tile_config
from anaphora.kernels.cpu.attention_amx import put_key, put_value
from anaphora.kernels.cpu.attention_generic import ATTEND, attend_item
from anaphora.kernels.cpu.epilogue import add_bias, add_residual, rms_norm_row, rms_norm_rows, rope_rows, silu_and_mul
from anaphora.kernels.cpu.gemm_amx import BLOCK_ROWS, GROUP_ROWS, gemm_rows
from anaphora.kernels.cpu.launch import fields
from anaphora.kernels.cpu.simd import (
    BFLOAT16,
    FLOAT32,
    LANES,
    atomic_add,
    atomic_load,
    convert,
    convert_rows,
    inline,
    int64,
    kernel,
    memory,
    pause,
    yield_thread,
)

PHASES = 7
"""Phases of a layer."""

PHASE_BYTES = 128
"""Bytes of a phase's two counters, a cache line each: items taken, items done."""

SPIN_LIMIT = 2000
"""How many times a thread polls for the end of a phase before it yields the CPU."""

NORM_ROWS = 16
"""Rows per work item of a norm phase."""

LAYER = np.dtype(
    [
        (name, np.int64)
        for name in (
            "input_norm",  # float32 [hidden_size]
            "qkv",  # query, key and value projections: see ``packed_linear.pack``
            "qkv_bias",  # float32, or 0
            "query_norm",  # float32 [head_size], or 0
            "key_norm",
            "out",
            "out_bias",
            "post_norm",
            "gate_up",  # alternately 16 gates and their 16 ups
            "down",
        )
    ]
)
"""Addresses of a layer's weights."""

DECODE = fields(
    "hidden_size",
    "inner_size",
    "heads",
    "kv_heads",
    "head_size",
    "tiles",
    # Set at each call:
    "phases",  # int64 [layers · PHASES, 16], zeros
    "layers",  # LAYER [layers]
    "attends",  # attention_generic.ATTEND [layers]
    "num_layers",
    "rows",
    "hidden",  # [rows, hidden_size], in place
    "normed",  # [rows, hidden_size]
    "query",  # [rows, heads · head_size]
    "attended",  # the same
    "active",  # [rows, inner_size]
    "cosines",  # [rows, head_size]
    "sines",
    "token_slots",  # int64 [rows]: token slots in the pool
    "scratch",
    "scratch_bytes",  # of one thread
    real=["eps"],
)


def scratch_bytes(head_size: int) -> int:
    """Bytes of one thread's scratch: the saved tile configuration, the sums of a group of rows, and one head."""
    return 64 + 4 * GROUP_ROWS * max(64, head_size) + 2 * head_size


# --- Phases -----------------------------------------------------------------------------------------------------------


@inline
def _take(a, phase, items):  # type: ignore[no-untyped-def]
    """The next item of a phase, or -1 once all are done."""
    item = atomic_add(a.phases + PHASE_BYTES * phase, 0, 1)
    if item < items:
        return item
    waited = 0
    while atomic_load(a.phases + PHASE_BYTES * phase, 8) < items:
        if waited < SPIN_LIMIT:
            waited += 1
            pause()
        else:
            yield_thread()
    return np.int64(-1)


@inline
def _end(a, phase):  # type: ignore[no-untyped-def]
    atomic_add(a.phases + PHASE_BYTES * phase, 8, 1)


@inline
def _blocks(a):  # type: ignore[no-untyped-def]
    return (a.rows + BLOCK_ROWS - 1) // BLOCK_ROWS


@inline
def _norm(a, phase, weight):  # type: ignore[no-untyped-def]
    items = (a.rows + NORM_ROWS - 1) // NORM_ROWS
    while True:
        item = _take(a, phase, items)
        if item < 0:
            break
        for row in range(item * NORM_ROWS, min(item * NORM_ROWS + NORM_ROWS, a.rows)):
            at = 2 * row * a.hidden_size
            rms_norm_row(a.hidden + at, weight, a.normed + at, a.hidden_size, np.float32(a.eps))
        _end(a, phase)


@inline
def _head(a, layer, attend, head, first, rows, sums):  # type: ignore[no-untyped-def]
    """Finishes one head of some rows: a query goes to ``query``, a key or value to the pool."""
    step, kv_head = 4 * a.head_size, head - a.heads
    is_value = kv_head >= a.kv_heads
    if layer.qkv_bias:
        add_bias(sums, step, layer.qkv_bias + step * head, rows, a.head_size)
    norm = layer.query_norm if kv_head < 0 else layer.key_norm
    if norm and not is_value:
        rms_norm_rows(sums, step, norm, rows, a.head_size, np.float32(a.eps))
    if not is_value:
        angle = 2 * a.head_size
        rope_rows(sums, step, a.cosines + angle * first, a.sines + angle * first, angle, rows, a.head_size)
    if kv_head < 0:
        target_step = 2 * a.heads * a.head_size
        target = a.query + first * target_step + 2 * head * a.head_size
        convert_rows(sums, step, FLOAT32, target, target_step, BFLOAT16, rows, a.head_size)
        return
    offset = kv_head * a.head_size
    if is_value:
        offset = attend.value_offset + (kv_head - a.kv_heads) * a.head_size
    narrow = sums + step * GROUP_ROWS
    for row in range(rows):
        token_slot = int64(a.token_slots, first + row)
        if not attend.panels:
            place = token_slot * attend.width + offset
            convert(sums + step * row, 0, FLOAT32, attend.pool, place, attend.pool_kind, a.head_size)
            continue
        convert(sums + step * row, 0, FLOAT32, narrow, 0, BFLOAT16, a.head_size)
        if is_value:
            put_value(narrow, a.head_size, attend.pool, token_slot, attend.width, offset)
        else:
            put_key(narrow, a.head_size, attend.pool, token_slot, attend.width, offset)


@inline
def _project(a, layer, attend, phase, sums):  # type: ignore[no-untyped-def]
    """The QKV phase: an item is one head for a block of rows."""
    heads, row_bytes = a.heads + 2 * a.kv_heads, 2 * a.hidden_size
    items = heads * _blocks(a)
    while True:
        item = _take(a, phase, items)
        if item < 0:
            break
        block, head = item // heads, item % heads
        begin = block * BLOCK_ROWS
        weight = layer.qkv + head * a.head_size * row_bytes
        for first in range(begin, min(begin + BLOCK_ROWS, a.rows), GROUP_ROWS):
            rows, x = min(a.rows - first, GROUP_ROWS), a.normed + first * row_bytes
            gemm_rows(x, row_bytes, weight, a.hidden_size, a.head_size // 16, sums, 4 * a.head_size, rows)
            _head(a, layer, attend, head, first, rows, sums)
        _end(a, phase)


@inline
def _attend(a, attend, phase, scratch):  # type: ignore[no-untyped-def]
    items = attend.num_tasks * attend.kv_heads
    while True:
        item = _take(a, phase, items)
        if item < 0:
            break
        attend_item(attend, item, scratch)
        _end(a, phase)


@inline
def _add(a, phase, x, size, weight, bias, sums):  # type: ignore[no-untyped-def]
    """Adds ``x`` ``[rows, size]`` times a weight to the hidden rows."""
    tiles = 4 if a.rows <= LANES else 2
    panels = (a.hidden_size // 16 + tiles - 1) // tiles
    items = panels * _blocks(a)
    while True:
        item = _take(a, phase, items)
        if item < 0:
            break
        block, tile = item // panels, item % panels * tiles
        width = min(tiles, a.hidden_size // 16 - tile)
        begin = block * BLOCK_ROWS
        for first in range(begin, min(begin + BLOCK_ROWS, a.rows), GROUP_ROWS):
            rows = min(a.rows - first, GROUP_ROWS)
            gemm_rows(x + 2 * first * size, 2 * size, weight + 32 * tile * size, size, width, sums, 256, rows)
            if bias:
                add_bias(sums, 256, bias + 64 * tile, rows, 16 * width)
            target = a.hidden + 2 * (first * a.hidden_size + 16 * tile)
            add_residual(sums, 256, target, 2 * a.hidden_size, rows, 16 * width)
        _end(a, phase)


@inline
def _gate(a, layer, phase, sums):  # type: ignore[no-untyped-def]
    tiles = 4 if a.rows <= LANES else 2
    all_tiles, row_bytes = a.inner_size // 8, 2 * a.hidden_size
    panels = (all_tiles + tiles - 1) // tiles
    items = panels * _blocks(a)
    while True:
        item = _take(a, phase, items)
        if item < 0:
            break
        block, tile = item // panels, item % panels * tiles
        width = min(tiles, all_tiles - tile)
        begin = block * BLOCK_ROWS
        weight = layer.gate_up + 16 * tile * row_bytes
        for first in range(begin, min(begin + BLOCK_ROWS, a.rows), GROUP_ROWS):
            rows, x = min(a.rows - first, GROUP_ROWS), a.normed + first * row_bytes
            gemm_rows(x, row_bytes, weight, a.hidden_size, width, sums, 256, rows)
            target = a.active + 2 * (first * a.inner_size + 8 * tile)
            silu_and_mul(sums, 256, target, 2 * a.inner_size, rows, 8 * width)
        _end(a, phase)


@kernel(DECODE)
def decode(pointer):  # type: ignore[no-untyped-def]
    """Runs all layers; ``hidden`` is replaced."""
    a = carray(pointer, 1)[0]
    thread = atomic_add(a.counters, 1, 1)
    scratch = a.scratch + a.scratch_bytes * thread
    sums = scratch + 64
    load_tile_config(a.tiles, scratch)
    layers = carray(memory(a.layers), a.num_layers, LAYER)
    attends = carray(memory(a.attends), a.num_layers, ATTEND)
    for index in range(a.num_layers):
        layer, attend, phase = layers[index], attends[index], PHASES * index
        _norm(a, phase, layer.input_norm)
        _project(a, layer, attend, phase + 1, sums)
        _attend(a, attend, phase + 2, attend.scratch + attend.scratch_bytes * thread)
        _add(a, phase + 3, a.attended, a.heads * a.head_size, layer.out, layer.out_bias, sums)
        _norm(a, phase + 4, layer.post_norm)
        _gate(a, layer, phase + 5, sums)
        _add(a, phase + 6, a.active, a.inner_size, layer.down, 0, sums)
    restore_tile_config(scratch)
