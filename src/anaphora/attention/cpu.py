"""Paged attention on the CPU: compiled kernels over the pool.

The pool of a layer is one matrix, a row a token slot: its keys, then its values (latents: keys only, which hold the
values). Chunks, rows that share blocks, and what rows have alone are all tasks of one kernel: ``cpu_plan.py`` plans
them once a step, ``kernels/cpu/attention_generic.py`` has the kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anaphora.attention.base import KVLayout, LayerOptions, StepLayout
from anaphora.attention.cpu_calls import KINDS, RowAttention, RowWriter, large
from anaphora.attention.cpu_plan import CHUNK_ROWS, make_plan
from anaphora.kernels.cpu import amx, attention_amx, attention_generic, launch, simd
from anaphora.types.batch import BlockCopy

TASKS_PER_THREAD = 4
"""A chunk is cut into so many tasks that no thread waits long for the others."""


class CpuAttention:
    """AttentionBackend on the CPU, for model and pool in bfloat16 or float32."""

    def __init__(
        self, layouts: Sequence[KVLayout], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._layouts = layouts
        self._block_size = block_size
        # Not filled: the system gives memory to a page when it is first written.
        slots = num_blocks * block_size
        self._pools = [large(slots * x.width * dtype.itemsize).view(dtype).view(slots, x.width) for x in layouts]
        fits = amx.AMX and dtype == torch.bfloat16 and block_size % attention_amx.PANEL == 0
        self._tiled = [fits and not x.latent and x.key_size % 32 == x.value_size % 32 == 0 for x in layouts]
        self._addresses = [pool.data_ptr() for pool in self._pools]
        self._layout: StepLayout | None = None
        self._complete = False  # whether every row of the batch is some sequence's
        self._writer: RowWriter | None = None
        self._rows: dict[tuple[int | None, KVLayout, int], RowAttention] = {}

    @property
    def pools(self) -> list[Tensor]:
        """One ``[token slots, width]`` a layer, or panels of 16 slots: see ``attention_amx.py``."""
        return self._pools

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        size = self._block_size
        for copy in copies:
            source, target = copy.source * size, copy.target * size
            for pool, by_panels in zip(self._pools, self._tiled, strict=True):
                filled = -(-copy.filled // attention_amx.PANEL) * attention_amx.PANEL if by_panels else copy.filled
                pool[target : target + filled] = pool[source : source + filled]

    def plan(self, layout: StepLayout) -> None:
        self._layout = layout
        self._complete = sum(q.length for q in layout.queries) == len(layout.slot_mapping)
        self._writer = RowWriter(layout.slot_mapping)
        self._rows.clear()

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor | None, options: LayerOptions) -> Tensor:
        assert self._writer is not None
        layout, pool = self._layouts[layer], self._pools[layer]
        self._writer.write(layout, pool, key, value, self._tiled[layer])
        make = query.new_empty if self._complete else query.new_zeros
        out = make(query.shape[1], query.shape[0], layout.value_size)
        self._planned(layout, query.shape[0], options.window).attend(pool, query, options, out, self._tiled[layer])
        return out

    def records(
        self, layers: range, options: Sequence[LayerOptions], heads: int, query: int, out: int
    ) -> tuple[np.ndarray[Any, Any], int]:
        """For a kernel that runs ``layers`` itself: an ``ATTEND`` record for each, and the rows' slots.

        ``query`` and ``out`` are addresses of bfloat16 ``[T, heads, D]``; ``options`` are those of all layers, without
        sinks. Both results are valid during the step; slots are the address of int64 ``[T]``.
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
        tiled = np.array(self._tiled[layers.start : layers.stop])
        by_tiles = tiled | (amx.AMX and self._pools[0].dtype == torch.bfloat16)
        records["tiles"], records["query_kind"] = np.where(by_tiles, amx.SHAPES.ctypes.data, 0), simd.BFLOAT16
        records["query"], records["out"], records["sinks"] = query, out, 0
        records["pool_kind"] = KINDS[self._pools[0].dtype]
        records["tiled"] = tiled
        records["pool"] = self._addresses[layers.start : layers.stop]
        records["scale"] = [options[layer].scale for layer in layers]
        records["softcap"] = [options[layer].softcap or 0.0 for layer in layers]
        slots = self._layout.slot_mapping
        if not self._complete:
            ctypes.memset(out, 0, 2 * len(slots) * heads * self._layouts[layers.start].value_size)
        return records, slots.data_ptr()

    def _planned(self, layout: KVLayout, heads: int, window: int | None) -> RowAttention:
        found = self._rows.get((window, layout, heads))
        if found is None:
            assert self._layout is not None
            rows = sum(query.length for query in self._layout.queries if query.length > 1)
            share = rows * layout.heads // (TASKS_PER_THREAD * launch.threads())
            plan = make_plan(self._layout, self._block_size, window, min(max(16, share // 16 * 16), CHUNK_ROWS))
            found = self._rows[window, layout, heads] = RowAttention(plan, layout, heads, self._block_size)
        return found
