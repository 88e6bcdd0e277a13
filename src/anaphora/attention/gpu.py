"""Paged attention on a GPU, by the Triton kernels of ``kernels/triton/attention.py``.

A step is planned once, on the host (``gpu_plan.py``), and sent to the device in one copy. Each layer then takes a few
launches: write keys and values, attend in small and in large tiles, merge. A prefix that decode rows share is read
once per tile of rows, not once per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anaphora.attention.base import FLOAT8, KVLayout, LayerOptions, StepLayout
from anaphora.attention.gpu_plan import AttentionPlan, Tiling, plan
from anaphora.attention.gpu_tiles import TileConfig, next_power_of_2, split_in_two, tile_configs
from anaphora.attention.graph_buffers import DevicePlan, GraphBuffers
from anaphora.attention.transfer import pack, to_device
from anaphora.errors import ConfigError
from anaphora.kernels.triton import attention
from anaphora.types.batch import BlockCopy

MIN_BLOCK_SIZE = 16
MAX_KEY_SIZE = 576
PROGRAMS_PER_SM = 2
MERGE_HEADS = 8
"""Query heads of a row that one program merges."""
COPY_BYTES = 64 * 2**20
"""Most temporary memory of a block copy, as memory planning assumes."""


class _LayerStep(NamedTuple):
    """Arguments that all kernel launches of one layer take."""

    layout: KVLayout
    options: LayerOptions
    plan: DevicePlan
    pool: Tensor
    query: Tensor
    out: Tensor
    partial_out: Tensor
    partial_lse: Tensor

    @property
    def sinks(self) -> Tensor:
        """The sinks; if there are none, any tensor: the kernels do not read it."""
        return self.out if self.options.sinks is None else self.options.sinks


class TritonAttention:
    """AttentionBackend on CUDA devices. Raises ConfigError for layouts and block sizes that the kernels do not take."""

    def __init__(
        self, layouts: Sequence[KVLayout], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.check_block_size(block_size)
        self.check_layouts(layouts)
        self._layouts = layouts
        self._block_size = block_size
        self._device = device
        self._dtype = dtype
        self._pools = _make_pools(layouts, num_blocks * block_size, dtype, device)
        self._pool_of_layer = self.pools
        self._num_sms = 1
        self._side_stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._side_stream = torch.cuda.Stream(device)
            self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._layout: StepLayout | None = None
        self._plans: dict[Tiling, AttentionPlan] = {}
        self._device_plans: dict[Tiling, DevicePlan] = {}
        # For CUDA graphs: (rows, large tiles) of this step's graph, and the buffers of all graphs.
        self._graph: tuple[int, bool] | None = None
        self._max_graph_rows = 0
        self._graph_storage: dict[Tiling, Tensor] = {}
        self._graph_buffers: dict[tuple[Tiling, int, bool], GraphBuffers] = {}
        self._partials: dict[tuple[int, int, bool], tuple[Tensor, Tensor]] = {}

    @staticmethod
    def check_block_size(block_size: int) -> None:
        """Raise ConfigError unless the kernels take blocks of ``block_size`` tokens."""
        if block_size < MIN_BLOCK_SIZE or block_size & (block_size - 1):
            raise ConfigError(
                f"--block-size {block_size} does not work on a GPU, which takes powers of two from {MIN_BLOCK_SIZE} on",
                param="block_size",
            )

    @staticmethod
    def check_layouts(layouts: Sequence[KVLayout]) -> None:
        """Raise ConfigError unless the kernels take every layer."""
        for index, layout in enumerate(layouts):
            sizes = (layout.key_size, layout.value_size)
            if min(sizes) < 16 or max(sizes) > MAX_KEY_SIZE or any(size % 8 for size in sizes):
                raise ConfigError(
                    f"layer {index} has keys of {sizes[0]} and values of {sizes[1]} elements; the GPU's kernels take "
                    f"multiples of 8 from 16 to {MAX_KEY_SIZE}: use --device cpu"
                )

    @property
    def pools(self) -> list[Tensor]:
        """One pool ``[token slots, width]`` per layer; layers of equal width are slices of one tensor.

        In float8 they are bytes, ``[token slots, token bytes]``: the elements, then the scales.
        """
        return [pool[index] for pool, index in self._pools]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the filled token slots of blocks, in all layers."""
        if not copies:
            return
        size = self._block_size
        filled = np.array([copy.filled for copy in copies])
        offsets = np.arange(filled.sum()) - np.repeat(np.cumsum(filled) - filled, filled)
        sources = np.repeat([copy.source * size for copy in copies], filled) + offsets
        targets = np.repeat([copy.target * size for copy in copies], filled) + offsets
        index = to_device(np.stack((sources, targets)), self._device)
        for pool in {id(pool): pool for pool, _ in self._pools}.values():
            at_once = max(1, COPY_BYTES // (len(pool) * pool.shape[2] * pool.element_size()))
            for source, target in zip(index[0].split(at_once), index[1].split(at_once), strict=True):
                pool[:, target] = pool[:, source]

    def plan(self, layout: StepLayout) -> None:
        """Store the step's layout. The first layer of each tiling makes its plan, in ``_plan``."""
        self._layout = layout
        self._graph = None
        self._device_plans.clear()
        self._plans.clear()

    def reserve_graphs(self, max_rows: int) -> None:
        """Announce that ``plan_graph`` will be called for up to ``max_rows`` rows."""
        self._max_graph_rows = max_rows

    def plan_graph(self, layout: StepLayout, rows: int, large_tiles: bool | None = None) -> bool | None:
        """Plan a step in the static buffers of the graph for ``rows`` rows and ``large_tiles``.

        ``large_tiles`` None: as the step needs. Returns the value used, or None if the step does not fit.
        """
        self.plan(layout)
        if large_tiles is None:
            large_tiles = any(len(self._plan(tiling).large_items) > 0 for tiling in self._graph_storage)
        self._graph = (rows, large_tiles)
        for tiling in self._graph_storage:
            if not self._buffers(tiling, rows, large_tiles).fill(self._plan(tiling)):
                return None
        return large_tiles

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor | None, options: LayerOptions) -> Tensor:
        """Write keys and values, then attend; shapes as in ``AttentionBackend.run``."""
        layout = self._layouts[layer]
        if self._dtype == FLOAT8:
            check_float8(layout, options)
        heads, rows = query.shape[:2]
        queries_per_kv = heads // layout.heads
        pool = self._pool_of_layer[layer]
        itemsize = (query if self._dtype == FLOAT8 else pool).element_size()  # of the operands of the dot products
        small, large = tile_configs(layout, queries_per_kv, itemsize)
        programs = max(1, self._num_sms * PROGRAMS_PER_SM // layout.heads)
        assert self._layout is not None
        step_plan = self._device_plan(
            Tiling(queries_per_kv, small.block_m, large.block_m, programs, layout.token_bytes(self._dtype))
        )
        self._write(layout, pool, self._layout.slot_mapping, key, value, step_plan.num_rows)
        out = query.new_empty(rows, heads, layout.value_size)
        partials = self._partial_buffers(heads, layout.value_size, step_plan.num_partials)
        query = query if query.stride(-1) == 1 else query.contiguous()
        step = _LayerStep(layout, options, step_plan, pool, query, out, *partials)
        (num_small, num_large, _), (small_count, large_count, _) = step_plan.launches, step_plan.counts
        small_items, large_items = step_plan.arrays[:2]
        overlap = num_small > 0 and num_large > 0
        with self._on_side_stream(overlap):
            self._attend(step, large, large_items, num_large, large_count)
        self._attend(step, small, small_items, num_small, small_count)
        self._join_side_stream(overlap)
        self._merge(step)
        return out

    def _on_side_stream(self, overlap: bool) -> AbstractContextManager[Any]:
        """Launches inside run at the same time as those that follow: large tiles compute while small ones read.

        In graphs only; outside of one, the launches of a second stream cost more than they gain.
        """
        if not overlap or self._side_stream is None or self._graph is None:
            return nullcontext()
        self._side_stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._side_stream)

    def _join_side_stream(self, overlap: bool) -> None:
        """Make the current stream wait for the side stream."""
        if overlap and self._side_stream is not None and self._graph is not None:
            torch.cuda.current_stream().wait_stream(self._side_stream)

    def _device_plan(self, tiling: Tiling) -> DevicePlan:
        """The present step's plan for layers of this tiling; most models have one."""
        if self._graph is not None:
            return self._buffers(tiling, *self._graph).plan
        if tiling not in self._device_plans:
            step = self._plan(tiling)
            launches = (len(step.small_items), len(step.large_items), len(step.merges))
            repeated = np.repeat(np.array(launches, np.int32), 4)  # each aligned to 16 bytes
            counts, *views = pack([repeated, *step.arrays], self._device)
            self._device_plans[tiling] = DevicePlan(
                tuple(views), counts.split(4), launches, step.num_partials, len(step.positions)
            )
        return self._device_plans[tiling]

    def _plan(self, tiling: Tiling) -> AttentionPlan:
        assert self._layout is not None
        if tiling not in self._plans:
            self._plans[tiling] = plan(self._layout.queries, self._layout.groups, self._block_size, tiling)
        return self._plans[tiling]

    def _buffers(self, tiling: Tiling, rows: int, large_tiles: bool) -> GraphBuffers:
        key = (tiling, rows, large_tiles)
        if key not in self._graph_buffers:
            if tiling not in self._graph_storage:
                self._graph_storage[tiling] = GraphBuffers.allocate(self._max_graph_rows, tiling, self._device)
            self._graph_buffers[key] = GraphBuffers(rows, large_tiles, tiling, self._graph_storage[tiling])
        return self._graph_buffers[key]

    def _partial_buffers(self, heads: int, size: int, count: int) -> tuple[Tensor, Tensor]:
        """Buffers of at least ``count`` partial results, kept and enlarged when a step needs more.

        Those of graphs must not move, so the graph with the most rows has to be captured first.
        """
        in_graph = self._graph is not None
        key = (heads, size, in_graph)
        if key not in self._partials or len(self._partials[key][0]) < count:
            room = count if in_graph else next_power_of_2(max(count, 16))
            self._partials[key] = (
                torch.empty(room, heads, size, dtype=torch.float32, device=self._device),
                torch.empty(room, heads, dtype=torch.float32, device=self._device),
            )
        return self._partials[key]

    def _write(
        self, layout: KVLayout, pool: Tensor, slot_mapping: Tensor, key: Tensor, value: Tensor | None, num_rows: int
    ) -> None:
        """Write the first ``num_rows`` rows of ``key`` and ``value`` ``[Hkv, T, size]`` to the pool.

        Outside of graphs this skips padding rows: no layer attends for them, so their memory is uninitialized.
        """
        second = key if value is None else value
        key, second = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, second))
        strides = (key.stride(0), key.stride(1), second.stride(0), second.stride(1))
        shape = (layout.heads, layout.key_size, layout.value_size, layout.latent, pool.shape[1])
        grid = (num_rows,)
        if self._dtype == FLOAT8:
            powers = [next_power_of_2(size) for size in shape[:3]]
            attention.write_kv_float8[grid](key, second, *_float8_views(pool), slot_mapping, *strides, *shape, *powers)
            return
        block = next_power_of_2(layout.heads * max(layout.key_size, layout.value_size))
        attention.write_kv[grid](key, second, pool, slot_mapping, *strides, *shape, block)

    def _attend(self, step: _LayerStep, config: TileConfig, items: Tensor, launched: int, num_items: Tensor) -> None:
        """Launch ``launched`` work items; the kernel skips those from ``num_items`` (on the device) on."""
        if not launched:
            return
        layout, options, query, pool = step.layout, step.options, step.query, step.pool
        float8 = self._dtype == FLOAT8
        elements, scales = _float8_views(pool) if float8 else (pool, pool)
        _, _, item_rows, _, positions, tables = step.plan.arrays
        exact = (query.dtype if float8 else pool.dtype) == torch.float32
        attention.paged_attention[(launched * layout.heads,)](
            query, elements, scales, step.out, step.partial_out, step.partial_lse,
            items, item_rows, num_items, positions, tables, step.sinks,
            options.scale, options.softcap or 1.0, options.window or 0,
            query.stride(0), query.stride(1),
            layout.heads, query.shape[0] // layout.heads, layout.key_size, *split_in_two(layout.key_size),
            layout.value_size, *split_in_two(layout.value_size), layout.latent, pool.shape[1], float8,
            self._block_size, config.block_m, config.block_n,
            bool(options.softcap), options.window is not None, options.sinks is not None,
            "ieee" if exact else "tf32",
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip

    @staticmethod
    def _merge(step: _LayerStep) -> None:
        """Merge the partial results, if there are any."""
        launched = step.plan.launches[2]
        if not launched:
            return
        heads, size = step.out.shape[1:]
        attention.merge_partials[(launched, -(-heads // MERGE_HEADS))](
            step.partial_out, step.partial_lse, step.out, step.plan.arrays[3], step.plan.counts[2], step.sinks,
            heads, MERGE_HEADS, size, next_power_of_2(size), step.options.sinks is not None,
        )  # fmt: skip


def check_float8(layout: KVLayout, options: LayerOptions) -> None:
    """Raise ConfigError for layers for which a float8 cache has not been tested on a GPU."""
    if options.window is None and not layout.latent and layout.key_size == layout.value_size:
        return
    why = f"a sliding window of {options.window} tokens" if options.window else "keys and values of different sizes"
    raise ConfigError(
        f"--kv-cache-dtype fp8 is not supported for this model: its attention has {why}; use auto",
        param="kv_cache_dtype",
    )


def _make_pools(
    layouts: Sequence[KVLayout], token_slots: int, dtype: torch.dtype, device: torch.device
) -> list[tuple[Tensor, int]]:
    """For each layer: the tensor ``[layers of its width, token slots, width]``, and the layer's index in it."""
    stored = torch.uint8 if dtype == FLOAT8 else dtype
    widths = [layout.token_bytes(dtype) // stored.itemsize for layout in layouts]
    pools = {
        width: torch.empty(widths.count(width), token_slots, width, dtype=stored, device=device)
        for width in set(widths)
    }
    return [(pools[width], widths[:layer].count(width)) for layer, width in enumerate(widths)]


def _float8_views(pool: Tensor) -> tuple[Tensor, Tensor]:
    """A float8 pool as its elements and as its scales; both views cover all of it."""
    return pool.view(FLOAT8), pool.view(torch.float32)
