"""Triton kernels between a decoder layer's matrix multiplications: RMSNorm, rotary embedding, SiLU.

Each rounds at the points where transformers' own code does.
"""

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x, residual, out, weight, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """RMSNorm of rows of SIZE elements; with ADD, ``x += residual`` first, in place. Grid: (rows,)."""
    start = tl.program_id(0).to(tl.int64) * SIZE
    offs = tl.arange(0, BLOCK)
    mask = offs < SIZE
    values = tl.load(x + start + offs, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + start + offs, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(x.dtype.element_ty)
        tl.store(x + start + offs, rounded, mask=mask)
        values = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    normed = (values * factor).to(x.dtype.element_ty).to(tl.float32)
    scaled = normed * tl.load(weight + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + start + offs, scaled.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _apply_norm(values, factor, weight, offs, mask):
    weights = tl.load(weight + offs, mask=mask, other=0.0).to(tl.float32)
    return (values * factor).to(weight.dtype.element_ty).to(tl.float32) * weights


@triton.jit
def norm_rope(
    rows, cos, sin, query_weight, key_weight, eps, row_stride, cos_row_stride, cos_column_stride,
    QUERY_HEADS: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """RMSNorm per head (NORM), then rotary embedding, of query heads and the key heads behind them, in place.

    Element i of a head's first half rotates with element i of its second half, by the angles of ``cos`` and ``sin``
    ``[T, at least SIZE / 2]``. HEADS counts query and key heads. Grid: (T, HEADS / HEADS_PER_PROGRAM).
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)
    offs = tl.arange(0, HALF)
    in_half = offs < SIZE // 2
    mask = (head < HEADS)[:, None] & in_half[None, :]
    first = rows + row * row_stride + head[:, None] * SIZE + offs[None, :]
    second = first + SIZE // 2
    a = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(second, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / SIZE + eps)[:, None]
        is_query = (head < QUERY_HEADS)[:, None]
        offs_b = offs + SIZE // 2
        query_a = _apply_norm(a, factor, query_weight, offs, in_half)
        query_b = _apply_norm(b, factor, query_weight, offs_b, in_half)
        key_a = _apply_norm(a, factor, key_weight, offs, in_half)
        key_b = _apply_norm(b, factor, key_weight, offs_b, in_half)
        a = tl.where(is_query, query_a, key_a).to(rows.dtype.element_ty).to(tl.float32)
        b = tl.where(is_query, query_b, key_b).to(rows.dtype.element_ty).to(tl.float32)
    angle = row * cos_row_stride + offs * cos_column_stride
    c = tl.load(cos + angle, mask=in_half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle, mask=in_half, other=0.0).to(tl.float32)[None, :]
    tl.store(first, (a * c - b * s).to(rows.dtype.element_ty), mask=mask)
    tl.store(second, (b * c + a * s).to(rows.dtype.element_ty), mask=mask)


@triton.jit
def silu_and_mul(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """``silu(gate) * up`` for rows ``[gate, up]`` of 2 · SIZE elements. Grid: (rows, SIZE / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < SIZE
    source = gate_up + row * (2 * SIZE) + offs
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + SIZE, mask=mask, other=0.0).to(tl.float32)
    activated = (gate / (1 + tl.exp(-gate))).to(gate_up.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + offs, (activated * up).to(out.dtype.element_ty), mask=mask)
