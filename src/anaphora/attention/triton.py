"""Paged attention on a GPU, by the kernels of ``kernels.py``.

A step is planned once, on the host (``worklist.py``), and sent to the device in one copy; each layer then takes a few
launches: write keys and values, attend in small and in large tiles, merge. A prefix that decode rows share is read
once a tile of rows, not once a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from anaphora.attention import kernels
from anaphora.attention.base import KVLayout, LayerOptions, StepLayout
from anaphora.attention.worklist import Tiling, plan
from anaphora.errors import ConfigError
from anaphora.types import BlockCopy

MIN_BLOCK_SIZE = 16
MAX_KEY_SIZE = 576
PROGRAMS_PER_PROCESSOR = 2


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of a launch: query rows M and keys N of a tile, warps, stages of the software pipeline."""

    m: int
    n: int
    warps: int
    stages: int


def _shapes(layout: KVLayout, group: int, itemsize: int) -> tuple[_Shape, _Shape]:
    """For small and large tiles: what fits the registers and the shared memory of a Hopper processor."""
    least = max(16, triton.next_power_of_2(group))
    if itemsize > 2:
        return _Shape(least, 16, 4, 1), _Shape(max(32, least), 16, 4, 1)
    if layout.key_size > 256:
        return _Shape(least, 32, 4, 2), _Shape(max(64, least), 32, 8, 2)
    if layout.key_size > 128:
        return _Shape(least, 64, 4, 2), _Shape(max(64, least), 64, 4, 2)
    return _Shape(least, 64, 4, 3), _Shape(max(128, least), 64, 8, 3)


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """A planned step on the device. ``counts`` are those of small items, large items and merges, on either side."""

    slots: Tensor
    small: Tensor
    large: Tensor
    members: Tensor
    merges: Tensor
    positions: Tensor
    tables: Tensor
    counts: Tensor
    launches: tuple[int, int, int]
    parts: int


class TritonAttention:
    """AttentionBackend on CUDA devices. Raises ConfigError for what the kernels do not take."""

    def __init__(
        self, layouts: Sequence[KVLayout], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        _check(layouts, block_size)
        self._layouts = layouts
        self._block_size = block_size
        self._device = device
        self._pools = _make_pools(layouts, num_blocks * block_size, dtype, device)
        self._processors = 1
        if device.type == "cuda":
            self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._layout: StepLayout | None = None
        self._steps: dict[tuple[int, int, int, int], _Step] = {}
        self._parts: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    @property
    def pools(self) -> list[Tensor]:
        """One ``[token slots, width]`` a layer; layers of one width are slices of one tensor."""
        return [pool[place] for pool, place in self._pools]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        if not copies:
            return
        size = self._block_size
        filled = np.array([copy.filled for copy in copies])
        offsets = np.arange(filled.sum()) - np.repeat(np.cumsum(filled) - filled, filled)
        sources = np.repeat([copy.source * size for copy in copies], filled) + offsets
        targets = np.repeat([copy.target * size for copy in copies], filled) + offsets
        index = _send(np.stack((sources, targets)), self._device)
        for pool in {id(pool): pool for pool, _ in self._pools}.values():
            pool[:, index[1]] = pool[:, index[0]]

    def plan(self, layout: StepLayout) -> None:
        self._layout = layout
        self._steps.clear()

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor | None, options: LayerOptions) -> Tensor:
        layout = self._layouts[layer]
        heads, rows = query.shape[:2]
        group = heads // layout.heads
        pool, place = self._pools[layer]
        small, large = _shapes(layout, group, pool.element_size())
        step = self._step(layout.heads, group, small.m, large.m)
        self._write(layout, pool[place], step.slots, key, value)
        out = query.new_empty(rows, heads, layout.value_size)
        parts = self._part_buffers(heads, layout.value_size, step.parts)
        work = ((small, step.small, step.launches[0], 0), (large, step.large, step.launches[1], 1))
        for shape, items, launched, at in work:
            if launched:
                target = (query, pool[place], out, *parts)
                self._attend(layout, shape, (items, launched, step.counts[at:]), step, target, options)
        if step.launches[2]:
            kernels.merge_parts[(step.launches[2], heads)](
                *parts, out, step.merges, step.counts[2:], _sinks(options, out),
                heads, layout.value_size, triton.next_power_of_2(layout.value_size), options.sinks is not None,
            )  # fmt: skip
        return out

    def _step(self, heads: int, group: int, small: int, large: int) -> _Step:
        """The plan of the present step for layers of this shape; most models have one shape."""
        name = (heads, group, small, large)
        if name not in self._steps:
            assert self._layout is not None
            programs = max(1, self._processors * PROGRAMS_PER_PROCESSOR // heads)
            work = plan(
                self._layout.queries, self._layout.groups, self._block_size, Tiling(group, small, large, programs)
            )
            launches = (len(work.small), len(work.large), len(work.merges))
            arrays = (
                np.array(launches, np.int32), work.small, work.large, work.members, work.merges, work.positions,
                work.tables,
            )  # fmt: skip
            counts, *views = _send_together(arrays, self._device)
            slots = self._layout.slot_mapping
            self._steps[name] = _Step(slots, *views, counts=counts, launches=launches, parts=work.parts)
        return self._steps[name]

    def _part_buffers(self, heads: int, size: int, parts: int) -> tuple[Tensor, Tensor]:
        """Room for partial results; kept, and made larger where a step needs more."""
        name = (heads, size, 0)
        if name not in self._parts or len(self._parts[name][0]) < parts:
            room = triton.next_power_of_2(max(parts, 16))
            self._parts[name] = (
                torch.empty(room, heads, size, dtype=torch.float32, device=self._device),
                torch.empty(room, heads, dtype=torch.float32, device=self._device),
            )
        return self._parts[name]

    def _write(self, layout: KVLayout, pool: Tensor, slots: Tensor, key: Tensor, value: Tensor | None) -> None:
        second = key if value is None else value
        key, second = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, second))
        block = triton.next_power_of_2(layout.heads * max(layout.key_size, layout.value_size))
        kernels.write_kv[(key.shape[1],)](
            key, second, pool, slots, key.stride(0), key.stride(1), second.stride(0), second.stride(1),
            layout.heads, layout.key_size, layout.value_size, layout.latent, block,
        )  # fmt: skip

    def _attend(
        self,
        layout: KVLayout,
        shape: _Shape,
        work: tuple[Tensor, int, Tensor],
        step: _Step,
        target: tuple[Tensor, ...],
        options: LayerOptions,
    ) -> None:
        query, pool, out, part_outs, part_logs = target
        items, launched, count = work
        query = query if query.stride(-1) == 1 else query.contiguous()
        kernels.attend_items[(launched * layout.heads,)](
            query, pool, out, part_outs, part_logs, items, step.members, count, step.positions, step.tables,
            _sinks(options, out), options.scale, options.softcap or 1.0, options.window or 0,
            query.stride(0), query.stride(1),
            layout.heads, query.shape[0] // layout.heads, layout.key_size, *_halves(layout.key_size),
            layout.value_size, *_halves(layout.value_size), layout.latent, self._block_size, shape.m, shape.n,
            bool(options.softcap), options.window is not None, options.sinks is not None,
            "ieee" if pool.dtype == torch.float32 else "tf32",
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip


def _check(layouts: Sequence[KVLayout], block_size: int) -> None:
    if block_size < MIN_BLOCK_SIZE or block_size & (block_size - 1):
        raise ConfigError(
            f"--block-size {block_size} does not work on a GPU: its kernels take powers of two from {MIN_BLOCK_SIZE} on",
            param="block_size",
        )
    for index, layout in enumerate(layouts):
        sizes = (layout.key_size, layout.value_size)
        if min(sizes) < 16 or max(sizes) > MAX_KEY_SIZE or any(size % 8 for size in sizes):
            raise ConfigError(
                f"layer {index} has keys of {sizes[0]} and values of {sizes[1]} elements; the GPU's kernels take "
                f"multiples of 8 from 16 to {MAX_KEY_SIZE}"
            )


def _make_pools(
    layouts: Sequence[KVLayout], slots: int, dtype: torch.dtype, device: torch.device
) -> list[tuple[Tensor, int]]:
    """For each layer the tensor ``[layers of its width, slots, width]`` and the place in it."""
    widths = [layout.width for layout in layouts]
    pools = {width: torch.empty(widths.count(width), slots, width, dtype=dtype, device=device) for width in set(widths)}
    return [(pools[width], widths[:layer].count(width)) for layer, width in enumerate(widths)]


def _halves(size: int) -> tuple[int, int]:
    """The largest power of two within ``size``, and a power of two that holds the rest: what a tile can be made of."""
    first = 1 << (size.bit_length() - 1)
    return first, max(16, triton.next_power_of_2(size - first)) if size > first else 0


def _sinks(options: LayerOptions, otherwise: Tensor) -> Tensor:
    return otherwise if options.sinks is None else options.sinks


def _send(array: np.ndarray, device: torch.device) -> Tensor:
    """To the device without waiting for it: from pinned memory, which torch keeps until the copy is done."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def _send_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """One copy for all; each begins at a multiple of 16 bytes."""
    sizes = [-(-array.size // 4) * 4 for array in arrays]
    packed = np.empty(sum(sizes), np.int32)
    at = 0
    for array, size in zip(arrays, sizes, strict=True):
        packed[at : at + array.size] = array.ravel()
        at += size
    return list(_send(packed, device).split(sizes))
