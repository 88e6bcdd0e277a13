"""Triton kernels of paged attention: write keys and values, attend over block tables, merge partial results.

A row of the pool holds one token of one layer: its keys head by head, then its values (latents: keys only; the value is
the beginning of the key). In float8 a float32 scale per head follows for the keys, then for the values; ``scales`` is
the same memory as ``pool``, read as float32.

``gpu_plan.py`` plans on the host what the kernels work on. A work item is a tile of query rows over a range of key
positions of one block table::

    items      [·, 8]  table offset, first key, end of keys, lowest position, first item row, item rows, split, direct
    item_rows  [·, 2]  row of the flat batch, index of the row's first partial result
    merges     [·, 3]  row of the flat batch, index of its first partial result, number of partial results

An item row stands for the G query heads of one KV head, so a tile of BLOCK_M query rows holds BLOCK_M // G item rows.
The number of items is read on the device; a launch may have more programs. Log-sum-exps (lse) are to the base 2.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def write_kv(
    key, value, pool, slot_mapping, key_head_stride, key_row_stride, value_head_stride, value_row_stride,
    HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, LATENT: tl.constexpr, ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write row t of ``key`` and ``value`` ``[HEADS, T, size]`` to token slot ``slot_mapping[t]``. Grid: (T,)."""
    row = tl.program_id(0).to(tl.int64)
    target = pool + tl.load(slot_mapping + row) * ROW
    offs = tl.arange(0, BLOCK)
    mask = offs < HEADS * KEY
    source = key + (offs // KEY) * key_head_stride + row * key_row_stride + offs % KEY
    tl.store(target + offs, tl.load(source, mask=mask).to(pool.dtype.element_ty), mask=mask)
    if not LATENT:
        mask = offs < HEADS * VALUE
        source = value + (offs // VALUE) * value_head_stride + row * value_row_stride + offs % VALUE
        tl.store(target + HEADS * KEY + offs, tl.load(source, mask=mask).to(pool.dtype.element_ty), mask=mask)


@triton.jit
def _write_float8(
    source, head_stride, target, scales, HEADS: tl.constexpr, SIZE: tl.constexpr, H: tl.constexpr, N: tl.constexpr
):
    """Write HEADS vectors of SIZE elements, each scaled so that its largest absolute value is 448, float8's largest."""
    h = tl.arange(0, H)
    offs = tl.arange(0, N)[None, :]
    mask = (h < HEADS)[:, None] & (offs < SIZE)
    values = tl.load(source + h[:, None] * head_stride + offs, mask=mask, other=0.0).to(tl.float32)
    # div_rn: the plain division of a GPU is sometimes off by one in the last place.
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(values), 1), 1e-20), 448.0)
    tl.store(scales + h, scale, mask=h < HEADS)
    tl.store(
        target + h[:, None] * SIZE + offs, tl.div_rn(values, scale[:, None]).to(target.dtype.element_ty), mask=mask
    )


@triton.jit
def write_kv_float8(
    key, value, pool, scales, slot_mapping, key_head_stride, key_row_stride, value_head_stride, value_row_stride,
    HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, LATENT: tl.constexpr, ROW: tl.constexpr,
    H: tl.constexpr, KEY_N: tl.constexpr, VALUE_N: tl.constexpr,
):  # fmt: skip
    """``write_kv`` to a float8 pool: each vector gets its own scale, which never changes afterwards. Grid: (T,)."""
    ELEMENTS: tl.constexpr = HEADS * (KEY + (0 if LATENT else VALUE))
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(slot_mapping + row) * ROW
    scales += (start + ELEMENTS) // 4
    _write_float8(key + row * key_row_stride, key_head_stride, pool + start, scales, HEADS, KEY, H, KEY_N)
    if not LATENT:
        source = value + row * value_row_stride
        target = pool + start + HEADS * KEY
        _write_float8(source, value_head_stride, target, scales + HEADS, HEADS, VALUE, H, VALUE_N)


@triton.jit
def _load_in_two(base, mask, MASKED: tl.constexpr, SIZE: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Load vectors of SIZE elements at the pointers ``base`` ``[N]`` as two tiles: A elements, and the rest in B.

    A and B are powers of two, as Triton requires of a tile; B is 0 if A holds all.
    """
    first = base[:, None] + tl.arange(0, A)[None, :]
    a = tl.load(first, mask=mask[:, None], other=0.0) if MASKED else tl.load(first)
    if B == 0:
        b = a
    else:
        offs = tl.arange(0, B)[None, :]
        if A + B == SIZE and not MASKED:
            b = tl.load(base[:, None] + A + offs)
        else:
            b = tl.load(base[:, None] + A + offs, mask=mask[:, None] & (offs < SIZE - A), other=0.0)
    return a, b


@triton.jit
def _attend_keys(
    acc_a, acc_b, row_max, row_sum, query_a, query_b, pool, scales, table, first, end, position, head,
    scale, softcap, window,
    HEADS: tl.constexpr, KEY: tl.constexpr, KEY_A: tl.constexpr, KEY_B: tl.constexpr,
    VALUE: tl.constexpr, VALUE_A: tl.constexpr, VALUE_B: tl.constexpr, LATENT: tl.constexpr,
    ROW: tl.constexpr, FLOAT8: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax, over BLOCK_N keys from position ``first`` on.

    MASKED applies the causal mask, the window and ``end``; without it every row must see all of the keys.
    """
    n = first + tl.arange(0, BLOCK_N)
    mask = n < end
    block = tl.load(table + n // BLOCK_SIZE, mask=mask, other=0) if MASKED else tl.load(table + n // BLOCK_SIZE)
    token_slot = block.to(tl.int64) * BLOCK_SIZE + n % BLOCK_SIZE
    token = pool + token_slot * ROW
    key_a, key_b = _load_in_two(token + head * KEY, mask, MASKED, KEY, KEY_A, KEY_B)
    key_a = key_a.to(query_a.dtype)
    key_b = key_b.to(query_a.dtype)
    scores = tl.dot(query_a, tl.trans(key_a), input_precision=PRECISION)
    if KEY_B > 0:
        scores = tl.dot(query_b, tl.trans(key_b), scores, input_precision=PRECISION)
    if FLOAT8:
        ELEMENTS: tl.constexpr = HEADS * (KEY + (0 if LATENT else VALUE))
        token_scales = scales + (token_slot * ROW + ELEMENTS) // 4 + head
        key_scale = tl.load(token_scales, mask=mask, other=0.0) if MASKED else tl.load(token_scales)
        scores = scores * key_scale[None, :]
    if SOFTCAP:
        scores = softcap - 2 * softcap / (1 + tl.exp2(scores * (2 * LOG2E * scale / softcap)))
        factor = LOG2E
    else:
        factor = scale * LOG2E
    if MASKED:
        visible = mask[None, :] & (n[None, :] <= position[:, None])
        if WINDOW:
            visible = visible & (n[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen no key yet
    weights = tl.exp2(scores * factor - finite_max[:, None])  # one operation before the power, not two
    rescale = tl.exp2(row_max - finite_max)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    if LATENT:
        value_a, value_b = key_a, key_b
    else:
        value_a, value_b = _load_in_two(token + HEADS * KEY + head * VALUE, mask, MASKED, VALUE, VALUE_A, VALUE_B)
        value_a = value_a.to(query_a.dtype)
        value_b = value_b.to(query_a.dtype)
    if FLOAT8:
        if LATENT:
            weights = weights * key_scale[None, :]
        else:
            value_scales = token_scales + HEADS
            value_scale = tl.load(value_scales, mask=mask, other=0.0) if MASKED else tl.load(value_scales)
            weights = weights * value_scale[None, :]
    weights = weights.to(query_a.dtype)
    acc_a = tl.dot(weights, value_a, acc_a * rescale[:, None], input_precision=PRECISION)
    if VALUE_B > 0:
        acc_b = tl.dot(weights, value_b, acc_b * rescale[:, None], input_precision=PRECISION)
    return acc_a, acc_b, new_max, row_sum


@triton.jit
def paged_attention(
    query, pool, scales, out, partial_out, partial_lse, items, item_rows, num_items, positions, tables, sinks,
    scale, softcap, window, query_head_stride, query_row_stride,
    HEADS: tl.constexpr, G: tl.constexpr, KEY: tl.constexpr, KEY_A: tl.constexpr, KEY_B: tl.constexpr,
    VALUE: tl.constexpr, VALUE_A: tl.constexpr, VALUE_B: tl.constexpr, LATENT: tl.constexpr,
    ROW: tl.constexpr, FLOAT8: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend: one program per work item and KV head. Grid: (items · HEADS,).

    ``query`` is ``[H, T, KEY]``. A direct item writes its rows to ``out`` ``[T, H, VALUE]``; any other writes partial
    results to ``partial_out`` ``[P, H, VALUE]`` and ``partial_lse`` ``[P, H]``, both float32.
    """
    item = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    table = tables + tl.load(items + item * 8)
    begin = tl.load(items + item * 8 + 1)
    end = tl.load(items + item * 8 + 2)
    lowest = tl.load(items + item * 8 + 3)
    first_row = tl.load(items + item * 8 + 4)
    num_rows = tl.load(items + item * 8 + 5)
    split = tl.load(items + item * 8 + 6)
    direct = tl.load(items + item * 8 + 7)
    if item >= tl.load(num_items):
        return

    m = tl.arange(0, BLOCK_M)
    item_row = m // G
    valid = item_row < num_rows
    row = tl.load(item_rows + (first_row + item_row) * 2, mask=valid, other=0)
    partial = tl.load(item_rows + (first_row + item_row) * 2 + 1, mask=valid, other=0) + split
    position = tl.load(positions + row, mask=valid, other=0)
    query_heads = head * G + m % G
    source = query + query_heads * query_head_stride + row.to(tl.int64) * query_row_stride
    query_a, query_b = _load_in_two(source, valid, True, KEY, KEY_A, KEY_B)
    if not FLOAT8:
        query_a = query_a.to(pool.dtype.element_ty)
        query_b = query_b.to(pool.dtype.element_ty)

    acc_a = tl.zeros((BLOCK_M, VALUE_A), tl.float32)
    acc_b = tl.zeros((BLOCK_M, VALUE_B if VALUE_B > 0 else 1), tl.float32)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    unmasked_end = begin
    if WINDOW:
        begin = tl.maximum(begin, lowest + 1 - window)
        unmasked_end = begin
    else:
        # Up to here every row sees every key.
        unmasked_end = begin + tl.maximum(tl.minimum(end, lowest + 1) - begin, 0) // BLOCK_N * BLOCK_N
        for first in tl.range(begin, unmasked_end, BLOCK_N):
            acc_a, acc_b, row_max, row_sum = _attend_keys(
                acc_a, acc_b, row_max, row_sum, query_a, query_b, pool, scales, table, first, end, position, head,
                scale, softcap, window, HEADS, KEY, KEY_A, KEY_B, VALUE, VALUE_A, VALUE_B, LATENT,
                ROW, FLOAT8, BLOCK_SIZE, BLOCK_N, SOFTCAP, WINDOW, False, PRECISION,
            )  # fmt: skip
    for first in tl.range(unmasked_end, end, BLOCK_N):
        acc_a, acc_b, row_max, row_sum = _attend_keys(
            acc_a, acc_b, row_max, row_sum, query_a, query_b, pool, scales, table, first, end, position, head,
            scale, softcap, window, HEADS, KEY, KEY_A, KEY_B, VALUE, VALUE_A, VALUE_B, LATENT,
            ROW, FLOAT8, BLOCK_SIZE, BLOCK_N, SOFTCAP, WINDOW, True, PRECISION,
        )  # fmt: skip

    offs_a = tl.arange(0, VALUE_A)[None, :]
    nonzero_sum = tl.where(row_sum == 0, 1.0, row_sum)  # a row that sees none of the keys gets zeros, and -inf as lse
    if direct == 1:
        if SINKS:
            sink = tl.load(sinks + query_heads).to(tl.float32) * LOG2E
            new_max = tl.maximum(row_max, sink)
            rescale = tl.exp2(row_max - new_max)
            normaliser = rescale / (row_sum * rescale + tl.exp2(sink - new_max))
        else:
            normaliser = 1 / nonzero_sum
        out_row = out + (row.to(tl.int64) * (HEADS * G) + query_heads) * VALUE
        tl.store(out_row[:, None] + offs_a, (acc_a * normaliser[:, None]).to(out.dtype.element_ty), mask=valid[:, None])
        if VALUE_B > 0:
            offs_b = VALUE_A + tl.arange(0, VALUE_B)[None, :]
            rounded = (acc_b * normaliser[:, None]).to(out.dtype.element_ty)
            tl.store(out_row[:, None] + offs_b, rounded, mask=valid[:, None] & (offs_b < VALUE))
    else:
        line = partial.to(tl.int64) * (HEADS * G) + query_heads
        normaliser = 1 / nonzero_sum
        tl.store(partial_lse + line, row_max + tl.log2(nonzero_sum), mask=valid)
        partial_row = partial_out + line[:, None] * VALUE
        tl.store(partial_row + offs_a, acc_a * normaliser[:, None], mask=valid[:, None])
        if VALUE_B > 0:
            offs_b = VALUE_A + tl.arange(0, VALUE_B)[None, :]
            tl.store(partial_row + offs_b, acc_b * normaliser[:, None], mask=valid[:, None] & (offs_b < VALUE))


@triton.jit
def merge_partials(
    partial_out, partial_lse, out, merges, num_merges, sinks,
    H: tl.constexpr, HEADS: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of a row into ``out`` ``[T, H, VALUE]`` by their log-sum-exps.

    A sink enters the sum once, here. A program merges HEADS query heads of one row. Grid: (rows, H / HEADS).
    """
    merge = tl.program_id(0)
    if merge >= tl.load(num_merges):
        return
    row = tl.load(merges + merge * 3).to(tl.int64)
    first = tl.load(merges + merge * 3 + 1).to(tl.int64)
    num_partials = tl.load(merges + merge * 3 + 2)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    offs = tl.arange(0, BLOCK)[None, :]
    mask = (head < H)[:, None] & (offs < VALUE)
    acc = tl.zeros((HEADS, BLOCK), tl.float32)
    if SINKS:
        row_max = tl.load(sinks + head, mask=head < H, other=0.0).to(tl.float32) * LOG2E
        row_sum = tl.full((HEADS,), 1.0, tl.float32)
    else:
        row_max = tl.full((HEADS,), float("-inf"), tl.float32)
        row_sum = tl.full((HEADS,), 0.0, tl.float32)
    for index in tl.range(0, num_partials):
        line = (first + index) * H + head
        lse = tl.load(partial_lse + line, mask=head < H, other=0.0)
        values = tl.load(partial_out + line[:, None] * VALUE + offs, mask=mask, other=0.0)
        new_max = tl.maximum(row_max, lse)
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2(row_max - finite_max)
        weight = tl.exp2(lse - finite_max)
        acc = acc * rescale[:, None] + values * weight[:, None]
        row_sum = row_sum * rescale + weight
        row_max = new_max
    target = out + (row * H + head)[:, None] * VALUE + offs
    tl.store(target, (acc / row_sum[:, None]).to(out.dtype.element_ty), mask=mask)
