"""Building blocks of the CPU kernels: memory access by address, bfloat16, vectors of 16 lanes, atomic counters.

Vectors are explicit: the compiler would use half the width and check for overlapping memory before each loop.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, from_dtype, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

logger = logging.getLogger(__name__)

BFLOAT16, FLOAT32 = 0, 1
"""Codes of dtypes in kernel records."""

LANES = 16
"""Elements of a vector."""

OPTIONS: dict[str, Any] = {
    # Without the flags "no infinities" and "no NaNs": both occur.
    "fastmath": {"reassoc", "contract", "arcp", "nsz", "afn"},
    "error_model": "numpy",
}
inline = njit(**OPTIONS)


def kernel(record: np.dtype[Any]) -> Callable[[Callable[..., None]], Any]:
    """Compiles a function of the address of one ``record`` to a C function, for ``launch.Call``.

    numba caches the result next to the function's file, or in the user's cache folder, and checks only that file's
    modification time. A kernel consists of several files, so its name in the cache contains a hash of all of them.
    """

    def make(function: Callable[..., None]) -> Any:
        name, begun = function.__qualname__, time.monotonic()
        function.__qualname__ += f"_{_sources()}"
        compiled = cfunc(types.void(types.CPointer(from_dtype(record))), cache=True, **OPTIONS)(function)
        if not compiled.cache_hits:
            logger.info("compiled %s in %.1f s; the next start finds it", name, time.monotonic() - begun)
        return compiled

    return make


@functools.cache
def _sources() -> str:
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


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
FLOATS, INTS, SHORTS = (ir.VectorType(element, LANES) for element in (FLOAT, INT32, INT16))
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
    """Prefetches the cache line at a pointer."""
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
    """Adds to an int64 that threads share; returns the earlier value."""
    return builder.atomic_rmw("add", at(builder, address, index, INT64), amount, "seq_cst")


@operation(ADDRESS, NUMBER, result=types.int64)
def atomic_load(builder: Any, address: Any, index: Any) -> Any:
    """Reads an int64 that other threads change (acquire: their earlier writes are visible afterwards)."""
    return builder.load_atomic(at(builder, address, index, INT64), "acquire", 8)


@operation(ADDRESS, result=types.voidptr)
def memory(builder: Any, address: Any) -> Any:
    """An address as a pointer, for ``carray``."""
    return builder.inttoptr(address, INT8.as_pointer())


@operation()
def pause(builder: Any) -> None:
    """A hint to the CPU inside a spin loop."""
    if platform.machine() == "x86_64":
        call(builder, "llvm.x86.sse2.pause", ir.VoidType())


@operation()
def yield_thread(builder: Any) -> None:
    """Yields the CPU, perhaps to the thread that this one waits for."""
    if platform.system() != "Windows":
        call(builder, "sched_yield", INT32)


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


def widened(builder: Any, bits: Any) -> Any:
    """16 bfloat16 numbers, as integers, to floats."""
    return builder.bitcast(builder.shl(builder.zext(bits, INTS), ir.Constant(INTS, [16] * LANES)), FLOATS)


def rounded(builder: Any, bits: Any) -> Any:
    """16 floats, as integers, to the nearest bfloat16 numbers, as integers."""
    sixteen = ir.Constant(INTS, [16] * LANES)
    last = builder.and_(builder.lshr(bits, sixteen), ir.Constant(INTS, [1] * LANES))
    nearest = builder.add(builder.add(bits, ir.Constant(INTS, [0x7FFF] * LANES)), last)
    floats = builder.bitcast(bits, FLOATS)
    nothing = builder.fcmp_unordered("uno", floats, floats)
    upper = builder.select(nothing, ir.Constant(INTS, [0x7FC0] * LANES), builder.lshr(nearest, sixteen))
    return builder.trunc(upper, SHORTS)


def _mover(given: int, wanted: int) -> Any:
    """``(source, step, target, target_step, rows, count)``: numbers of one kind to the other, or the same.

    Steps between rows in bytes; ``count`` of a row is a multiple of 16.
    """
    source_type, target_type = (SHORTS if x == BFLOAT16 else INTS for x in (given, wanted))

    def converted(builder: Any, bits: Any) -> Any:
        if given == wanted:
            return bits
        return builder.bitcast(widened(builder, bits), INTS) if given == BFLOAT16 else rounded(builder, bits)

    @operation(ADDRESS, NUMBER, ADDRESS, NUMBER, NUMBER, NUMBER)
    def move(builder: Any, source: Any, step: Any, target: Any, target_step: Any, rows: Any, count: Any) -> None:
        with steps(builder, rows, 1) as row:
            start = at(builder, source, builder.mul(row, step), INT8)
            end = at(builder, target, builder.mul(row, target_step), INT8)
            start = builder.bitcast(start, source_type.element.as_pointer())
            end = builder.bitcast(end, target_type.element.as_pointer())
            with steps(builder, count, LANES) as i:
                pointer = builder.bitcast(builder.gep(start, [i]), source_type.as_pointer())
                value = converted(builder, builder.load(pointer, align=2))
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
    """Prefetches rows; ``step`` between rows and ``size`` of a row in bytes."""
    with steps(builder, rows, 1) as row:
        start = at(builder, address, builder.mul(row, step), INT8)
        with steps(builder, size, 64) as line:
            prefetch_line(builder, builder.gep(start, [line]))


@operation(ADDRESS, NUMBER, ADDRESS, NUMBER, NUMBER, NUMBER)
def copy_lines(builder: Any, source: Any, step: Any, target: Any, target_step: Any, rows: Any, size: Any) -> None:
    """Rows of ``size`` bytes, a multiple of 64; steps between rows in bytes."""
    with steps(builder, rows, 1) as row:
        start = builder.add(source, builder.mul(step, row))
        end = builder.add(target, builder.mul(target_step, row))
        with steps(builder, builder.lshr(size, number(2)), LANES) as i:
            store(builder, load(builder, start, i), end, i)


def load(builder: Any, address: Any, index: Any) -> Any:
    """16 float32 from element ``index`` on."""
    return builder.load(builder.bitcast(at(builder, address, index, FLOAT), FLOATS.as_pointer()), align=4)


def store(builder: Any, vector: Any, address: Any, index: Any) -> None:
    builder.store(vector, builder.bitcast(at(builder, address, index, FLOAT), vector.type.as_pointer()), align=4)


def load_bf16(builder: Any, address: Any, index: Any) -> Any:
    """16 bfloat16 numbers from element ``index`` on, as floats."""
    pointer = builder.bitcast(at(builder, address, index, INT16), SHORTS.as_pointer())
    return widened(builder, builder.load(pointer, align=2))


def store_bf16(builder: Any, vector: Any, address: Any, index: Any) -> None:
    """16 floats as bfloat16 numbers."""
    pointer = builder.bitcast(at(builder, address, index, INT16), SHORTS.as_pointer())
    builder.store(rounded(builder, builder.bitcast(vector, INTS)), pointer, align=2)


def reduce_add(builder: Any, vector: Any) -> Any:
    """The sum of a vector's lanes."""
    name = "llvm.vector.reduce.fadd.v16f32"
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(FLOAT, [FLOAT, FLOATS]), name)
    return builder.call(function, [ir.Constant(FLOAT, 0.0), vector], fastmath=("reassoc",))


def splat(builder: Any, value: Any) -> Any:
    empty = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(empty, value, ir.Constant(INT32, 0))
    return builder.shuffle_vector(first, empty, ir.Constant(INTS, None))


def constant(value: float) -> Any:
    return ir.Constant(FLOATS, [float(np.float32(value))] * LANES)


def fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return builder.fadd(builder.fmul(x, y, flags=("contract",)), z, flags=("contract",))
