"""The AMX kernel of a linear layer in bfloat16.

A row's result does not depend on the other rows; oneDNN does not guarantee that. The weight is packed by
``packed_linear.pack``; an item of work is 32 or 64 outputs for a block of up to 128 rows::

    x  [rows, size]                     weight  [outputs / 16, size / 32, a tile]         out  [rows, outputs]
    ┌───────────── size ─────────────┐  ┌ tile ┬ tile ┬ … ┐  16 outputs                   ┌─────────┬───┬─────┐
    │ 32 rows: sums in registers     │  ├──────┼──────┼───┤  16 outputs                   │ 32 rows │▓▓▓│     │
    │ 32 rows                        │  └──────┴──────┴───┘   ⋮                           │         │▓▓▓│     │
    └────────────────────────────────┘                                                    └─────────┴───┴─────┘
"""

from __future__ import annotations

import numpy as np
from numba import carray

from anaphora.kernels.cpu.amx import (
    TILE_BYTES,
    gemm_16x32,
    gemm_16x64,
    gemm_32x32,
    load_tile_config,
    restore_tile_config,
)
from anaphora.kernels.cpu.epilogue import add_bias
from anaphora.kernels.cpu.launch import fields
from anaphora.kernels.cpu.simd import BFLOAT16, FLOAT32, LANES, atomic_add, convert_rows, copy_lines, inline, kernel

GROUP_ROWS = 32
"""Rows that are multiplied together."""

BLOCK_ROWS = 128
"""Most rows of an item of work: they stay in a core's L2 cache while the weights stream past."""

SUMS_BYTES = 4 * GROUP_ROWS * 64
"""Bytes of the sums of a group of rows for 64 outputs, the most of an item of ``linear``."""

LINEAR = fields(
    "size",  # in features, a multiple of 32
    "outputs",  # out features, a multiple of 32
    "weight",  # see ``packed_linear.pack``
    "bias",  # float32 [outputs], or 0
    "tiles",
    "x",  # bfloat16 [rows, size]
    "rows",
    "out",  # bfloat16 [rows, outputs]
    "scratch",
    "scratch_bytes",  # of one thread
)


def linear_scratch_bytes(size: int) -> int:
    """Bytes of a thread's scratch: the saved tile configuration, sums, and the last group of rows, padded."""
    return 64 + SUMS_BYTES + 2 * GROUP_ROWS * size


@inline
def gemm_rows(x, x_row, weight, size, tiles, sums, sums_row, rows):  # type: ignore[no-untyped-def]
    """Multiplies up to 32 rows by ``tiles`` · 16 outputs (``tiles`` is even), to float32 ``sums``.

    Always reads 16 or 32 rows of ``x``.
    """
    steps = size // 32
    output = TILE_BYTES * steps
    tile = np.int64(0)
    if rows > LANES:
        while tile < tiles:
            gemm_32x32(x, x_row, weight + tile * output, output, sums + 64 * tile, sums_row, steps)
            tile += 2
        return
    while tile + 4 <= tiles:
        gemm_16x64(x, x_row, weight + tile * output, output, sums + 64 * tile, sums_row, steps)
        tile += 4
    if tile < tiles:
        gemm_16x32(x, x_row, weight + tile * output, output, sums + 64 * tile, sums_row, steps)


@kernel(LINEAR)
def linear(pointer):  # type: ignore[no-untyped-def]
    """out = x · weightᵀ + bias."""
    a = carray(pointer, 1)[0]
    scratch = a.scratch + a.scratch_bytes * atomic_add(a.counters, 1, 1)
    sums, last = scratch + 64, scratch + 64 + SUMS_BYTES
    tiles = 4 if a.rows <= LANES else 2
    all_tiles = a.outputs // 16
    panels = (all_tiles + tiles - 1) // tiles
    whole = a.rows // GROUP_ROWS * GROUP_ROWS
    load_tile_config(a.tiles, scratch)
    if whole < a.rows:
        copy_lines(a.x + 2 * whole * a.size, 2 * a.size, last, 2 * a.size, a.rows - whole, 2 * a.size)
    while True:
        item = atomic_add(a.counters, 0, 1)
        if item >= panels * ((a.rows + BLOCK_ROWS - 1) // BLOCK_ROWS):
            break
        begin, tile = item // panels * BLOCK_ROWS, item % panels * tiles
        width = min(tiles, all_tiles - tile)
        for first in range(begin, min(begin + BLOCK_ROWS, a.rows), GROUP_ROWS):
            rows = min(a.rows - first, GROUP_ROWS)
            x = a.x + 2 * first * a.size if rows == GROUP_ROWS else last
            gemm_rows(x, 2 * a.size, a.weight + 32 * tile * a.size, a.size, width, sums, 256, rows)
            if a.bias:
                add_bias(sums, 256, a.bias + 64 * tile, rows, 16 * width)
            target = a.out + 2 * (first * a.outputs + 16 * tile)
            convert_rows(sums, 256, FLOAT32, target, 2 * a.outputs, BFLOAT16, rows, 16 * width)
    restore_tile_config(scratch)
