"""What the compiled kernels of the CPU are made of: memory by address, bfloat16, vectors of 16, atomic counters.

Vectors are written out rather than left to the compiler, which would make them half as wide and check before every
loop whether its memory overlaps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

BFLOAT16, FLOAT32 = 0, 1
"""What a record calls the dtype of the numbers at an address."""

LANES = 16
"""Numbers of a vector."""

OPTIONS: dict[str, Any] = {
    # Without the flags that promise the absence of infinities and of not-a-number: both occur.
    "fastmath": {"reassoc", "contract", "arcp", "nsz", "afn"},
    "error_model": "numpy",
}
inline = njit(**OPTIONS)


def operation(*given: Any, result: Any = types.void) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function that emits LLVM code for ``(builder, *arguments)`` callable in compiled code."""

    def make(emit: Callable[..., Any]) -> Any:
        def typed(typing, *args):  # type: ignore[no-untyped-def]
            def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
                value = emit(builder, *args)
                return context.get_dummy_value() if value is None else value

            return result(*given), generate

        typed.__name__ = emit.__name__
        typed.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]
        return intrinsic(typed)

    return make


# --- Memory by address ------------------------------------------------------------------------------------------------

INT8, INT16, INT32, INT64, FLOAT = (*(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.FloatType())
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT32, LANES)
ADDRESS, NUMBER, REAL = types.int64, types.int64, types.float32


def at(builder: Any, address: Any, index: Any, element: Any) -> Any:
    """The pointer to element ``index`` (a number of elements)."""
    return builder.gep(builder.inttoptr(address, element.as_pointer()), [index])


def number(value: int) -> Any:
    return ir.Constant(INT64, value)


def call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    """Call one of LLVM's own functions."""
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(result, [x.type for x in args]), name)
    return builder.call(function, args)


def prefetch_line(builder: Any, pointer: Any) -> None:
    """Ask for the cache line of a pointer to bytes."""
    call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, *(ir.Constant(INT32, x) for x in (0, 3, 1)))


def _loader(element: Any, size: int, result: Any, convert: Callable[[Any, Any], Any]) -> Any:
    """``(address, index)``: the element there, made to a ``result``."""

    @operation(ADDRESS, NUMBER, result=result)
    def load(builder: Any, address: Any, index: Any) -> Any:
        return convert(builder, builder.load(at(builder, address, index, element), align=size))

    return load


def _storer(element: Any, size: int, given: Any) -> Any:
    """``(address, index, value)``."""

    @operation(ADDRESS, NUMBER, given)
    def store(builder: Any, address: Any, index: Any, value: Any) -> None:
        builder.store(value, at(builder, address, index, element), align=size)

    return store


def _widen(builder: Any, bits: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(bits, INT32), ir.Constant(INT32, 16)), FLOAT)


int32 = _loader(INT32, 4, types.int64, lambda builder, x: builder.sext(x, INT64))
int64 = _loader(INT64, 8, types.int64, lambda builder, x: x)
float32 = _loader(FLOAT, 4, types.float32, lambda builder, x: x)
bfloat16 = _loader(INT16, 2, types.float32, _widen)
uint16 = _loader(INT16, 2, types.uint16, lambda builder, x: x)
put_int32 = _storer(INT32, 4, types.int32)
put_int64 = _storer(INT64, 8, types.int64)
put_float32 = _storer(FLOAT, 4, types.float32)
put_uint16 = _storer(INT16, 2, types.uint16)


@operation(ADDRESS, NUMBER, NUMBER, result=types.int64)
def atomic_add(builder: Any, address: Any, index: Any, amount: Any) -> Any:
    """Add to an int64 that all threads see; what it was before."""
    return builder.atomic_rmw("add", at(builder, address, index, INT64), amount, "seq_cst")


@operation(REAL, result=types.uint32)
def _bits(builder: Any, value: Any) -> Any:
    return builder.bitcast(value, INT32)


@inline
def _put_bfloat16(address, index, value):  # type: ignore[no-untyped-def]
    bits = _bits(value)
    rounded = np.uint32(
        np.uint32(bits + np.uint32(0x7FFF)) + np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    )
    upper = np.uint32(rounded >> np.uint32(16)) if value == value else np.uint32(0x7FC0)
    put_uint16(address, index, np.uint16(upper))


@inline
def put_zeros(target, begin, end, kind):  # type: ignore[no-untyped-def]
    if kind == BFLOAT16:
        for i in range(begin, end):
            put_uint16(target, i, np.uint16(0))
    else:
        for i in range(begin, end):
            put_float32(target, i, np.float32(0.0))


@inline
def scale(target, count, factor):  # type: ignore[no-untyped-def]
    for i in range(count):
        put_float32(target, i, float32(target, i) * factor)


@inline
def add_scaled(source, offset, weight, total, count):  # type: ignore[no-untyped-def]
    for i in range(count):
        put_float32(total, i, float32(total, i) + weight * float32(source, offset + i))


# --- Vectors ----------------------------------------------------------------------------------------------------------


@contextmanager
def steps(builder: Any, end: Any, step: int) -> Iterator[Any]:
    """A loop from 0 to ``end``; gives the index."""
    with cgutils.for_range_slice(builder, number(0), end, number(step)) as (index, _):
        yield index


def _mover(given: int, wanted: int) -> Any:
    """``(source, step, target, target_step, rows, count)``: numbers of one kind to the other, or the same.

    Steps between rows in bytes; ``count`` of a row is a multiple of 16.
    """
    source_type, target_type = (ir.VectorType(INT16, LANES) if x == BFLOAT16 else INTS for x in (given, wanted))

    def turn(builder: Any, bits: Any) -> Any:
        if given == wanted:
            return bits
        sixteen = ir.Constant(INTS, [16] * LANES)
        if given == BFLOAT16:
            return builder.shl(builder.zext(bits, INTS), sixteen)
        last = builder.and_(builder.lshr(bits, sixteen), ir.Constant(INTS, [1] * LANES))
        rounded = builder.add(builder.add(bits, ir.Constant(INTS, [0x7FFF] * LANES)), last)
        floats = builder.bitcast(bits, FLOATS)
        nothing = builder.fcmp_unordered("uno", floats, floats)
        upper = builder.select(nothing, ir.Constant(INTS, [0x7FC0] * LANES), builder.lshr(rounded, sixteen))
        return builder.trunc(upper, target_type)

    @operation(ADDRESS, NUMBER, ADDRESS, NUMBER, NUMBER, NUMBER)
    def move(builder: Any, source: Any, step: Any, target: Any, target_step: Any, rows: Any, count: Any) -> None:
        with steps(builder, rows, 1) as row:
            start = at(builder, source, builder.mul(row, step), INT8)
            end = at(builder, target, builder.mul(row, target_step), INT8)
            start = builder.bitcast(start, source_type.element.as_pointer())
            end = builder.bitcast(end, target_type.element.as_pointer())
            with steps(builder, count, LANES) as i:
                pointer = builder.bitcast(builder.gep(start, [i]), source_type.as_pointer())
                value = turn(builder, builder.load(pointer, align=2))
                builder.store(value, builder.bitcast(builder.gep(end, [i]), target_type.as_pointer()), align=2)

    return move


_move_bfloat16, _move_float32 = _mover(BFLOAT16, BFLOAT16), _mover(FLOAT32, FLOAT32)
_widen_all, _round_all = _mover(BFLOAT16, FLOAT32), _mover(FLOAT32, BFLOAT16)


@inline
def convert_rows(source, step, given, target, target_step, wanted, rows, count):  # type: ignore[no-untyped-def]
    """``count`` numbers of each row, of one kind to the other, or the same; steps between rows in bytes."""
    whole = count // LANES * LANES
    if given == BFLOAT16 and wanted == BFLOAT16:
        _move_bfloat16(source, step, target, target_step, rows, whole)
    elif given == BFLOAT16:
        _widen_all(source, step, target, target_step, rows, whole)
    elif wanted == BFLOAT16:
        _round_all(source, step, target, target_step, rows, whole)
    else:
        _move_float32(source, step, target, target_step, rows, whole)
    if whole < count:
        for row in range(rows):
            for i in range(whole, count):
                value = bfloat16(source + row * step, i) if given == BFLOAT16 else float32(source + row * step, i)
                if wanted == BFLOAT16:
                    _put_bfloat16(target + row * target_step, i, value)
                else:
                    put_float32(target + row * target_step, i, value)


@inline
def convert(source, offset, given, target, begin, wanted, count):  # type: ignore[no-untyped-def]
    """One row, from element ``offset`` to element ``begin`` on."""
    source += (2 if given == BFLOAT16 else 4) * offset
    target += (2 if wanted == BFLOAT16 else 4) * begin
    convert_rows(source, 0, given, target, 0, wanted, 1, count)


@operation(ADDRESS, NUMBER, NUMBER, NUMBER)
def prefetch_rows(builder: Any, address: Any, step: Any, rows: Any, size: Any) -> None:
    """Ask for the cache lines of rows that will be read soon; ``step`` and ``size`` of a row in bytes."""
    with steps(builder, rows, 1) as row:
        start = at(builder, address, builder.mul(row, step), INT8)
        with steps(builder, size, 64) as line:
            prefetch_line(builder, builder.gep(start, [line]))


def load(builder: Any, address: Any, index: Any) -> Any:
    """16 numbers from element ``index`` on."""
    return builder.load(builder.bitcast(at(builder, address, index, FLOAT), FLOATS.as_pointer()), align=4)


def store(builder: Any, vector: Any, address: Any, index: Any) -> None:
    builder.store(vector, builder.bitcast(at(builder, address, index, FLOAT), vector.type.as_pointer()), align=4)


def splat(builder: Any, value: Any) -> Any:
    empty = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(empty, value, ir.Constant(INT32, 0))
    return builder.shuffle_vector(first, empty, ir.Constant(INTS, None))


def constant(value: float) -> Any:
    return ir.Constant(FLOATS, [float(np.float32(value))] * LANES)


def multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return builder.fadd(builder.fmul(x, y, flags=("contract",)), z, flags=("contract",))


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
        result = multiply_add(builder, result, rest, constant(power))
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
    """16 vectors of 16: row i, lane j to row j, lane i, by exchanging ever larger squares beside the diagonal."""
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
def hide(builder: Any, scores: Any, count: Any, first: Any, lows: Any, ends: Any) -> None:
    """-inf to what a column does not see: it sees keys ``lows`` to ``ends`` - 1; the first row is key ``first``."""
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

        ``largest`` and ``total`` go on from block to block; ``rescale`` is what earlier sums are to be multiplied by.
        ``count`` is a multiple of 4. As ``pairs`` the weights are bfloat16, two rows in a row.
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
                x = multiply_add(builder, load(builder, scores, place), factor, low)
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
        store(builder, multiply_add(builder, load(builder, total, zero), change, added), total, zero)

    return softmax


softmax, softmax_pairs = _softmax(pairs=False), _softmax(pairs=True)


@operation(ADDRESS, ADDRESS, NUMBER, ADDRESS)
def rescale_add(builder: Any, sums: Any, added: Any, rows: Any, factors: Any) -> None:
    """``sums`` times the columns' ``factors``, plus ``added``; ``rows`` of 16."""
    factor = load(builder, factors, number(0))
    with steps(builder, rows, 1) as i:
        place = builder.mul(i, number(LANES))
        row = multiply_add(builder, load(builder, sums, place), factor, load(builder, added, place))
        store(builder, row, sums, place)


@operation(ADDRESS, ADDRESS, NUMBER)
def gate(builder: Any, gates: Any, values: Any, rows: Any) -> None:
    """silu of each gate times its value, in place of the gate; ``rows`` of 16."""
    one = constant(1.0)
    with steps(builder, rows, 1) as i:
        place = builder.mul(i, number(LANES))
        x = load(builder, gates, place)
        # Beyond e^-87 the result is 0 to float32 rounding anyway.
        power = builder.fmul(larger(builder, x, constant(-87.0)), constant(-np.log2(np.e)))
        sigmoid = builder.fdiv(one, builder.fadd(one, exp2(builder, power, exact=True)))
        product = builder.fmul(builder.fmul(x, sigmoid), load(builder, values, place))
        store(builder, product, gates, place)
