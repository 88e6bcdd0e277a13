"""Softmax in kernels, in two layouts, and transposes between them.

The generic kernel has a query in each column, the AMX kernel a query in each row::

    generic   keys ↓  queries →          AMX   queries ↓  keys →
    key 0     q0 q1 … q15                q0    k0 k1 k2 …
    key 1     q0 q1 … q15                q1    k0 k1 k2 …
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from anaphora.kernels.cpu.amx import PROCESSOR_HAS_AMX
from anaphora.kernels.cpu.simd import (
    ADDRESS,
    FLOAT,
    FLOATS,
    INT16,
    INT32,
    INTS,
    LANES,
    NUMBER,
    REAL,
    at,
    call,
    constant,
    fma,
    load,
    number,
    operation,
    reduce_add,
    splat,
    steps,
    store,
    store_bf16,
)


def larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def exp2(builder: Any, x: Any, exact: bool) -> Any:
    """2 to the power of ``x``, 0 from 2^-127 down; to float32 rounding, or to a part in 12,000 if not ``exact``."""
    x = larger(builder, x, constant(-127.0))
    whole = call(builder, "llvm.rint.v16f32", FLOATS, x)
    rest = builder.fsub(x, whole)
    powers = (
        (0.001326697039, 0.009675459746, 0.05550742616, 0.2402212175, 0.6931469492, 1.000000071)
        if exact
        else (0.05508868381, 0.2426040515, 0.6932762417, 0.9999289404)
    )
    result = constant(powers[0])
    for power in powers[1:]:
        result = fma(builder, result, rest, constant(power))
    exponent = builder.add(builder.fptosi(whole, INTS), ir.Constant(INTS, [127] * LANES))
    bits = builder.shl(exponent, ir.Constant(INTS, [23] * LANES))
    return builder.fmul(result, builder.bitcast(bits, FLOATS))


def _round_pairs(builder: Any, low: Any, high: Any) -> Any:
    """Two vectors to bfloat16, side by side in one: each lane holds one of ``low`` and behind it one of ``high``."""
    half = ir.Constant(INTS, [0x8000] * LANES)
    low, high = (builder.add(builder.bitcast(x, INTS), half) for x in (low, high))
    low = builder.lshr(low, ir.Constant(INTS, [16] * LANES))
    return builder.or_(low, builder.and_(high, ir.Constant(INTS, [0xFFFF0000] * LANES)))


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """16 vectors of 16: row i, lane j to row j, lane i, by exchanging larger and larger squares off the diagonal."""
    rows = list(rows)
    for size in (1, 2, 4, 8):
        upper = [k if not k & size else LANES + k - size for k in range(LANES)]
        lower = [k + size if not k & size else LANES + k for k in range(LANES)]
        for i in range(LANES):
            if not i & size:
                a, b = rows[i], rows[i | size]
                rows[i], rows[i | size] = (
                    builder.shuffle_vector(a, b, ir.Constant(INTS, mask)) for mask in (upper, lower)
                )
    return rows


@operation(ADDRESS, NUMBER, ADDRESS, NUMBER)
def transpose(builder: Any, source: Any, step: Any, target: Any, target_step: Any) -> None:
    """A square of 16 × 16 words of 4 bytes; steps between rows in words."""
    rows = [load(builder, source, builder.mul(step, number(i))) for i in range(LANES)]
    for i, row in enumerate(_transposed(builder, rows)):
        store(builder, row, target, builder.mul(target_step, number(i)))


@operation(ADDRESS, NUMBER, ADDRESS)
def transpose_pairs(builder: Any, source: Any, step: Any, target: Any) -> None:
    """32 rows of 16 bfloat16 numbers to 16 rows of 32, which lie one behind the other; ``step`` in numbers."""
    halves = ir.VectorType(INT16, LANES)
    rows = []
    for i in range(LANES):
        low, high = (
            builder.zext(
                builder.load(
                    builder.bitcast(
                        at(builder, source, builder.mul(step, number(2 * i + n)), INT16), halves.as_pointer()
                    ),
                    align=2,
                ),
                INTS,
            )
            for n in range(2)
        )
        rows.append(builder.or_(low, builder.shl(high, ir.Constant(INTS, [16] * LANES))))
    for i, row in enumerate(_transposed(builder, rows)):
        store(builder, row, target, number(LANES * i))


# --- Softmax over the rows of a matrix with 16 columns ----------------------------------------------------------------


@operation(ADDRESS, NUMBER, NUMBER, ADDRESS, ADDRESS)
def mask_columns(builder: Any, scores: Any, count: Any, first: Any, lows: Any, ends: Any) -> None:
    """Sets scores of masked keys to -inf: a column sees keys ``lows`` to ``ends`` - 1; row 0 is key ``first``."""
    low, end = (builder.bitcast(load(builder, x, number(0)), INTS) for x in (lows, ends))
    hidden = constant(-np.inf)
    with steps(builder, count, 1) as i:
        place = builder.mul(i, number(LANES))
        key = splat(builder, builder.trunc(builder.add(first, i), INT32))
        seen = builder.and_(builder.icmp_signed(">=", key, low), builder.icmp_signed("<", key, end))
        store(builder, builder.select(seen, load(builder, scores, place), hidden), scores, place)


@operation(ADDRESS, NUMBER, REAL)
def cap(builder: Any, scores: Any, count: Any, factor: Any) -> None:
    """tanh of ``factor`` times each score."""
    double = splat(builder, builder.fmul(factor, ir.Constant(FLOAT, float(np.float32(2 * np.log2(np.e))))))
    with steps(builder, count, 1) as i:
        place = builder.mul(i, number(LANES))
        x = builder.fmul(load(builder, scores, place), double)
        negative = builder.fcmp_ordered("<", x, constant(0.0))
        size = builder.select(negative, x, builder.fsub(constant(0.0), x))  # -|x|
        small = exp2(builder, size, exact=True)
        one = constant(1.0)
        tanh = builder.fdiv(builder.fsub(one, small), builder.fadd(one, small))
        store(builder, builder.select(negative, builder.fsub(constant(0.0), tanh), tanh), scores, place)


def _softmax(pairs: bool) -> Any:
    @operation(ADDRESS, NUMBER, REAL, ADDRESS, ADDRESS, ADDRESS, ADDRESS)
    def softmax(
        builder: Any, scores: Any, count: Any, factor: Any, largest: Any, total: Any, rescale: Any, weights: Any
    ) -> None:
        """Scores times ``factor`` to weights, powers of 2 relative to the largest of each column so far.

        ``largest`` and ``total`` are updated from block to block; ``rescale`` is the factor for earlier sums.
        ``count`` is a multiple of 4. With ``pairs`` weights are bfloat16, and two rows of scores make one row of pairs.
        """
        factor, zero = splat(builder, factor), number(0)
        tops = [cgutils.alloca_once_value(builder, constant(-np.inf)) for _ in range(4)]
        with steps(builder, count, 4) as i:
            for n, top in enumerate(tops):
                row = load(builder, scores, builder.mul(builder.add(i, number(n)), number(LANES)))
                builder.store(larger(builder, row, builder.load(top)), top)
        a, b, c, d = (builder.load(top) for top in tops)
        top = builder.fmul(larger(builder, larger(builder, a, b), larger(builder, c, d)), factor)
        before = load(builder, largest, zero)
        top = larger(builder, top, before)
        store(builder, top, largest, zero)
        change = exp2(builder, builder.fsub(before, top), exact=True)
        store(builder, change, rescale, zero)
        sums = [cgutils.alloca_once_value(builder, constant(0.0)) for _ in range(4)]
        low = builder.fsub(constant(0.0), top)
        with steps(builder, count, 4) as i:
            rows = []
            for n, chain in enumerate(sums):
                place = builder.mul(builder.add(i, number(n)), number(LANES))
                x = fma(builder, load(builder, scores, place), factor, low)
                weight = exp2(builder, x, exact=not pairs)
                builder.store(builder.fadd(builder.load(chain), weight), chain)
                rows.append(weight)
                if not pairs:
                    store(builder, weight, weights, place)
            if pairs:
                for n in range(2):
                    place = builder.mul(builder.add(builder.lshr(i, number(1)), number(n)), number(LANES))
                    store(builder, _round_pairs(builder, rows[2 * n], rows[2 * n + 1]), weights, place)
        a, b, c, d = (builder.load(chain) for chain in sums)
        added = builder.fadd(builder.fadd(a, b), builder.fadd(c, d))
        store(builder, fma(builder, load(builder, total, zero), change, added), total, zero)

    return softmax


softmax, softmax_pairs = _softmax(pairs=False), _softmax(pairs=True)


@operation(ADDRESS, ADDRESS, NUMBER, ADDRESS)
def rescale_add(builder: Any, sums: Any, added: Any, rows: Any, factors: Any) -> None:
    """``sums`` times the columns' ``factors``, plus ``added``; ``rows`` of 16."""
    factor = load(builder, factors, number(0))
    with steps(builder, rows, 1) as i:
        place = builder.mul(i, number(LANES))
        row = fma(builder, load(builder, sums, place), factor, load(builder, added, place))
        store(builder, row, sums, place)


# --- Softmax of a row, whose lanes are keys ---------------------------------------------------------------------------

_EIGHT_BITS = (0.0780244916677475, 0.22606757283210754, 0.6958332061767578, 0.9999252557754517)
"""A polynomial for 2 to the power of 0 to 1, to a part in 13,000."""


def _power(builder: Any, x: Any) -> Any:
    """2 to the power of ``x``, for weights that become bfloat16."""
    if not PROCESSOR_HAS_AMX:
        return exp2(builder, x, exact=False)
    every, flag = ir.Constant(INT16, -1), ir.Constant(INT32, 4)
    down = ir.Constant(INT32, 9)  # less its floor, without a report
    rest = call(builder, "llvm.x86.avx512.mask.reduce.ps.512", FLOATS, x, down, x, every, flag)
    result = constant(_EIGHT_BITS[0])
    for power in _EIGHT_BITS[1:]:
        result = fma(builder, result, rest, constant(power))
    return call(builder, "llvm.x86.avx512.mask.scalef.ps.512", FLOATS, result, x, result, every, flag)


class _Brain(ir.Type):
    """LLVM's type bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Brain)

    def __hash__(self) -> int:
        return hash(_Brain)


_PAIR = ir.VectorType(_Brain(), 2 * LANES)


@operation(ADDRESS, NUMBER, NUMBER, NUMBER)
def mask_lanes(builder: Any, scores: Any, count: Any, low: Any, end: Any) -> None:
    """Sets scores outside of ``low`` to ``end - 1`` to -inf."""
    low, end = (splat(builder, builder.trunc(x, INT32)) for x in (low, end))
    lanes = ir.Constant(INTS, list(range(LANES)))
    with steps(builder, count, LANES) as i:
        key = builder.add(splat(builder, builder.trunc(i, INT32)), lanes)
        seen = builder.and_(builder.icmp_signed(">=", key, low), builder.icmp_signed("<", key, end))
        store(builder, builder.select(seen, load(builder, scores, i), constant(-np.inf)), scores, i)


@operation(ADDRESS, NUMBER, result=REAL)
def max_of(builder: Any, scores: Any, count: Any) -> Any:
    """The maximum of ``count`` scores, a multiple of 64."""
    tops = [cgutils.alloca_once_value(builder, constant(-np.inf)) for _ in range(4)]
    for top in tops:
        builder.store(constant(-np.inf), top)
    with steps(builder, count, 4 * LANES) as i:
        for n, top in enumerate(tops):
            row = load(builder, scores, builder.add(i, number(LANES * n)))
            builder.store(larger(builder, row, builder.load(top)), top)
    a, b, c, d = (builder.load(top) for top in tops)
    top = larger(builder, larger(builder, a, b), larger(builder, c, d))
    return call(builder, "llvm.vector.reduce.fmax.v16f32", FLOAT, top)


@operation(ADDRESS, result=REAL)
def sum_of(builder: Any, numbers: Any) -> Any:
    """The sum of 16."""
    return reduce_add(builder, load(builder, numbers, number(0)))


@operation(ADDRESS, NUMBER, REAL, REAL, ADDRESS, ADDRESS)
def softmax_weights(builder: Any, scores: Any, count: Any, factor: Any, top: Any, total: Any, weights: Any) -> None:
    """Weights, 2 to the power of score · ``factor`` - ``top``, as bfloat16; their sum goes to the lanes of ``total``.

    ``count`` is a multiple of 64.
    """
    factor, low = splat(builder, factor), splat(builder, builder.fsub(ir.Constant(FLOAT, 0.0), top))
    sums = [cgutils.alloca_once_value(builder, constant(0.0)) for _ in range(4)]
    for chain in sums:
        builder.store(constant(0.0), chain)
    with steps(builder, count, 4 * LANES) as i:
        found = []
        for n, chain in enumerate(sums):
            score = load(builder, scores, builder.add(i, number(LANES * n)))
            found.append(_power(builder, fma(builder, score, factor, low)))
            builder.store(builder.fadd(builder.load(chain), found[-1]), chain)
        for n in range(0, 4, 2):
            if not PROCESSOR_HAS_AMX:
                for m in (n, n + 1):
                    store_bf16(builder, found[m], weights, builder.add(i, number(LANES * m)))
                continue
            pair = call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", _PAIR, found[n + 1], found[n])
            place = builder.add(builder.lshr(i, number(1)), number(LANES // 2 * n))
            store(builder, builder.bitcast(pair, INTS), weights, place)
    a, b, c, d = (builder.load(chain) for chain in sums)
    added = builder.fadd(builder.fadd(a, b), builder.fadd(c, d))
    store(builder, builder.fadd(load(builder, total, number(0)), added), total, number(0))
