"""Calls of the compiled kernels: what a step's records hold, and what a layer's call adds to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from anaphora.attention.base import KVLayout, LayerOptions
from anaphora.attention.cpu_plan import Plan
from anaphora.errors import ModelError
from anaphora.kernels.cpu import launch

try:
    from anaphora.kernels.cpu import amx, attention_amx, attention_generic, simd
except ImportError as error:
    raise ModelError(
        f"attention on a CPU needs numba, which cannot be imported ({error}); "
        "run pip install '.[serve]' in Anaphora's folder"
    ) from error

KINDS = {torch.bfloat16: simd.BFLOAT16, torch.float32: simd.FLOAT32}


_LAYER = attention_generic.ATTEND.names[attention_generic.ATTEND.names.index("tiles") :]
"""What each layer brings to a step's record."""


class RowWriter:
    """Writes new keys and values to their slots in the pool."""

    def __init__(self, slots: Tensor) -> None:
        self._slots = slots
        self._workers = launch.threads() if len(slots) > attention_generic.WRITE_ROWS else 1
        self._call = launch.Call(
            attention_generic.write_rows, attention_generic.WRITE, attention_generic.WRITE.names[3:], {}
        )

    def write(self, layout: KVLayout, pool: Tensor, key: Tensor, value: Tensor | None, by_panels: bool) -> None:
        """``key`` and ``value`` ``[Hkv, T, D]`` to ``pool`` ``[S, W]``."""
        if by_panels:
            assert value is not None
            key, value = key.to(pool.dtype), value.to(pool.dtype)
        key = _dense(key)
        value = None if value is None else _dense(value)
        where = (self._slots.shape[0], self._slots.data_ptr(), int(by_panels), pool.data_ptr())
        where += (KINDS[pool.dtype], layout.width)
        keys = (key.data_ptr(), layout.key_size, key.stride(0), key.stride(1))
        values = (0, 0, 0, 0)
        if value is not None:
            values = (value.data_ptr(), layout.value_size, value.stride(0), value.stride(1))
        self._call(self._workers, *where, KINDS[key.dtype], layout.heads, *keys, *values)


class RowAttention:
    """A step's rows over their keys, for layers of one shape."""

    def __init__(self, plan: Plan, layout: KVLayout, heads: int, block_size: int) -> None:
        self._plan = plan
        counts = plan.merges[:, 2] - plan.merges[:, 1] if len(plan.merges) else np.zeros(0)
        self._left = (counts * layout.heads).astype(np.int64)
        threads = launch.threads()
        self._workers = min(threads, len(plan.tasks) * layout.heads)
        columns = -(-plan.rows * (heads // layout.heads) // simd.LANES) * simd.LANES
        areas = max(
            find(layout.key_size, layout.value_size, columns)[-1]
            for find in (attention_generic.areas, attention_amx.tiled_areas)
        )
        scratch = -(-areas // 64) * 64
        shares = len(plan.shares) * heads
        needed = threads * scratch + 4 * shares * (layout.value_size + 1)
        self._buffer = torch.empty(needed + 64, dtype=torch.uint8)
        address = -(-self._buffer.data_ptr() // 64) * 64
        outs = address + threads * scratch
        names = ("tasks", "members", "lows", "ends", "tables", "merged", "merges", "shares")
        given = {name: getattr(plan, name).ctypes.data for name in names}
        given |= {
            "left": self._left.ctypes.data,
            "num_tasks": len(plan.tasks),
            "block_size": block_size,
            "heads": heads,
            "kv_heads": layout.heads,
            "key_size": layout.key_size,
            "value_size": layout.value_size,
            "value_offset": 0 if layout.latent else layout.heads * layout.key_size,
            "width": layout.width,
            "scratch": address,
            "scratch_bytes": scratch,
            "outs": outs,
            "logs": outs + 4 * shares * layout.value_size,
            "columns": columns,
        }
        self._call = launch.Call(attention_generic.attend, attention_generic.ATTEND, _LAYER, given)

    @property
    def record(self) -> np.ndarray[Any, Any]:
        """What the kernel is told of the step, without what each layer brings."""
        return self._call.record

    def attend(self, pool: Tensor, query: Tensor, options: LayerOptions, out: Tensor, as_tiles: bool) -> None:
        """The plan's rows of ``query`` ``[H, T, D]`` to theirs of ``out`` ``[T, H, Dv]``, of the same dtype."""
        query = _dense(query)
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        by_tiles = as_tiles or (amx.AMX and pool.dtype == query.dtype == torch.bfloat16)
        self._call(
            self._workers,
            amx.SHAPES.ctypes.data if by_tiles else 0,
            int(as_tiles),
            pool.data_ptr(),
            KINDS[pool.dtype],
            query.data_ptr(),
            query.stride(0),
            query.stride(1),
            KINDS[query.dtype],
            out.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            options.scale,
            options.softcap or 0.0,
        )


def _dense(x: Tensor) -> Tensor:
    """With the elements of a head side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def large(size: int) -> Tensor:
    """Memory of ``size`` bytes from the start of a cache line, not filled.

    numpy asks for large pages where the system has them, torch does not.
    """
    memory = torch.from_numpy(np.empty(size + 64, np.uint8))
    start = -memory.data_ptr() % 64
    return memory[start : start + size]
