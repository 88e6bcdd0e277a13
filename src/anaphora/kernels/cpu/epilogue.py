"""Rows in compiled kernels: RMS norm, and what is done with the sums of a product before they are kept.

Sums are float32, kept rows bfloat16. Steps between rows are in bytes, sizes are multiples of 16.
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
    add_up,
    call,
    constant,
    load,
    load_narrow,
    multiply_add,
    number,
    operation,
    splat,
    steps,
    store,
    store_narrow,
)
from anaphora.kernels.cpu.softmax import exp2


def _row(builder: Any, address: Any, step: Any, row: Any) -> Any:
    return builder.add(address, builder.mul(step, row))


def _norm(builder: Any, given: Any, weight: Any, put: Any, size: Any, eps: Any) -> None:
    chain = cgutils.alloca_once_value(builder, constant(0.0))
    builder.store(constant(0.0), chain)
    with steps(builder, size, LANES) as i:
        x = given(i)
        builder.store(multiply_add(builder, x, x, builder.load(chain)), chain)
    square = add_up(builder, builder.load(chain))
    mean = builder.fadd(builder.fdiv(square, builder.sitofp(size, FLOAT)), eps)
    factor = splat(builder, builder.fdiv(ir.Constant(FLOAT, 1.0), call(builder, "llvm.sqrt.f32", FLOAT, mean)))
    with steps(builder, size, LANES) as i:
        put(builder.fmul(builder.fmul(given(i), factor), load(builder, weight, i)), i)


@operation(ADDRESS, ADDRESS, ADDRESS, NUMBER, REAL)
def norm_row(builder: Any, source: Any, weight: Any, target: Any, size: Any, eps: Any) -> None:
    """One row over the root of its mean square, times ``weight`` (float32)."""
    _norm(
        builder,
        lambda i: load_narrow(builder, source, i),
        weight,
        lambda x, i: store_narrow(builder, x, target, i),
        size,
        eps,
    )


@operation(ADDRESS, NUMBER, ADDRESS, NUMBER, NUMBER, REAL)
def norm_sums(builder: Any, sums: Any, step: Any, weight: Any, rows: Any, size: Any, eps: Any) -> None:
    """``norm_row`` of rows of sums, in place."""
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
    """``bias`` (float32) to each row of sums, in place."""
    with steps(builder, rows, 1) as row:
        place = _row(builder, sums, step, row)
        with steps(builder, size, LANES) as i:
            store(builder, builder.fadd(load(builder, place, i), load(builder, bias, i)), place, i)


@operation(ADDRESS, NUMBER, ADDRESS, ADDRESS, NUMBER, NUMBER, NUMBER)
def turn_sums(
    builder: Any, sums: Any, step: Any, cosines: Any, sines: Any, angle_step: Any, rows: Any, size: Any
) -> None:
    """Rotary embedding of rows of sums, in place: elements i of the first half and of the second turn together.

    ``cosines`` and ``sines`` are bfloat16 ``[rows, size]``.
    """
    half = builder.lshr(size, number(1))
    with steps(builder, rows, 1) as row:
        place = _row(builder, sums, step, row)
        cosine, sine = (_row(builder, x, angle_step, row) for x in (cosines, sines))
        with steps(builder, half, LANES) as i:
            j = builder.add(i, half)
            a, b = load(builder, place, i), load(builder, place, j)
            first = builder.fmul(b, load_narrow(builder, sine, i))
            first = builder.fsub(builder.fmul(a, load_narrow(builder, cosine, i)), first)
            second = builder.fmul(a, load_narrow(builder, sine, j))
            store(builder, multiply_add(builder, b, load_narrow(builder, cosine, j), second), place, j)
            store(builder, first, place, i)


@operation(ADDRESS, NUMBER, ADDRESS, NUMBER, NUMBER, NUMBER)
def add_sums(builder: Any, sums: Any, step: Any, target: Any, target_step: Any, rows: Any, size: Any) -> None:
    """Rows of sums to kept rows, in place."""
    with steps(builder, rows, 1) as row:
        place, kept = _row(builder, sums, step, row), _row(builder, target, target_step, row)
        with steps(builder, size, LANES) as i:
            store_narrow(builder, builder.fadd(load(builder, place, i), load_narrow(builder, kept, i)), kept, i)


def _silu(builder: Any, x: Any) -> Any:
    negative = builder.fcmp_ordered("<", x, constant(0.0))
    distance = builder.select(negative, builder.fsub(constant(0.0), x), x)
    small = exp2(builder, builder.fmul(distance, constant(-np.log2(np.e))), exact=True)  # e to the power of -|x|
    share = builder.fdiv(builder.select(negative, small, constant(1.0)), builder.fadd(constant(1.0), small))
    return builder.fmul(x, share)


@operation(ADDRESS, NUMBER, ADDRESS, NUMBER, NUMBER, NUMBER)
def gate_sums(builder: Any, sums: Any, step: Any, target: Any, target_step: Any, rows: Any, size: Any) -> None:
    """silu(gate) · value, from sums in turn 16 gates and their 16 values; ``size`` of the target."""
    with steps(builder, rows, 1) as row:
        place, kept = _row(builder, sums, step, row), _row(builder, target, target_step, row)
        with steps(builder, size, LANES) as i:
            j = builder.mul(i, number(2))
            gate, value = load(builder, place, j), load(builder, place, builder.add(j, number(LANES)))
            store_narrow(builder, builder.fmul(_silu(builder, gate), value), kept, i)
