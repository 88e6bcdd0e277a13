"""Calls of the compiled kernels: what a step's records hold, and what a layer's call adds to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anaphora.attention import openmp
from anaphora.attention.base import KVLayout, LayerOptions
from anaphora.attention.parts import DecodePlan
from anaphora.errors import ModelError

try:
    from anaphora.attention import native, vectors
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
    """Decode rows over their own keys, merged with what they share."""

    def __init__(self, plan: DecodePlan, block_size: int) -> None:
        self._plan = plan
        self._parts = np.zeros((len(plan.parts), 10), np.int64)
        self._counters = np.concatenate(([0, 0], plan.rows[:, 3] - plan.rows[:, 2])).astype(np.int64)
        self._workers = min(openmp.threads(), len(plan.segments))
        self._buffers = torch.empty(0)
        self._record = np.zeros((), native.ATTEND)
        fields: Any = self._record
        fields["num_segments"], fields["block_size"] = len(plan.segments), block_size
        for name, array in (
            ("counters", self._counters),
            ("segments", plan.segments),
            ("rows", plan.rows),
            ("tables", plan.tables),
            ("shares", plan.shares),
            ("parts", self._parts),
        ):
            fields[name] = array.ctypes.data

    def attend(
        self,
        layout: KVLayout,
        pool: Tensor,
        query: Tensor,
        shared: Sequence[tuple[Tensor, Tensor]],
        options: LayerOptions,
        out: Tensor,
    ) -> None:
        """The plan's rows of ``query`` ``[H, T, D]`` to theirs of ``out`` ``[T, H, Dv]``, of the same dtype.

        ``shared`` are the outputs ``[P, Hkv, G · rows, ≥ Dv]`` and logs ``[P, Hkv, G · rows]`` of the plan's parts.
        """
        query = _dense(query)
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        self._shape(layout, query.shape[0])
        fields: Any = self._record
        fields["pool"], fields["pool_kind"] = pool.data_ptr(), KINDS[pool.dtype]
        fields["query"], fields["query_kind"] = query.data_ptr(), KINDS[query.dtype]
        fields["query_head"], fields["query_row"] = query.stride(0), query.stride(1)
        fields["out"], fields["sinks"] = out.data_ptr(), 0 if sinks is None else sinks.data_ptr()
        fields["scale"], fields["softcap"] = options.scale, options.softcap or 0.0
        for part, (outs, logs) in zip(self._parts, shared, strict=True):
            fields["part_kind"] = KINDS[outs.dtype]
            rows = outs.shape[2] * layout.heads // query.shape[0]
            part[:] = (outs.data_ptr(), logs.data_ptr(), len(outs), rows, *outs.stride()[:3], *logs.stride())
        self._counters[:2] = 0
        openmp.run(native.attend_own, self._record.ctypes.data, self._workers)

    def _shape(self, layout: KVLayout, heads: int) -> None:
        """The layer's shape, and room for what its segments give."""
        fields: Any = self._record
        fields["heads"], fields["kv_heads"], fields["width"] = heads, layout.heads, layout.width
        fields["key_size"], fields["value_size"] = layout.key_size, layout.value_size
        fields["value_offset"] = 0 if layout.latent else layout.heads * layout.key_size
        segments, scratch = len(self._plan.segments), native.scratch_bytes(layout.key_size, layout.value_size, heads)
        outs = 4 * segments * heads * vectors.padded(layout.value_size)
        logs = -(-4 * segments * heads // 64) * 64
        needed = self._workers * scratch + outs + logs
        if self._buffers.nbytes < needed:
            self._buffers = torch.empty(needed, dtype=torch.uint8)
        address = self._buffers.data_ptr()
        fields["scratch"], fields["scratch_bytes"] = address, scratch
        fields["logs"] = address + self._workers * scratch
        fields["outs"] = address + self._workers * scratch + logs


def _dense(x: Tensor) -> Tensor:
    """With the elements of a head side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
