"""The compiled kernel of a linear layer in bfloat16, on processors with tile registers.

It stands for oneDNN's, which prepares itself anew for each number of rows, and whose result for a row depends on how
many are beside it; here it does not.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from anaphora.kernels.cpu.amx import TILE_BYTES, close_tiles, multiply_four, multiply_square, multiply_two, open_tiles
from anaphora.kernels.cpu.epilogue import add_bias
from anaphora.kernels.cpu.launch import fields
from anaphora.kernels.cpu.simd import BFLOAT16, FLOAT32, LANES, atomic_add, convert_rows, copy_lines, inline, kernel

GROUP_ROWS = 32
"""Rows whose sums are made together."""

BLOCK_ROWS = 128
"""Rows of an item of work, at most: as many as stay in a core's own cache while the weights go by."""

SUMS_BYTES = 4 * GROUP_ROWS * 64
"""Of the sums of a group of rows for four tiles of outputs, the most that an item of ``project`` has."""

PROJECT = fields(
    "size",  # of a row that comes in, a multiple of 32
    "outputs",  # a multiple of 32
    "weight",  # see ``packed.pack``
    "bias",  # float32 [outputs], or 0
    "tiles",
    "x",  # bfloat16 [rows, size]
    "rows",
    "out",  # bfloat16 [rows, outputs]
    "scratch",
    "scratch_bytes",  # of one thread
)


def project_bytes(size: int) -> int:
    """Of a thread's scratch: the shape that the tiles had before, sums, and the last group of rows, filled up."""
    return 64 + SUMS_BYTES + 2 * GROUP_ROWS * size


@inline
def multiply_group(x, x_row, weight, size, tiles, sums, sums_row, rows):  # type: ignore[no-untyped-def]
    """Sums of up to 32 rows for ``tiles`` · 16 outputs, an even number of tiles.

    16 or 32 rows are read, whatever ``rows`` is.
    """
    steps = size // 32
    output = TILE_BYTES * steps
    tile = np.int64(0)
    if rows > LANES:
        while tile < tiles:
            multiply_square(x, x_row, weight + tile * output, output, sums + 64 * tile, sums_row, steps)
            tile += 2
        return
    while tile + 4 <= tiles:
        multiply_four(x, x_row, weight + tile * output, output, sums + 64 * tile, sums_row, steps)
        tile += 4
    if tile < tiles:
        multiply_two(x, x_row, weight + tile * output, output, sums + 64 * tile, sums_row, steps)


@kernel(PROJECT)
def project(pointer):  # type: ignore[no-untyped-def]
    """Items are some outputs for a block of rows."""
    a = carray(pointer, 1)[0]
    scratch = a.scratch + a.scratch_bytes * atomic_add(a.counters, 1, 1)
    sums, last = scratch + 64, scratch + 64 + SUMS_BYTES
    tiles = 4 if a.rows <= LANES else 2
    all_tiles = a.outputs // 16
    panels = (all_tiles + tiles - 1) // tiles
    whole = a.rows // GROUP_ROWS * GROUP_ROWS
    open_tiles(a.tiles, scratch)
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
            multiply_group(x, 2 * a.size, a.weight + 32 * tile * a.size, a.size, width, sums, 256, rows)
            if a.bias:
                add_bias(sums, 256, a.bias + 64 * tile, rows, 16 * width)
            target = a.out + 2 * (first * a.outputs + 16 * tile)
            convert_rows(sums, 256, FLOAT32, target, 2 * a.outputs, BFLOAT16, rows, 16 * width)
    close_tiles(scratch)
