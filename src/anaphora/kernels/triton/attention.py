"""The Triton kernels of paged attention. What they work on, and in which order, is planned in ``worklist.py``.

A pool row is one token of one layer: its keys head by head, then its values (latents: keys only, whose beginning is
the value). In float8 a float32 scale follows for each head's key, then for each head's value: ``scales`` is the pool
again, read as float32. One item of work is a tile of query rows over a range of key positions of one block table::

    items    [·, 8]  table offset, first key, end of keys, lowest position, first member, members, part, direct
    members  [·, 2]  row of the flat batch, where the parts of the row begin
    merges   [·, 3]  row of the flat batch, where its parts begin, how many

A member stands for its G query heads of one KV head, so a tile of M query rows holds M // G members. How many items
there are is read on the device: a launch may be larger. Logarithms of sums are to the base 2.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def write_kv(
    key, value, pool, slots, key_head, key_row, value_head, value_row,
    HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, LATENT: tl.constexpr, ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Row t of ``key`` and ``value`` ``[HEADS, T, size]`` to token slot ``slots[t]`` of the pool. Grid: (T,)."""
    row = tl.program_id(0).to(tl.int64)
    target = pool + tl.load(slots + row) * ROW
    at = tl.arange(0, BLOCK)
    inside = at < HEADS * KEY
    source = key + (at // KEY) * key_head + row * key_row + at % KEY
    tl.store(target + at, tl.load(source, mask=inside).to(pool.dtype.element_ty), mask=inside)
    if not LATENT:
        inside = at < HEADS * VALUE
        source = value + (at // VALUE) * value_head + row * value_row + at % VALUE
        tl.store(target + HEADS * KEY + at, tl.load(source, mask=inside).to(pool.dtype.element_ty), mask=inside)


@triton.jit
def _write_scaled(
    source, head, target, scales, HEADS: tl.constexpr, SIZE: tl.constexpr, H: tl.constexpr, N: tl.constexpr
):
    """HEADS vectors of SIZE elements, each over its largest absolute value, which becomes 448, the largest float8."""
    h = tl.arange(0, H)
    at = tl.arange(0, N)[None, :]
    inside = (h < HEADS)[:, None] & (at < SIZE)
    values = tl.load(source + h[:, None] * head + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 1), 1e-20) / 448
    tl.store(scales + h, scale, mask=h < HEADS)
    tl.store(target + h[:, None] * SIZE + at, (values / scale[:, None]).to(target.dtype.element_ty), mask=inside)


@triton.jit
def write_kv_scaled(
    key, value, pool, scales, slots, key_head, key_row, value_head, value_row,
    HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, LATENT: tl.constexpr, ROW: tl.constexpr,
    H: tl.constexpr, KEY_N: tl.constexpr, VALUE_N: tl.constexpr,
):  # fmt: skip
    """As ``write_kv``, to a pool in float8: each vector with a scale of its own, which is never changed. Grid: (T,)."""
    WIDTH: tl.constexpr = HEADS * (KEY + (0 if LATENT else VALUE))
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(slots + row) * ROW
    scales += (at + WIDTH) // 4
    _write_scaled(key + row * key_row, key_head, pool + at, scales, HEADS, KEY, H, KEY_N)
    if not LATENT:
        source = value + row * value_row
        _write_scaled(source, value_head, pool + at + HEADS * KEY, scales + HEADS, HEADS, VALUE, H, VALUE_N)


@triton.jit
def _halves(base, inside, MASKED: tl.constexpr, SIZE: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Vectors of SIZE elements at the pointers ``base`` ``[N]``: the first A of each, and the rest padded to B."""
    first = base[:, None] + tl.arange(0, A)[None, :]
    a = tl.load(first, mask=inside[:, None], other=0.0) if MASKED else tl.load(first)
    if B == 0:
        b = a
    else:
        at = tl.arange(0, B)[None, :]
        if A + B == SIZE and not MASKED:
            b = tl.load(base[:, None] + A + at)
        else:
            b = tl.load(base[:, None] + A + at, mask=inside[:, None] & (at < SIZE - A), other=0.0)
    return a, b


@triton.jit
def _tile(
    state_a, state_b, best, total, query_a, query_b, pool, scales, table, at, end, position, head,
    scale, softcap, window,
    HEADS: tl.constexpr, KEY: tl.constexpr, KEY_A: tl.constexpr, KEY_B: tl.constexpr,
    VALUE: tl.constexpr, VALUE_A: tl.constexpr, VALUE_B: tl.constexpr, LATENT: tl.constexpr,
    ROW: tl.constexpr, SCALED: tl.constexpr, BLOCK_SIZE: tl.constexpr, N: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the N keys from position ``at`` on into the running softmax. Not MASKED: every row sees them all."""
    n = at + tl.arange(0, N)
    inside = n < end
    block = tl.load(table + n // BLOCK_SIZE, mask=inside, other=0) if MASKED else tl.load(table + n // BLOCK_SIZE)
    slot = block.to(tl.int64) * BLOCK_SIZE + n % BLOCK_SIZE
    token = pool + slot * ROW
    key_a, key_b = _halves(token + head * KEY, inside, MASKED, KEY, KEY_A, KEY_B)
    key_a = key_a.to(query_a.dtype)
    key_b = key_b.to(query_a.dtype)
    scores = tl.dot(query_a, tl.trans(key_a), input_precision=PRECISION)
    if KEY_B > 0:
        scores = tl.dot(query_b, tl.trans(key_b), scores, input_precision=PRECISION)
    if SCALED:
        WIDTH: tl.constexpr = HEADS * (KEY + (0 if LATENT else VALUE))
        token_scales = scales + (slot * ROW + WIDTH) // 4 + head
        key_scale = tl.load(token_scales, mask=inside, other=0.0) if MASKED else tl.load(token_scales)
        scores = scores * key_scale[None, :]
    if SOFTCAP:
        scores = softcap - 2 * softcap / (1 + tl.exp2(scores * (2 * LOG2E * scale / softcap)))
        factor = LOG2E
    else:
        factor = scale * LOG2E
    if MASKED:
        sees = inside[None, :] & (n[None, :] <= position[:, None])
        if WINDOW:
            sees = sees & (n[None, :] > position[:, None] - window)
        scores = tl.where(sees, scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1) * factor)
    level = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen no key yet
    weights = tl.exp2(scores * factor - level[:, None])  # one operation before the power, not two
    shrink = tl.exp2(best - level)
    total = total * shrink + tl.sum(weights, 1)
    if LATENT:
        value_a, value_b = key_a, key_b
    else:
        value_a, value_b = _halves(token + HEADS * KEY + head * VALUE, inside, MASKED, VALUE, VALUE_A, VALUE_B)
        value_a = value_a.to(query_a.dtype)
        value_b = value_b.to(query_a.dtype)
    if SCALED:
        if LATENT:
            weights = weights * key_scale[None, :]
        else:
            value_scales = token_scales + HEADS
            value_scale = tl.load(value_scales, mask=inside, other=0.0) if MASKED else tl.load(value_scales)
            weights = weights * value_scale[None, :]
    weights = weights.to(query_a.dtype)
    state_a = tl.dot(weights, value_a, state_a * shrink[:, None], input_precision=PRECISION)
    if VALUE_B > 0:
        state_b = tl.dot(weights, value_b, state_b * shrink[:, None], input_precision=PRECISION)
    return state_a, state_b, higher, total


@triton.jit
def attend_items(
    query, pool, scales, out, part_outs, part_logs, items, members, count, positions, tables, sinks,
    scale, softcap, window, query_head, query_row,
    HEADS: tl.constexpr, G: tl.constexpr, KEY: tl.constexpr, KEY_A: tl.constexpr, KEY_B: tl.constexpr,
    VALUE: tl.constexpr, VALUE_A: tl.constexpr, VALUE_B: tl.constexpr, LATENT: tl.constexpr,
    ROW: tl.constexpr, SCALED: tl.constexpr, BLOCK_SIZE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Each item for each KV head. Grid: (items · HEADS,).

    ``query`` ``[H, T, KEY]``; a direct item writes to ``out`` ``[T, H, VALUE]``, any other to its part of
    ``part_outs`` ``[P, H, VALUE]`` and ``part_logs`` ``[P, H]``, both float32.
    """
    item = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    table = tables + tl.load(items + item * 8)
    begin = tl.load(items + item * 8 + 1)
    end = tl.load(items + item * 8 + 2)
    lowest = tl.load(items + item * 8 + 3)
    first = tl.load(items + item * 8 + 4)
    length = tl.load(items + item * 8 + 5)
    part = tl.load(items + item * 8 + 6)
    direct = tl.load(items + item * 8 + 7)
    if item >= tl.load(count):
        return

    m = tl.arange(0, M)
    member = m // G
    valid = member < length
    row = tl.load(members + (first + member) * 2, mask=valid, other=0)
    place = tl.load(members + (first + member) * 2 + 1, mask=valid, other=0) + part
    position = tl.load(positions + row, mask=valid, other=0)
    query_heads = head * G + m % G
    source = query + query_heads * query_head + row.to(tl.int64) * query_row
    query_a, query_b = _halves(source, valid, True, KEY, KEY_A, KEY_B)
    if not SCALED:
        query_a = query_a.to(pool.dtype.element_ty)
        query_b = query_b.to(pool.dtype.element_ty)

    state_a = tl.zeros((M, VALUE_A), tl.float32)
    state_b = tl.zeros((M, VALUE_B if VALUE_B > 0 else 1), tl.float32)
    best = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    whole = begin
    if WINDOW:
        begin = tl.maximum(begin, lowest + 1 - window)
        whole = begin
    else:
        # Up to here every row sees every key.
        whole = begin + tl.maximum(tl.minimum(end, lowest + 1) - begin, 0) // N * N
        for at in tl.range(begin, whole, N):
            state_a, state_b, best, total = _tile(
                state_a, state_b, best, total, query_a, query_b, pool, scales, table, at, end, position, head,
                scale, softcap, window, HEADS, KEY, KEY_A, KEY_B, VALUE, VALUE_A, VALUE_B, LATENT,
                ROW, SCALED, BLOCK_SIZE, N, SOFTCAP, WINDOW, False, PRECISION,
            )  # fmt: skip
    for at in tl.range(whole, end, N):
        state_a, state_b, best, total = _tile(
            state_a, state_b, best, total, query_a, query_b, pool, scales, table, at, end, position, head,
            scale, softcap, window, HEADS, KEY, KEY_A, KEY_B, VALUE, VALUE_A, VALUE_B, LATENT,
            ROW, SCALED, BLOCK_SIZE, N, SOFTCAP, WINDOW, True, PRECISION,
        )  # fmt: skip

    a = tl.arange(0, VALUE_A)[None, :]
    seen = tl.where(total == 0, 1.0, total)  # a row that sees none of these keys gets zeros, and -inf as its log
    if direct == 1:
        if SINKS:
            sink = tl.load(sinks + query_heads).to(tl.float32) * LOG2E
            level = tl.maximum(best, sink)
            shrink = tl.exp2(best - level)
            share = shrink / (total * shrink + tl.exp2(sink - level))
        else:
            share = 1 / seen
        target = out + (row.to(tl.int64) * (HEADS * G) + query_heads) * VALUE
        tl.store(target[:, None] + a, (state_a * share[:, None]).to(out.dtype.element_ty), mask=valid[:, None])
        if VALUE_B > 0:
            b = VALUE_A + tl.arange(0, VALUE_B)[None, :]
            scaled = (state_b * share[:, None]).to(out.dtype.element_ty)
            tl.store(target[:, None] + b, scaled, mask=valid[:, None] & (b < VALUE))
    else:
        line = place.to(tl.int64) * (HEADS * G) + query_heads
        share = 1 / seen
        tl.store(part_logs + line, best + tl.log2(seen), mask=valid)
        tl.store(part_outs + line[:, None] * VALUE + a, state_a * share[:, None], mask=valid[:, None])
        if VALUE_B > 0:
            b = VALUE_A + tl.arange(0, VALUE_B)[None, :]
            tl.store(part_outs + line[:, None] * VALUE + b, state_b * share[:, None], mask=valid[:, None] & (b < VALUE))


@triton.jit
def merge_parts(
    part_outs, part_logs, out, merges, count, sinks,
    H: tl.constexpr, HEADS: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """A row of ``out`` ``[T, H, VALUE]`` from all its parts; a sink enters as one more. Grid: (rows, H / HEADS)."""
    item = tl.program_id(0)
    if item >= tl.load(count):
        return
    row = tl.load(merges + item * 3).to(tl.int64)
    first = tl.load(merges + item * 3 + 1).to(tl.int64)
    length = tl.load(merges + item * 3 + 2)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = tl.arange(0, BLOCK)[None, :]
    inside = (head < H)[:, None] & (at < VALUE)
    state = tl.zeros((HEADS, BLOCK), tl.float32)
    if SINKS:
        best = tl.load(sinks + head, mask=head < H, other=0.0).to(tl.float32) * LOG2E
        total = tl.full((HEADS,), 1.0, tl.float32)
    else:
        best = tl.full((HEADS,), float("-inf"), tl.float32)
        total = tl.full((HEADS,), 0.0, tl.float32)
    for part in tl.range(0, length):
        line = (first + part) * H + head
        log = tl.load(part_logs + line, mask=head < H, other=0.0)
        values = tl.load(part_outs + line[:, None] * VALUE + at, mask=inside, other=0.0)
        higher = tl.maximum(best, log)
        level = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(best - level)
        weight = tl.exp2(log - level)
        state = state * shrink[:, None] + values * weight[:, None]
        total = total * shrink + weight
        best = higher
    target = out + (row * H + head)[:, None] * VALUE + at
    tl.store(target, (state / total[:, None]).to(out.dtype.element_ty), mask=inside)
