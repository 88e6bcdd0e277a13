"""Calls of the compiled kernels: what a step's records hold, and what a layer's call adds to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from anaphora.attention import openmp
from anaphora.attention.base import KVLayout, LayerOptions
from anaphora.attention.parts import Plan
from anaphora.errors import ModelError

try:
    from anaphora.attention import native, tiles, vectors
except ImportError as error:
    raise ModelError(
        f"attention on a CPU needs numba, which cannot be imported ({error}); install anaphora[serve], or numba itself"
    ) from error

KINDS = {torch.bfloat16: vectors.BFLOAT16, torch.float32: vectors.FLOAT32}


class RowWriter:
    """Writes new keys and values to their slots in the pool."""

    def __init__(self, slots: Tensor) -> None:
        self._slots = slots
        self._counters = np.zeros(1, np.int64)
        self._record = np.zeros((), native.WRITE)
        self._workers = openmp.threads() if len(slots) > native.WRITE_ROWS else 1
        fields = self._record
        fields["counters"], fields["num_rows"], fields["slots"] = (
            self._counters.ctypes.data,
            len(slots),
            slots.data_ptr(),
        )

    def write(self, layout: KVLayout, pool: Tensor, key: Tensor, value: Tensor | None) -> None:
        """``key`` and ``value`` ``[Hkv, T, D]`` to ``pool`` ``[S, W]``."""
        key = _dense(key)
        value = None if value is None else _dense(value)
        fields: Any = self._record
        fields["pool"], fields["pool_kind"], fields["width"] = pool.data_ptr(), KINDS[pool.dtype], layout.width
        fields["kind"], fields["heads"] = KINDS[key.dtype], layout.heads
        fields["key"], fields["key_size"] = key.data_ptr(), layout.key_size
        fields["key_head"], fields["key_row"] = key.stride(0), key.stride(1)
        fields["value_size"] = 0
        if value is not None:
            fields["value"], fields["value_size"] = value.data_ptr(), layout.value_size
            fields["value_head"], fields["value_row"] = value.stride(0), value.stride(1)
        self._counters[0] = 0
        openmp.run(native.write_rows, self._record.ctypes.data, self._workers)


class RowAttention:
    """A step's rows over their keys, for layers of one shape."""

    def __init__(self, plan: Plan, layout: KVLayout, heads: int, block_size: int) -> None:
        self._plan = plan
        left = (plan.merges[:, 2] - plan.merges[:, 1]) * layout.heads if len(plan.merges) else []
        self._counters = np.concatenate(([0, 0], left)).astype(np.int64)
        self._workers = min(openmp.threads(), len(plan.tasks) * layout.heads)
        self._record = np.zeros((), native.ATTEND)
        columns = -(-plan.rows * (heads // layout.heads) // vectors.LANES) * vectors.LANES
        scratch = -(-native.areas(layout.key_size, layout.value_size, columns)[-1] // 64) * 64
        outs = 4 * len(plan.shares) * heads * layout.value_size
        self._buffer = torch.empty(
            self._workers * scratch + outs + 4 * len(plan.shares) * heads + 64, dtype=torch.uint8
        )
        address = -(-self._buffer.data_ptr() // 64) * 64
        fields: Any = self._record
        for name in ("tasks", "members", "lows", "ends", "tables", "merged", "merges", "shares"):
            fields[name] = getattr(plan, name).ctypes.data
        for name, value in (
            ("counters", self._counters.ctypes.data),
            ("num_tasks", len(plan.tasks)),
            ("block_size", block_size),
            ("heads", heads),
            ("kv_heads", layout.heads),
            ("key_size", layout.key_size),
            ("value_size", layout.value_size),
            ("value_offset", 0 if layout.latent else layout.heads * layout.key_size),
            ("width", layout.width),
            ("scratch", address),
            ("scratch_bytes", scratch),
            ("outs", address + self._workers * scratch),
            ("logs", address + self._workers * scratch + outs),
            ("columns", columns),
        ):
            fields[name] = value

    def attend(self, pool: Tensor, query: Tensor, options: LayerOptions, out: Tensor) -> None:
        """The plan's rows of ``query`` ``[H, T, D]`` to theirs of ``out`` ``[T, H, Dv]``, of the same dtype."""
        query = _dense(query)
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        fields: Any = self._record
        by_tiles = tiles.AMX and pool.dtype == query.dtype == torch.bfloat16
        fields["tiles"] = tiles.SHAPE.ctypes.data if by_tiles else 0
        fields["pool"], fields["pool_kind"] = pool.data_ptr(), KINDS[pool.dtype]
        fields["query"], fields["query_kind"] = query.data_ptr(), KINDS[query.dtype]
        fields["query_head"], fields["query_row"] = query.stride(0), query.stride(1)
        fields["out"], fields["sinks"] = out.data_ptr(), 0 if sinks is None else sinks.data_ptr()
        fields["scale"], fields["softcap"] = options.scale, options.softcap or 0.0
        self._counters[:2] = 0
        openmp.run(native.attend, self._record.ctypes.data, self._workers)


def _dense(x: Tensor) -> Tensor:
    """With the elements of a head side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
