"""RMSNorm and rotary embedding for any dtype; they replace 7 (RMSNorm) and 14 (RoPE) torch operations.

An item of work is 16 tokens. Rotary embedding works in place::

    x    [heads, rows, size]   head 0: row 0 │ first half │ second half │     element i of both halves is rotated
    cos  [rows, size]                 row 0 │ first half │ second half │     by row 0's angle i
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray

from anaphora.kernels.cpu.launch import fields
from anaphora.kernels.cpu.simd import FLOAT32, atomic_add, convert, float32, inline, kernel, put_float32

ROWS = 16
"""Rows of an item of work."""

NORM = fields(
    "size",
    "weight",  # float32 [size]
    "x",  # [rows, size], of a kind
    "rows",
    "kind",
    "out",  # like x
    "scratch",  # float32 [threads, size]
    real=["eps"],
)

ROTATE = fields(
    "x",  # [heads, rows, size], of a kind
    "kind",
    "heads",
    "head_step",  # in elements
    "row_step",
    "rows",
    "size",
    "cosines",  # [rows, size], of a kind
    "sines",
    "angle_kind",
    "scratch",  # float32 [threads, 4, size]
)


@inline
def _norm(a, row, wide):  # type: ignore[no-untyped-def]
    convert(a.x, row * a.size, a.kind, wide, 0, FLOAT32, a.size)
    total = np.float32(0.0)
    for i in range(a.size):
        total += float32(wide, i) * float32(wide, i)
    factor = np.float32(1.0 / math.sqrt(total / a.size + a.eps))
    for i in range(a.size):
        put_float32(wide, i, float32(wide, i) * factor * float32(a.weight, i))
    convert(wide, 0, FLOAT32, a.out, row * a.size, a.kind, a.size)


@kernel(NORM)
def norm_rows(pointer):  # type: ignore[no-untyped-def]
    """RMSNorm of each row."""
    a = carray(pointer, 1)[0]
    wide = a.scratch + 4 * a.size * atomic_add(a.counters, 1, 1)
    while True:
        first = atomic_add(a.counters, 0, 1) * ROWS
        if first >= a.rows:
            break
        for row in range(first, min(first + ROWS, a.rows)):
            _norm(a, row, wide)


@kernel(ROTATE)
def rotate_rows(pointer):  # type: ignore[no-untyped-def]
    """Rotates each head in place, by the row's angles."""
    a = carray(pointer, 1)[0]
    wide = a.scratch + 16 * a.size * atomic_add(a.counters, 1, 1)
    rotated, cosines, sines, half = wide + 4 * a.size, wide + 8 * a.size, wide + 12 * a.size, a.size // 2
    while True:
        first = atomic_add(a.counters, 0, 1) * ROWS
        if first >= a.rows:
            break
        for row in range(first, min(first + ROWS, a.rows)):
            convert(a.cosines, row * a.size, a.angle_kind, cosines, 0, FLOAT32, a.size)
            convert(a.sines, row * a.size, a.angle_kind, sines, 0, FLOAT32, a.size)
            for head in range(a.heads):
                at = head * a.head_step + row * a.row_step
                convert(a.x, at, a.kind, wide, 0, FLOAT32, a.size)
                for i in range(half):
                    put_float32(
                        rotated,
                        i,
                        float32(wide, i) * float32(cosines, i) - float32(wide, half + i) * float32(sines, i),
                    )
                for i in range(half, a.size):
                    put_float32(
                        rotated,
                        i,
                        float32(wide, i) * float32(cosines, i) + float32(wide, i - half) * float32(sines, i),
                    )
                convert(rotated, 0, FLOAT32, a.x, at, a.kind, a.size)
