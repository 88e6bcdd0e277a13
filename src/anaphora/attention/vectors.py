"""What the compiled kernels of the CPU are made of: memory by address, bfloat16, vectors, atomic counters.

Vectors are written out rather than left to the compiler, which would make them half as wide and check before every
loop whether its memory overlaps.
"""

from __future__ import annotations

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
"""Numbers of a vector; heads are padded with zeros to a multiple of it."""

OPTIONS: dict[str, Any] = {
    # Without the flags that promise the absence of infinities and of not-a-number: both occur.
    "fastmath": {"reassoc", "contract", "arcp", "nsz", "afn"},
    "error_model": "numpy",
}
inline = njit(**OPTIONS)


def padded(size: int) -> int:
    """To whole vectors."""
    return -(-size // LANES) * LANES


padded_size = inline(padded)

# --- Memory by address ------------------------------------------------------------------------------------------------

_INT16, _INT32, _INT64, _FLOAT = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)


def _at(builder: Any, address: Any, index: Any, element: Any) -> Any:
    return builder.gep(builder.inttoptr(address, element.as_pointer()), [index])


def _loader(element: Any, size: int, result: Any, convert: Callable[[Any, Any], Any]) -> Any:
    """An intrinsic ``(address, index)``: the element there, made to a ``result``."""

    def load(typing, address, index):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            return convert(builder, builder.load(_at(builder, *args, element), align=size))

        return result(types.int64, types.int64), generate

    return intrinsic(load)


def _storer(element: Any, size: int, given: Any) -> Any:
    """An intrinsic ``(address, index, value)``."""

    def store(typing, address, index, value):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            builder.store(args[2], _at(builder, args[0], args[1], element), align=size)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, given), generate

    return intrinsic(store)


def _widen(builder: Any, bits: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(bits, _INT32), ir.Constant(_INT32, 16)), _FLOAT)


int32 = _loader(_INT32, 4, types.int64, lambda builder, x: builder.sext(x, _INT64))
int64 = _loader(_INT64, 8, types.int64, lambda builder, x: x)
float32 = _loader(_FLOAT, 4, types.float32, lambda builder, x: x)
bfloat16 = _loader(_INT16, 2, types.float32, _widen)
uint16 = _loader(_INT16, 2, types.uint16, lambda builder, x: x)
put_int64 = _storer(_INT64, 8, types.int64)
put_float32 = _storer(_FLOAT, 4, types.float32)
put_uint16 = _storer(_INT16, 2, types.uint16)


@contextmanager
def _steps(builder: Any, end: Any, step: int) -> Iterator[Any]:
    """A loop from 0 to ``end``; gives the index."""
    start = ir.Constant(_INT64, 0)
    with cgutils.for_range_slice(builder, start, end, ir.Constant(_INT64, step)) as (index, _):
        yield index


def _vector(builder: Any, address: Any, index: Any) -> Any:
    return builder.load(builder.bitcast(_at(builder, address, index, _FLOAT), _VECTOR.as_pointer()), align=4)


def _multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return builder.fadd(builder.fmul(x, y, flags=("contract",)), z, flags=("contract",))


def _splat(builder: Any, number: Any) -> Any:
    empty = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(empty, number, ir.Constant(_INT32, 0))
    return builder.shuffle_vector(first, empty, ir.Constant(ir.VectorType(_INT32, LANES), None))


def _sum(builder: Any, vector: Any) -> Any:
    """Of all lanes, by halves."""
    width = LANES
    while width > 1:
        width //= 2
        indices = [ir.Constant(ir.VectorType(_INT32, width), list(range(at, at + width))) for at in (0, width)]
        lower, upper = (builder.shuffle_vector(vector, vector, x) for x in indices)
        vector = builder.fadd(lower, upper)
    return builder.extract_element(vector, ir.Constant(_INT32, 0))


@intrinsic
def _bits(typing, number):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], _INT32)

    return types.uint32(types.float32), generate


@intrinsic
def _from_bits(typing, bits):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], _FLOAT)

    return types.float32(types.int32), generate


@intrinsic
def atomic_add(typing, address, index, amount):  # type: ignore[no-untyped-def]
    """Add to an int64 that all threads see; what it was before."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.atomic_rmw("add", _at(builder, args[0], args[1], _INT64), args[2], "seq_cst")

    return types.int64(types.int64, types.int64, types.int64), generate


@intrinsic
def prefetch(typing, address):  # type: ignore[no-untyped-def]
    """Ask for a cache line that will be read soon."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", (pointer.type,), ir.FunctionType(ir.VoidType(), [pointer.type, _INT32, _INT32, _INT32])
        )
        builder.call(function, [pointer, *(ir.Constant(_INT32, x) for x in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@inline
def _put_bfloat16(address, index, value):  # type: ignore[no-untyped-def]
    bits = _bits(value)
    rounded = np.uint32(
        np.uint32(bits + np.uint32(0x7FFF)) + np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    )
    upper = np.uint32(rounded >> np.uint32(16)) if value == value else np.uint32(0x7FC0)
    put_uint16(address, index, np.uint16(upper))


@inline
def to_float32(source, offset, kind, target, begin, count):  # type: ignore[no-untyped-def]
    if kind == BFLOAT16:
        for i in range(count):
            put_float32(target, begin + i, bfloat16(source, offset + i))
    else:
        for i in range(count):
            put_float32(target, begin + i, float32(source, offset + i))


@inline
def from_float32(source, begin, target, offset, kind, count):  # type: ignore[no-untyped-def]
    if kind == BFLOAT16:
        for i in range(count):
            _put_bfloat16(target, offset + i, float32(source, begin + i))
    else:
        for i in range(count):
            put_float32(target, offset + i, float32(source, begin + i))


@inline
def exp(x):  # type: ignore[no-untyped-def]
    """e to the power of x <= 0, to float32 rounding; below e^-87 it stays there. Vectorised, unlike math.exp."""
    x = np.float32(-87.0) if x < np.float32(-87.0) else x
    n = np.int32(x * np.float32(1.44269504) - np.float32(0.5))
    r = x - np.float32(n) * np.float32(0.693359375) + np.float32(n) * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * _from_bits(np.int32(np.int32(n + np.int32(127)) << np.int32(23)))


# --- Sums ---


@intrinsic
def dots(typing, query, keys, size, scores):  # type: ignore[no-untyped-def]
    """Scores of one query with four keys side by side; ``size`` is a multiple of LANES."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        query, keys, size, scores = args
        sums = [cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, None)) for _ in range(4)]
        with _steps(builder, size, LANES) as i:
            q = _vector(builder, query, i)
            for n, total in enumerate(sums):
                k = _vector(builder, keys, builder.add(i, builder.mul(size, ir.Constant(_INT64, n))))
                builder.store(_multiply_add(builder, q, k, builder.load(total)), total)
        for n, total in enumerate(sums):
            builder.store(
                _sum(builder, builder.load(total)), _at(builder, scores, ir.Constant(_INT64, n), _FLOAT), align=4
            )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def accumulate(typing, weights, values, size, count, total):  # type: ignore[no-untyped-def]
    """Add ``count`` weighted values, a multiple of 4, to ``total``; ``size`` is a multiple of LANES."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        weights, values, size, count, total = args
        with _steps(builder, size, LANES) as i:
            chains = [cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, None)) for _ in range(4)]
            for chain in chains[1:]:
                builder.store(ir.Constant(_VECTOR, None), chain)
            builder.store(_vector(builder, total, i), chains[0])
            with _steps(builder, count, 4) as j:
                for n, chain in enumerate(chains):
                    key = builder.add(j, ir.Constant(_INT64, n))
                    weight = builder.load(_at(builder, weights, key, _FLOAT), align=4)
                    value = _vector(builder, values, builder.add(i, builder.mul(size, key)))
                    builder.store(_multiply_add(builder, _splat(builder, weight), value, builder.load(chain)), chain)
            a, b, c, d = (builder.load(chain) for chain in chains)
            summed = builder.fadd(builder.fadd(a, b), builder.fadd(c, d))
            builder.store(summed, builder.bitcast(_at(builder, total, i, _FLOAT), _VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64, types.int64), generate


@inline
def put_zeros(target, begin, end):  # type: ignore[no-untyped-def]
    for i in range(begin, end):
        put_float32(target, i, np.float32(0.0))


@inline
def scale(target, count, factor):  # type: ignore[no-untyped-def]
    for i in range(count):
        put_float32(target, i, float32(target, i) * factor)


@inline
def add_scaled(source, offset, kind, weight, total, count):  # type: ignore[no-untyped-def]
    if kind == BFLOAT16:
        for i in range(count):
            put_float32(total, i, float32(total, i) + weight * bfloat16(source, offset + i))
    else:
        for i in range(count):
            put_float32(total, i, float32(total, i) + weight * float32(source, offset + i))
