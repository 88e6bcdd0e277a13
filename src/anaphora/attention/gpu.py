"""Paged attention on a GPU, by the kernels of ``kernels.py``.

A step is planned once, on the host (``worklist.py``), and sent to the device in one copy; each layer then takes a few
launches: write keys and values, attend in small and in large tiles, merge. A prefix that decode rows share is read
once a tile of rows, not once a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anaphora.attention.base import FLOAT8, KVLayout, LayerOptions, StepLayout
from anaphora.attention.gpu_plan import Tiling, WorkList, plan
from anaphora.attention.graph_buffers import DeviceList, FixedList
from anaphora.attention.transfer import pack, to_device
from anaphora.errors import ConfigError
from anaphora.kernels.triton import attention
from anaphora.types.batch import BlockCopy

MIN_BLOCK_SIZE = 16
MAX_KEY_SIZE = 576
PROGRAMS_PER_PROCESSOR = 2
MERGED_HEADS = 8
"""Of one row, merged by one program."""
COPY_BYTES = 64 * 2**20
"""What copies of blocks take for a while; no step plans for more."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of a launch: query rows M and keys N of a tile, warps, stages of the software pipeline."""

    m: int
    n: int
    warps: int
    stages: int


def next_power(size: int) -> int:
    """The power of two that holds ``size``; triton's own takes as long as a launch."""
    return 1 << (size - 1).bit_length()


@cache
def _shapes(layout: KVLayout, group: int, itemsize: int) -> tuple[_Shape, _Shape]:
    """For small and large tiles: of those tried on a Hopper processor the fastest (``benchmarks/attention.py``).

    The two run beside each other, so neither may fill a processor's shared memory alone.
    """
    least = max(16, next_power(group))
    if itemsize > 2:
        return _Shape(least, 16, 4, 1), _Shape(max(32, least), 16, 4, 1)
    if layout.key_size > 256:
        return _Shape(least, 32, 4, 2), _Shape(max(64, least), 32, 8, 2)
    if layout.key_size > 128:
        return _Shape(least, 64, 4, 2), _Shape(max(64, least), 64, 4, 2)
    return _Shape(least, 32, 1, 3), _Shape(max(128, least), 64, 4, 3)


class TritonAttention:
    """AttentionBackend on CUDA devices. Raises ConfigError for what the kernels do not take."""

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
        self._by_layer = self.pools
        self._processors = 1
        self._side: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._side = torch.cuda.Stream(device)
            self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._layout: StepLayout | None = None
        self._lists: dict[Tiling, DeviceList] = {}
        self._room: tuple[int, bool] | None = None
        self._plans: dict[Tiling, WorkList] = {}
        self._most_rows = 0
        self._fixed: dict[tuple[Tiling, int, bool], FixedList] = {}
        self._buffers: dict[Tiling, Tensor] = {}
        self._parts: dict[tuple[int, int, bool], tuple[Tensor, Tensor]] = {}

    @staticmethod
    def check_block_size(block_size: int) -> None:
        """ConfigError for one that the kernels do not take."""
        if block_size < MIN_BLOCK_SIZE or block_size & (block_size - 1):
            raise ConfigError(
                f"--block-size {block_size} does not work on a GPU, which takes powers of two from {MIN_BLOCK_SIZE} on",
                param="block_size",
            )

    @staticmethod
    def check_layouts(layouts: Sequence[KVLayout]) -> None:
        """ConfigError for layers that the kernels do not take."""
        for index, layout in enumerate(layouts):
            sizes = (layout.key_size, layout.value_size)
            if min(sizes) < 16 or max(sizes) > MAX_KEY_SIZE or any(size % 8 for size in sizes):
                raise ConfigError(
                    f"layer {index} has keys of {sizes[0]} and values of {sizes[1]} elements; the GPU's kernels take "
                    f"multiples of 8 from 16 to {MAX_KEY_SIZE}: use --device cpu"
                )

    @property
    def pools(self) -> list[Tensor]:
        """One ``[token slots, width]`` a layer; layers of one width are slices of one tensor.

        In float8 they are bytes, ``[token slots, token bytes]``: the elements, then the scales.
        """
        return [pool[place] for pool, place in self._pools]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
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
        self._layout = layout
        self._room = None
        self._lists.clear()
        self._plans.clear()

    def reserve(self, rows: int) -> None:
        """``plan_fixed`` will be used for up to this many rows."""
        self._most_rows = rows

    def plan_fixed(self, layout: StepLayout, rows: int, tiles: bool | None = None) -> bool | None:
        """Plan a step in buffers that stay where they are: those of ``rows`` and ``tiles``.

        Returns ``tiles``, which is whether there are large ones (groups of prefixes, chunks) and, left out, is read
        off the step; None if the step does not fit.
        """
        self.plan(layout)
        if tiles is None:
            tiles = any(len(self._plan(tiling).large) > 0 for tiling in self._buffers)
        self._room = (rows, tiles)
        for tiling in self._buffers:
            if not self._fixed_list(tiling, rows, tiles).fill(self._plan(tiling)):
                return None
        return tiles

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor | None, options: LayerOptions) -> Tensor:
        layout = self._layouts[layer]
        if self._dtype == FLOAT8:
            check_float8(layout, options)
        heads, rows = query.shape[:2]
        group = heads // layout.heads
        pool = self._by_layer[layer]
        itemsize = (query if self._dtype == FLOAT8 else pool).element_size()  # of what is multiplied
        small, large = _shapes(layout, group, itemsize)
        programs = max(1, self._processors * PROGRAMS_PER_PROCESSOR // layout.heads)
        assert self._layout is not None
        step = self._list(Tiling(group, small.m, large.m, programs, layout.token_bytes(self._dtype)))
        self._write(layout, pool, self._layout.slot_mapping, key, value)
        out = query.new_empty(rows, heads, layout.value_size)
        parts = self._part_buffers(heads, layout.value_size, step.parts)
        target = (query, pool, out, *parts)
        with self._aside(all(step.launches[:2])):
            self._attend(layout, large, (step.large, step.launches[1], step.counts[1]), step, target, options)
        self._attend(layout, small, (step.small, step.launches[0], step.counts[0]), step, target, options)
        self._join_aside(all(step.launches[:2]))
        if step.launches[2]:
            attention.merge_parts[(step.launches[2], -(-heads // MERGED_HEADS))](
                *parts, out, step.merges, step.counts[2], _sinks(options, out),
                heads, MERGED_HEADS, layout.value_size, next_power(layout.value_size), options.sinks is not None,
            )  # fmt: skip
        return out

    def _aside(self, both: bool) -> AbstractContextManager[Any]:
        """Inside, launches go beside those that follow: large tiles compute while small ones read.

        In graphs alone; outside of one, the launches of a second stream cost more than they win.
        """
        if not both or self._side is None or self._room is None:
            return nullcontext()
        self._side.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._side)

    def _join_aside(self, both: bool) -> None:
        """What follows waits for what went aside."""
        if both and self._side is not None and self._room is not None:
            torch.cuda.current_stream().wait_stream(self._side)

    def _list(self, tiling: Tiling) -> DeviceList:
        """The present step's list for layers of this shape; most models have one shape."""
        if self._room is not None:
            return self._fixed_list(tiling, *self._room).list
        if tiling not in self._lists:
            work = self._plan(tiling)
            launches = (len(work.small), len(work.large), len(work.merges))
            counted = np.repeat(np.array(launches, np.int32), 4)  # each at a multiple of 16 bytes
            lists = [work.small, work.large, work.members, work.merges, work.positions, work.tables]
            counts, *views = pack([counted, *lists], self._device)
            self._lists[tiling] = DeviceList(*views, counts=counts.split(4), launches=launches, parts=work.parts)
        return self._lists[tiling]

    def _plan(self, tiling: Tiling) -> WorkList:
        assert self._layout is not None
        if tiling not in self._plans:
            self._plans[tiling] = plan(self._layout.queries, self._layout.groups, self._block_size, tiling)
        return self._plans[tiling]

    def _fixed_list(self, tiling: Tiling, rows: int, tiles: bool) -> FixedList:
        name = (tiling, rows, tiles)
        if name not in self._fixed:
            if tiling not in self._buffers:
                self._buffers[tiling] = FixedList.buffer(self._most_rows, tiling, self._device)
            self._fixed[name] = FixedList(rows, tiles, tiling, self._buffers[tiling])
        return self._fixed[name]

    def _part_buffers(self, heads: int, size: int, parts: int) -> tuple[Tensor, Tensor]:
        """Room for partial results; kept, and made larger where a step needs more.

        That for graphs must not move, so the graph of the most rows is to be captured first.
        """
        name = (heads, size, self._room is not None)
        if name not in self._parts or len(self._parts[name][0]) < parts:
            room = parts if self._room is not None else next_power(max(parts, 16))
            self._parts[name] = (
                torch.empty(room, heads, size, dtype=torch.float32, device=self._device),
                torch.empty(room, heads, dtype=torch.float32, device=self._device),
            )
        return self._parts[name]

    def _write(self, layout: KVLayout, pool: Tensor, slots: Tensor, key: Tensor, value: Tensor | None) -> None:
        second = key if value is None else value
        key, second = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, second))
        strides = (key.stride(0), key.stride(1), second.stride(0), second.stride(1))
        shape = (layout.heads, layout.key_size, layout.value_size, layout.latent, pool.shape[1])
        if self._dtype == FLOAT8:
            powers = [next_power(size) for size in shape[:3]]
            attention.write_kv_scaled[(key.shape[1],)](key, second, *_views(pool), slots, *strides, *shape, *powers)
            return
        block = next_power(layout.heads * max(layout.key_size, layout.value_size))
        attention.write_kv[(key.shape[1],)](key, second, pool, slots, *strides, *shape, block)

    def _attend(
        self,
        layout: KVLayout,
        shape: _Shape,
        work: tuple[Tensor, int, Tensor],
        step: DeviceList,
        target: tuple[Tensor, ...],
        options: LayerOptions,
    ) -> None:
        query, pool, out, part_outs, part_logs = target
        items, launched, count = work
        if not launched:
            return
        query = query if query.stride(-1) == 1 else query.contiguous()
        scaled = self._dtype == FLOAT8
        elements, scales = _views(pool) if scaled else (pool, pool)
        exact = (query.dtype if scaled else pool.dtype) == torch.float32
        attention.attend_items[(launched * layout.heads,)](
            query, elements, scales, out, part_outs, part_logs, items, step.members, count, step.positions, step.tables,
            _sinks(options, out), options.scale, options.softcap or 1.0, options.window or 0,
            query.stride(0), query.stride(1),
            layout.heads, query.shape[0] // layout.heads, layout.key_size, *_halves(layout.key_size),
            layout.value_size, *_halves(layout.value_size), layout.latent, pool.shape[1], scaled, self._block_size,
            shape.m, shape.n, bool(options.softcap), options.window is not None, options.sinks is not None,
            "ieee" if exact else "tf32",
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip


def check_float8(layout: KVLayout, options: LayerOptions) -> None:
    """ConfigError for layers on which a cache in float8 has not been proven right on a GPU."""
    if options.window is None and not layout.latent and layout.key_size == layout.value_size:
        return
    why = f"a sliding window of {options.window} tokens" if options.window else "keys and values of different sizes"
    raise ConfigError(
        f"--kv-cache-dtype fp8 does not serve this model: its attention has {why}; use auto", param="kv_cache_dtype"
    )


def _make_pools(
    layouts: Sequence[KVLayout], slots: int, dtype: torch.dtype, device: torch.device
) -> list[tuple[Tensor, int]]:
    """For each layer the tensor ``[layers of its width, slots, width]`` and the place in it."""
    stored = torch.uint8 if dtype == FLOAT8 else dtype
    widths = [layout.token_bytes(dtype) // stored.itemsize for layout in layouts]
    pools = {
        width: torch.empty(widths.count(width), slots, width, dtype=stored, device=device) for width in set(widths)
    }
    return [(pools[width], widths[:layer].count(width)) for layer, width in enumerate(widths)]


def _views(pool: Tensor) -> tuple[Tensor, Tensor]:
    """The elements and the scales of a pool in float8; both are the whole of it."""
    return pool.view(FLOAT8), pool.view(torch.float32)


@cache
def _halves(size: int) -> tuple[int, int]:
    """The largest power of two within ``size``, and a power of two that holds the rest: what a tile can be made of."""
    first = 1 << (size.bit_length() - 1)
    return first, max(16, next_power(size - first)) if size > first else 0


def _sinks(options: LayerOptions, otherwise: Tensor) -> Tensor:
    return otherwise if options.sinks is None else options.sinks
