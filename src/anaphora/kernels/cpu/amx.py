"""GEMMs of one block in registers: by AMX tiles, by AVX-512 BF16 vectors, or by float32 vectors.

A tile is 16 rows of 64 bytes: 32 bfloat16 or 16 float32 elements. ``tdpbf16ps`` adds A · B to C; B holds pairs of K::

    A  16 rows × 32 K          B  16 pairs of K × 16 columns           C  16 rows × 16 columns
    row 0    k0 k1 … k31       k0 k1    of column 0, 1, … 15           row 0    float32 of column 0 … 15
    row 1    k0 k1 … k31       k2 k3    of column 0, 1, … 15           row 1    …
       ⋮                          ⋮                                        ⋮
    row 15   k0 k1 … k31       k30 k31  of column 0, 1, … 15           row 15   …
"""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core import cgutils

from anaphora.kernels.cpu.simd import (
    ADDRESS,
    FLOAT,
    FLOATS,
    INT8,
    INT32,
    INTS,
    LANES,
    NUMBER,
    at,
    call,
    constant,
    fma,
    load,
    number,
    operation,
    splat,
    steps,
    store,
)

TILE_BYTES = 1024
"""Bytes of a tile."""

_ROWS = 8  # rows at once in gemm_f32_vectors: independent sums hide the latency of an FMA
_ARCH_REQ_XCOMP_PERM, _XFEATURE_TILEDATA, _SYS_ARCH_PRCTL = 0x1023, 18, 158


def _permitted() -> bool:
    """Requests AMX from Linux, which grants it per process; returns whether it did."""
    try:
        return int(ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_TILEDATA)) == 0
    except (AttributeError, OSError):
        return False


PROCESSOR_HAS_AMX = platform.machine() == "x86_64" and bool(get_host_cpu_features().get("amx-bf16"))
"""Whether kernels are compiled with AMX and AVX-512 BF16 instructions.

It does not depend on ``SWITCH``: compiled kernels are cached on disk, and both settings must find the same ones."""
PROCESSOR_HAS_AVX512_BF16 = platform.machine() == "x86_64" and bool(get_host_cpu_features().get("avx512bf16"))
"""Whether the processor multiplies pairs of bfloat16 in vectors: every one with AMX, and AMD's since Zen 4."""
SWITCH = "ANAPHORA_CPU_AMX"
"""Environment variable, read once at import: 0 runs everything on the kernels that any CPU has."""
AMX = PROCESSOR_HAS_AMX and os.environ.get(SWITCH, "1") != "0" and _permitted()
"""Whether AMX kernels are used."""
BF16_VECTORS = PROCESSOR_HAS_AVX512_BF16
"""Whether attention without AMX multiplies bfloat16 in vectors; otherwise it widens to float32."""


PAIRS = INTS
"""Operand type of AVX-512 BF16 instructions in LLVM: 16 words of two bfloat16."""


FIRST_B_TILE = 5
"""Registers from here on always have 16 rows; those before have as many as there are rows to gemm_64x16."""


def _tile_configs() -> Any:
    shapes = np.zeros((LANES + 1, 64), np.uint8)
    shapes[:, 0] = 1  # the palette of eight tiles
    shapes[:, 16:32].view(np.uint16)[:] = 64
    shapes[:, 48:56] = LANES
    shapes[:LANES, 48 : 48 + FIRST_B_TILE] = np.arange(LANES)[:, None]
    return shapes


TILE_CONFIGS = _tile_configs()
"""Tile configurations for 0 to 16 rows of A, 64 bytes each; B-operand tiles always have 16 rows."""


def _call(builder: Any, name: str, *args: Any) -> None:
    if PROCESSOR_HAS_AMX:
        call(builder, f"llvm.x86.{name}", ir.VoidType(), *args)


def _tile(register: int) -> Any:
    return ir.Constant(INT8, register)


def _zero(builder: Any, count: int) -> None:
    for n in range(count):
        _call(builder, "tilezero", _tile(n))


def _pointer(builder: Any, address: Any, offset: Any) -> Any:
    return at(builder, address, offset, INT8)


@operation(ADDRESS, ADDRESS)
def load_tile_config(builder: Any, shapes: Any, before: Any) -> None:
    """Configures the thread's tiles for 16 rows; saves the earlier configuration to 64 bytes at ``before``."""
    _call(builder, "sttilecfg", _pointer(builder, before, number(0)))
    _call(builder, "ldtilecfg", _pointer(builder, shapes, number(64 * LANES)))


@operation(ADDRESS, NUMBER)
def set_tile_rows(builder: Any, shapes: Any, rows: Any) -> None:
    """Configures the tiles for GEMMs of fewer rows, which take less time. Not for ``gemm_32x32`` and ``gemm_64x16``."""
    _call(builder, "ldtilecfg", _pointer(builder, shapes, builder.mul(rows, number(64))))


@operation(ADDRESS)
def restore_tile_config(builder: Any, before: Any) -> None:
    """Loads the configuration that was saved: other code in this thread (oneDNN) may rely on it."""
    _call(builder, "ldtilecfg", _pointer(builder, before, number(0)))


@operation(ADDRESS, NUMBER, NUMBER, NUMBER, ADDRESS, ADDRESS, NUMBER)
def gemm_64x16(builder: Any, a: Any, a_row: Any, a_tile: Any, a_step: Any, b: Any, c: Any, count: Any) -> None:
    """C ``[64, 16]`` float32 = A ``[64, 32 · count]`` times B ``[32 · count, 16]``.

    ``a_row``, ``a_tile`` and ``a_step`` are the bytes of A between rows, between tiles of 16 rows, and between tiles of
    32 columns. The tiles of B and those of C are contiguous.

    Loading a tile waits for the last instruction that read it, so tiles of A alternate between three registers.
    """
    row = number(64)

    _zero(builder, 4)
    with steps(builder, count, 1) as i:
        _call(builder, "tileloadd64", _tile(7), _pointer(builder, b, builder.mul(i, number(TILE_BYTES))), row)
        for n in range(4):
            place = builder.add(builder.mul(i, a_step), builder.mul(a_tile, number(n)))
            _call(builder, "tileloadd64", _tile(4 + n % 3), _pointer(builder, a, place), a_row)
            _call(builder, "tdpbf16ps", _tile(n), _tile(4 + n % 3), _tile(7))
    for n in range(4):
        _call(builder, "tilestored64", _tile(n), _pointer(builder, c, number(TILE_BYTES * n)), row)


def _gemm(groups: int, tiles: int, onto: bool = False) -> Any:
    rows, columns = ([4], [5, 6, 7]) if groups == 1 else ([4, 5], [6, 7])

    @operation(ADDRESS, NUMBER, ADDRESS, NUMBER, ADDRESS, NUMBER, NUMBER)
    def gemm_64x16(builder: Any, a: Any, a_row: Any, b: Any, b_tile: Any, c: Any, c_row: Any, count: Any) -> None:
        """C ``[16 · groups, 16 · tiles]`` float32 = A ``[16 · groups, 32 · count]`` times B ``[…, 16 · tiles]``.

        ``a_row`` and ``c_row`` are bytes between rows; ``b_tile`` are the bytes of B between groups of 16 columns; a
        group is ``count`` contiguous tiles. With ``onto`` the product is added to C.
        """

        def sums(instruction: str) -> None:
            for n in range(groups * tiles):
                place = builder.add(builder.mul(c_row, number(n // tiles * LANES)), number(64 * (n % tiles)))
                _call(builder, instruction, _tile(n), _pointer(builder, c, place), c_row)

        row = number(64)
        if onto:
            sums("tileloadd64")
        else:
            _zero(builder, groups * tiles)
        with steps(builder, count, 1) as i:
            for group, register in enumerate(rows):
                place = builder.add(builder.mul(i, row), builder.mul(a_row, number(LANES * group)))
                _call(builder, "tileloadd64", _tile(register), _pointer(builder, a, place), a_row)
            for n in range(tiles):
                register = columns[n % len(columns)]
                place = builder.add(builder.mul(i, number(TILE_BYTES)), builder.mul(b_tile, number(n)))
                _call(builder, "tileloadd64", _tile(register), _pointer(builder, b, place), row)
                for group, other in enumerate(rows):
                    _call(builder, "tdpbf16ps", _tile(group * tiles + n), _tile(other), _tile(register))
        sums("tilestored64")

    return gemm_64x16


gemm_16x64, gemm_16x32, gemm_32x32 = _gemm(1, 4), _gemm(1, 2), _gemm(2, 2)
"""C of 16 × 64, 16 × 32 and 32 × 32: up to four C tiles fit in the eight registers with A and B."""

gemm_16x64_add, gemm_16x32_add = _gemm(1, 4, onto=True), _gemm(1, 2, onto=True)


@operation(ADDRESS, NUMBER, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, NUMBER, NUMBER)
def gemm_16x64_scattered(
    builder: Any, a: Any, a_row: Any, b0: Any, b1: Any, b2: Any, b3: Any, c: Any, c_row: Any, count: Any
) -> None:
    """``gemm_16x64`` with a separate address for each 16 columns of B."""
    row = number(64)

    _zero(builder, 4)
    with steps(builder, count, 1) as i:
        _call(builder, "tileloadd64", _tile(4), _pointer(builder, a, builder.mul(i, row)), a_row)
        for n, b in enumerate((b0, b1, b2, b3)):
            place = builder.mul(i, number(TILE_BYTES))
            _call(builder, "tileloadd64", _tile(FIRST_B_TILE + n % 3), _pointer(builder, b, place), row)
            _call(builder, "tdpbf16ps", _tile(n), _tile(4), _tile(FIRST_B_TILE + n % 3))
    for n in range(4):
        _call(builder, "tilestored64", _tile(n), _pointer(builder, c, number(64 * n)), c_row)


@operation(ADDRESS, NUMBER, NUMBER, NUMBER, ADDRESS, ADDRESS, NUMBER)
def gemm_64x16_vectors(builder: Any, a: Any, a_row: Any, a_tile: Any, a_step: Any, b: Any, c: Any, count: Any) -> None:
    """``gemm_64x16`` by AVX-512 BF16: two elements of A at a time, times 16 columns of B."""
    if not PROCESSOR_HAS_AVX512_BF16:
        return
    with steps(builder, number(4), 1) as tile:
        sums = [cgutils.alloca_once_value(builder, constant(0.0)) for _ in range(LANES)]
        for chain in sums:
            builder.store(constant(0.0), chain)
        with steps(builder, count, 1) as i:
            offset = builder.add(builder.mul(i, a_step), builder.mul(tile, a_tile))
            rows = [builder.add(offset, builder.mul(a_row, number(n))) for n in range(LANES)]
            with steps(builder, number(LANES), 1) as pair:
                word = builder.add(builder.mul(i, number(LANES)), pair)
                columns = builder.bitcast(load(builder, b, builder.mul(word, number(LANES))), PAIRS)
                for row, chain in zip(rows, sums, strict=True):
                    pointer = at(builder, a, builder.add(row, builder.mul(pair, number(4))), INT8)
                    x = builder.load(builder.bitcast(pointer, INT32.as_pointer()), align=4)
                    x = builder.bitcast(splat(builder, x), PAIRS)
                    name = "llvm.x86.avx512bf16.dpbf16ps.512"
                    builder.store(call(builder, name, FLOATS, builder.load(chain), x, columns), chain)
        for n, chain in enumerate(sums):
            place = builder.mul(builder.add(builder.mul(tile, number(LANES)), number(n)), number(LANES))
            store(builder, builder.load(chain), c, place)


@operation(ADDRESS, NUMBER, NUMBER, ADDRESS, ADDRESS, NUMBER, NUMBER)
def gemm_f32_vectors(builder: Any, a: Any, a_row: Any, a_column: Any, b: Any, c: Any, rows: Any, count: Any) -> None:
    """C ``[rows, 16]`` = A ``[rows, count]`` times B ``[count, 16]``, float32.

    ``a_row`` and ``a_column`` are A's strides in elements; ``rows`` is a multiple of 8.
    """
    with steps(builder, rows, _ROWS) as first:
        places = [builder.mul(builder.add(first, number(n)), number(LANES)) for n in range(_ROWS)]
        sums = [cgutils.alloca_once_value(builder, constant(0.0)) for _ in range(_ROWS)]
        for chain in sums:
            builder.store(constant(0.0), chain)
        with steps(builder, count, 1) as i:
            column = load(builder, b, builder.mul(i, number(LANES)))
            for n, chain in enumerate(sums):
                row = builder.mul(builder.add(first, number(n)), a_row)
                place = builder.add(row, builder.mul(i, a_column))
                x = splat(builder, builder.load(at(builder, a, place, FLOAT), align=4))
                builder.store(fma(builder, x, column, builder.load(chain)), chain)
        for place, chain in zip(places, sums, strict=True):
            store(builder, builder.load(chain), c, place)
