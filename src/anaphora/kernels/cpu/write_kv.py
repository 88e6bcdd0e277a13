"""Writes new keys and values to the pool: a row for each token slot, or panels (``attention_amx.py`` draws them).

key, value  [heads, rows, size]  →  pool  slot of row 0   key of head 0 │ key of head 1 │ … │ value of head 0 │ …
"""

from __future__ import annotations

from numba import carray

from anaphora.kernels.cpu.attention_amx import put_key, put_value
from anaphora.kernels.cpu.launch import fields
from anaphora.kernels.cpu.simd import atomic_add, convert, int64, kernel

WRITE_ROWS = 32
"""New tokens that one work item writes to the pool."""

WRITE = fields(
    "num_rows",
    "token_slots",  # int64 [rows]
    "panels",  # whether the pool is in panels (attention_amx.py); ``kind`` is then the pool's
    "pool",
    "pool_kind",
    "width",
    "kind",  # of key and value
    "heads",
    "key",
    "key_size",
    "key_head",  # strides in elements
    "key_row",
    "value",
    "value_size",  # 0: there is none
    "value_head",
    "value_row",
)


@kernel(WRITE)
def write_rows(pointer):  # type: ignore[no-untyped-def]
    """Writes new keys and values to their token slots in the pool."""
    a = carray(pointer, 1)[0]
    while True:
        first = atomic_add(a.counters, 0, 1) * WRITE_ROWS
        if first >= a.num_rows:
            break
        for row in range(first, min(first + WRITE_ROWS, a.num_rows)):
            token_slot = int64(a.token_slots, row)
            for head in range(a.heads):
                at = head * a.key_head + row * a.key_row
                offset = head * a.key_size
                if a.panels:
                    put_key(a.key + 2 * at, a.key_size, a.pool, token_slot, a.width, offset)
                else:
                    convert(a.key, at, a.kind, a.pool, token_slot * a.width + offset, a.pool_kind, a.key_size)
            if a.value_size:
                for head in range(a.heads):
                    at = head * a.value_head + row * a.value_row
                    offset = a.heads * a.key_size + head * a.value_size
                    if a.panels:
                        put_value(a.value + 2 * at, a.value_size, a.pool, token_slot, a.width, offset)
                    else:
                        convert(a.value, at, a.kind, a.pool, token_slot * a.width + offset, a.pool_kind, a.value_size)
