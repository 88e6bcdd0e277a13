"""Epilogues of a GEMM, while its float32 sums are in cache: bias, RMSNorm, rotary embedding, residual, SiLU gate.

``sums`` are float32 rows of a group, ``step`` bytes apart; activations are bfloat16 rows in memory. ``size`` is the
number of elements of a row, a multiple of 16::

    sums    row 0  ████████████████░░░░      target   row 0  ▓▓▓▓▓▓▓▓
            row 1  ████████████████░░░░  →            row 1  ▓▓▓▓▓▓▓▓
                   ├──── size ────┤  step                    ├─ size ─┤  target_step
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from anaphora.kernels.cpu.simd import (
    ADDRESS,
    FLOAT,
    LANES,
    NUMBER,
    REAL,
    call,
    constant,
    fma,
    load,
    load_bf16,
    number,
    operation,
    reduce_add,
    splat,
    steps,
    store,
    store_bf16,
)
from anaphora.kernels.cpu.softmax import exp2


def _row(builder: Any, address: Any, step: Any, row: Any) -> Any:
    return builder.add(address, builder.mul(step, row))


def _norm(builder: Any, given: Any, weight: Any, put: Any, size: Any, eps: Any) -> None:
    chain = cgutils.alloca_once_value(builder, constant(0.0))
    builder.store(constant(0.0), chain)
    with steps(builder, size, LANES) as i:
        x = given(i)
        builder.store(fma(builder, x, x, builder.load(chain)), chain)
    square = reduce_add(builder, builder.load(chain))
    mean = builder.fadd(builder.fdiv(square, builder.sitofp(size, FLOAT)), eps)
    factor = splat(builder, builder.fdiv(ir.Constant(FLOAT, 1.0), call(builder, "llvm.sqrt.f32", FLOAT, mean)))
    with steps(builder, size, LANES) as i:
        put(builder.fmul(builder.fmul(given(i), factor), load(builder, weight, i)), i)


@operation(ADDRESS, ADDRESS, ADDRESS, NUMBER, REAL)
def rms_norm_row(builder: Any, source: Any, weight: Any, target: Any, size: Any, eps: Any) -> None:
    """RMSNorm of one bfloat16 row, with a float32 ``weight``."""
    _norm(
        builder,
        lambda i: load_bf16(builder, source, i),
        weight,
        lambda x, i: store_bf16(builder, x, target, i),
        size,
        eps,
    )


@operation(ADDRESS, NUMBER, ADDRESS, NUMBER, NUMBER, REAL)
def rms_norm_rows(builder: Any, sums: Any, step: Any, weight: Any, rows: Any, size: Any, eps: Any) -> None:
    """``rms_norm_row`` of rows of sums, in place."""
    with steps(builder, rows, 1) as row:
        place = _row(builder, sums, step, row)
        _norm(
            builder,
            lambda i, place=place: load(builder, place, i),  # type: ignore[misc]
            weight,
            lambda x, i, place=place: store(builder, x, place, i),  # type: ignore[misc]
            size,
            eps,
        )


@operation(ADDRESS, NUMBER, ADDRESS, NUMBER, NUMBER)
def add_bias(builder: Any, sums: Any, step: Any, bias: Any, rows: Any, size: Any) -> None:
    """Adds ``bias`` (float32) to each row of sums, in place."""
    with steps(builder, rows, 1) as row:
        place = _row(builder, sums, step, row)
        with steps(builder, size, LANES) as i:
            store(builder, builder.fadd(load(builder, place, i), load(builder, bias, i)), place, i)


@operation(ADDRESS, NUMBER, ADDRESS, ADDRESS, NUMBER, NUMBER, NUMBER)
def rope_rows(
    builder: Any, sums: Any, step: Any, cosines: Any, sines: Any, angle_step: Any, rows: Any, size: Any
) -> None:
    """Rotary embedding of rows of sums, in place: element i of the first half is rotated with element i of the second.

    ``cosines`` and ``sines`` are bfloat16 ``[rows, size]``.
    """
    half = builder.lshr(size, number(1))
    with steps(builder, rows, 1) as row:
        place = _row(builder, sums, step, row)
        cosine, sine = (_row(builder, x, angle_step, row) for x in (cosines, sines))
        with steps(builder, half, LANES) as i:
            j = builder.add(i, half)
            a, b = load(builder, place, i), load(builder, place, j)
            first = builder.fmul(b, load_bf16(builder, sine, i))
            first = builder.fsub(builder.fmul(a, load_bf16(builder, cosine, i)), first)
            second = builder.fmul(a, load_bf16(builder, sine, j))
            store(builder, fma(builder, b, load_bf16(builder, cosine, j), second), place, j)
            store(builder, first, place, i)


@operation(ADDRESS, NUMBER, ADDRESS, NUMBER, NUMBER, NUMBER)
def add_residual(builder: Any, sums: Any, step: Any, target: Any, target_step: Any, rows: Any, size: Any) -> None:
    """Adds rows of sums to the bfloat16 rows at ``target``."""
    with steps(builder, rows, 1) as row:
        place, kept = _row(builder, sums, step, row), _row(builder, target, target_step, row)
        with steps(builder, size, LANES) as i:
            store_bf16(builder, builder.fadd(load(builder, place, i), load_bf16(builder, kept, i)), kept, i)


def _silu(builder: Any, x: Any) -> Any:
    negative = builder.fcmp_ordered("<", x, constant(0.0))
    distance = builder.select(negative, builder.fsub(constant(0.0), x), x)
    small = exp2(builder, builder.fmul(distance, constant(-np.log2(np.e))), exact=True)  # e to the power of -|x|
    share = builder.fdiv(builder.select(negative, small, constant(1.0)), builder.fadd(constant(1.0), small))
    return builder.fmul(x, share)


@operation(ADDRESS, NUMBER, ADDRESS, NUMBER, NUMBER, NUMBER)
def silu_and_mul(builder: Any, sums: Any, step: Any, target: Any, target_step: Any, rows: Any, size: Any) -> None:
    """silu(gate) · up, from sums that alternate 16 gates and their 16 ups; ``size`` is that of the target."""
    with steps(builder, rows, 1) as row:
        place, kept = _row(builder, sums, step, row), _row(builder, target, target_step, row)
        with steps(builder, size, LANES) as i:
            j = builder.mul(i, number(2))
            gate, value = load(builder, place, j), load(builder, place, builder.add(j, number(LANES)))
            store_bf16(builder, builder.fmul(_silu(builder, gate), value), kept, i)
