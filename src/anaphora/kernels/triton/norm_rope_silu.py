"""The Triton kernels between a decoder layer's matrix products. Each rounds where transformers' own code does."""

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x, residual, out, weight, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Rows of SIZE elements. With ADDS, ``x += residual`` first, in place. Grid: (rows,)."""
    start = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    values = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        values += tl.load(residual + start + at, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(x.dtype.element_ty)
        tl.store(x + start + at, rounded, mask=inside)
        values = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    normed = (values * factor).to(x.dtype.element_ty).to(tl.float32)
    scaled = normed * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + start + at, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _scaled(part, factor, weight, at, inside):
    weights = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    return (part * factor).to(weight.dtype.element_ty).to(tl.float32) * weights


@triton.jit
def norm_and_turn(
    rows, cos, sin, query_weight, key_weight, eps, row_stride, turn_row, turn_column,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Heads of SIZE elements, first the queries, then the keys: RMS norm (NORM), then rotary embedding, in place.

    The two halves of a head turn together, by the angles of ``cos`` and ``sin`` ``[T, at least SIZE / 2]``.
    Grid: (T, heads / GROUP).
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    at = tl.arange(0, HALF)
    inside = at < SIZE // 2
    both = (head < HEADS)[:, None] & inside[None, :]
    first = rows + row * row_stride + head[:, None] * SIZE + at[None, :]
    second = first + SIZE // 2
    a = tl.load(first, mask=both, other=0.0).to(tl.float32)
    b = tl.load(second, mask=both, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / SIZE + eps)[:, None]
        is_query = (head < QUERIES)[:, None]
        end = at + SIZE // 2
        query_a, query_b = (_scaled(a, factor, query_weight, at, inside), _scaled(b, factor, query_weight, end, inside))
        key_a, key_b = (_scaled(a, factor, key_weight, at, inside), _scaled(b, factor, key_weight, end, inside))
        a = tl.where(is_query, query_a, key_a).to(rows.dtype.element_ty).to(tl.float32)
        b = tl.where(is_query, query_b, key_b).to(rows.dtype.element_ty).to(tl.float32)
    turn = row * turn_row + at * turn_column
    c = tl.load(cos + turn, mask=inside, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + turn, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(first, (a * c - b * s).to(rows.dtype.element_ty), mask=both)
    tl.store(second, (b * c + a * s).to(rows.dtype.element_ty), mask=both)


@triton.jit
def silu_times(both, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """``silu(gate) * up`` for rows ``[gate, up]`` of 2 · SIZE elements. Grid: (rows, SIZE / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    source = both + row * (2 * SIZE) + at
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + SIZE, mask=inside, other=0.0).to(tl.float32)
    active = (gate / (1 + tl.exp(-gate))).to(both.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + at, (active * up).to(out.dtype.element_ty), mask=inside)
