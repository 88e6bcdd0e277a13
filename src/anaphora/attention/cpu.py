"""Paged attention on the CPU: compiled kernels over the pool.

The pool of a layer is one matrix with a row for each token slot: its keys, then its values (latents: one key, which
holds the values). With AMX the rows lie in panels: ``kernels/cpu/attention_amx.py`` draws them. Prompt chunks, shared
blocks, and a row's own blocks are all tasks of one kernel, which ``cpu_plan.py`` plans once per step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anaphora.attention.base import KVLayout, LayerOptions, StepLayout
from anaphora.attention.cpu_plan import CHUNK_ROWS, Plan, make_plan
from anaphora.errors import ModelError
from anaphora.types.batch import BlockCopy

try:
    from anaphora.kernels.cpu import amx, attention_amx, attention_generic, launch, simd, write_kv
except ImportError as error:
    raise ModelError(
        f"attention on a CPU needs numba, which cannot be imported ({error}); "
        "run pip install '.[serve]' in Anaphora's folder"
    ) from error

TASKS_PER_THREAD = 4
"""A chunk is cut into this many attention tasks per thread, so that no thread waits long for the others."""

_LAYER_FIELDS = launch.fields_from(attention_generic.ATTEND, "tiles")
"""Fields of a step's record that each layer sets."""


class CpuAttention:
    """AttentionBackend on the CPU, for model and pool in bfloat16 or float32."""

    def __init__(
        self, layouts: Sequence[KVLayout], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._layouts = layouts
        self._block_size = block_size
        # Left uninitialized: the system allocates a page when it is first written.
        token_slots = num_blocks * block_size
        self._pools = [
            launch.aligned_bytes(token_slots * x.width * dtype.itemsize).view(dtype).view(token_slots, x.width)
            for x in layouts
        ]
        fits = amx.AMX and dtype == torch.bfloat16 and block_size % attention_amx.PANEL == 0
        self._by_panels = [fits and not x.latent and x.key_size % 32 == x.value_size % 32 == 0 for x in layouts]
        self._addresses = [pool.data_ptr() for pool in self._pools]
        self._layout: StepLayout | None = None
        self._complete = False  # whether every row of the batch belongs to a sequence
        self._writer: KVWriter | None = None
        self._rows: dict[tuple[int | None, KVLayout, int], PlannedAttention] = {}

    @property
    def pools(self) -> list[Tensor]:
        """``[token slots, width]`` for each layer, or in panels of 16 token slots: see ``attention_amx.py``."""
        return self._pools

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        size = self._block_size
        for copy in copies:
            source, target = copy.source * size, copy.target * size
            for pool, by_panels in zip(self._pools, self._by_panels, strict=True):
                filled = -(-copy.filled // attention_amx.PANEL) * attention_amx.PANEL if by_panels else copy.filled
                pool[target : target + filled] = pool[source : source + filled]

    def plan(self, layout: StepLayout) -> None:
        """Store the step's layout. The first layer of each shape and window makes its plan, in ``_planned``."""
        self._layout = layout
        self._complete = sum(q.length for q in layout.queries) == len(layout.slot_mapping)
        self._writer = KVWriter(layout.slot_mapping)
        self._rows.clear()

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor | None, options: LayerOptions) -> Tensor:
        assert self._writer is not None
        layout, pool = self._layouts[layer], self._pools[layer]
        self._writer.write(layout, pool, key, value, self._by_panels[layer])
        make = query.new_empty if self._complete else query.new_zeros
        out = make(query.shape[1], query.shape[0], layout.value_size)
        self._planned(layout, query.shape[0], options.window).attend(pool, query, options, out, self._by_panels[layer])
        return out

    def records(
        self, layers: range, options: Sequence[LayerOptions], heads: int, query: int, out: int
    ) -> tuple[np.ndarray[Any, Any], int]:
        """For the fused decoder: an ``ATTEND`` record for each of ``layers``, and the address of the rows' token slots.

        ``query`` and ``out`` are addresses of bfloat16 ``[T, heads, D]``; ``options`` are those of all layers, without
        sinks. Both results are valid during the step; token slots are int64 ``[T]``.
        """
        assert self._layout is not None
        records = np.empty(len(layers), attention_generic.ATTEND)
        alike: dict[tuple[KVLayout, int | None], list[int]] = {}
        for index, layer in enumerate(layers):
            alike.setdefault((self._layouts[layer], options[layer].window), []).append(index)
        for (layout, window), places in alike.items():
            records[places] = self._planned(layout, heads, window).record
            records["query_head"][places] = layout.key_size
            records["query_row"][places] = heads * layout.key_size
        panels = np.array(self._by_panels[layers.start : layers.stop])
        otherwise = _tiles(self._pools[0].dtype == torch.bfloat16)
        records["tiles"] = np.where(panels, amx.TILE_CONFIGS.ctypes.data, otherwise)
        records["query_kind"] = simd.BFLOAT16
        records["query"], records["out"], records["sinks"] = query, out, 0
        records["pool_kind"] = launch.DTYPES[self._pools[0].dtype]
        records["panels"] = panels
        records["pool"] = self._addresses[layers.start : layers.stop]
        records["scale"] = [options[layer].scale for layer in layers]
        records["softcap"] = [options[layer].softcap or 0.0 for layer in layers]
        token_slots = self._layout.slot_mapping
        if not self._complete:
            ctypes.memset(out, 0, 2 * len(token_slots) * heads * self._layouts[layers.start].value_size)
        return records, token_slots.data_ptr()

    def _planned(self, layout: KVLayout, heads: int, window: int | None) -> PlannedAttention:
        found = self._rows.get((window, layout, heads))
        if found is None:
            assert self._layout is not None
            rows = sum(query.length for query in self._layout.queries if query.length > 1)
            share = rows * layout.heads // (TASKS_PER_THREAD * launch.threads())
            plan = make_plan(self._layout, self._block_size, window, min(max(16, share // 16 * 16), CHUNK_ROWS))
            found = self._rows[window, layout, heads] = PlannedAttention(plan, layout, heads, self._block_size)
        return found


class KVWriter:
    """Writes a step's new keys and values to their token slots in the pool."""

    def __init__(self, token_slots: Tensor) -> None:
        self._token_slots = token_slots
        self._workers = launch.threads() if len(token_slots) > write_kv.WRITE_ROWS else 1
        self._call = launch.Call(
            write_kv.write_rows, write_kv.WRITE, launch.fields_from(write_kv.WRITE, "num_rows"), {}
        )

    def write(self, layout: KVLayout, pool: Tensor, key: Tensor, value: Tensor | None, by_panels: bool) -> None:
        """``key`` and ``value`` ``[Hkv, T, D]`` to ``pool`` ``[S, W]``."""
        if by_panels:
            assert value is not None
            key, value = key.to(pool.dtype), value.to(pool.dtype)
        key = _dense(key)
        value = None if value is None else _dense(value)
        target = (int(by_panels), pool.data_ptr(), launch.DTYPES[pool.dtype], layout.width)
        where = (self._token_slots.shape[0], self._token_slots.data_ptr(), *target)
        keys = (key.data_ptr(), layout.key_size, key.stride(0), key.stride(1))
        values = (0, 0, 0, 0)
        if value is not None:
            values = (value.data_ptr(), layout.value_size, value.stride(0), value.stride(1))
        self._call(self._workers, *where, launch.DTYPES[key.dtype], layout.heads, *keys, *values)


class PlannedAttention:
    """A step's attention for layers of one shape: the plan, the scratch, and the kernel's record."""

    def __init__(self, plan: Plan, layout: KVLayout, heads: int, block_size: int) -> None:
        self._plan = plan
        counts = plan.merges[:, 2] - plan.merges[:, 1] if len(plan.merges) else np.zeros(0)
        self._left = (counts * layout.heads).astype(np.int64)
        threads = launch.threads()
        self._workers = min(threads, len(plan.tasks) * layout.heads)
        columns = -(-plan.rows * (heads // layout.heads) // simd.LANES) * simd.LANES
        scratch_layout = max(
            find(layout.key_size, layout.value_size, columns)[-1]
            for find in (attention_generic.scratch_layout, attention_amx.panel_scratch_layout)
        )
        scratch = -(-scratch_layout // 64) * 64
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
        self._call = launch.Call(attention_generic.attend, attention_generic.ATTEND, _LAYER_FIELDS, given)

    @property
    def record(self) -> np.ndarray[Any, Any]:
        """The kernel's record of the step; the fields of each layer are not set."""
        return self._call.record

    def attend(self, pool: Tensor, query: Tensor, options: LayerOptions, out: Tensor, by_panels: bool) -> None:
        """Attends with ``query`` ``[H, T, D]``; writes ``out`` ``[T, H, Dv]``, of the same dtype."""
        query = _dense(query)
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        self._call(
            self._workers,
            amx.TILE_CONFIGS.ctypes.data if by_panels else _tiles(pool.dtype == query.dtype == torch.bfloat16),
            int(by_panels),
            pool.data_ptr(),
            launch.DTYPES[pool.dtype],
            query.data_ptr(),
            query.stride(0),
            query.stride(1),
            launch.DTYPES[query.dtype],
            out.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            options.scale,
            options.softcap or 0.0,
        )


def _tiles(bfloat16: bool) -> int:
    """The kernel's field ``tiles`` for a pool without panels: GEMMs by AMX, by AVX-512 BF16 or in float32."""
    if not bfloat16:
        return 0
    return int(amx.TILE_CONFIGS.ctypes.data) if amx.AMX else attention_generic.VECTORS * amx.BF16_VECTORS


def _dense(x: Tensor) -> Tensor:
    """Returns ``x``, or a copy in which the elements of a head are contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
