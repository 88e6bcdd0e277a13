"""A step's work list in buffers that stay where they are, so that a CUDA graph can be replayed over new lists.

The kernels are launched for as many items as the buffers hold and read on the device how many there are. What a step
needs beyond that does not fit, and the step runs without a graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anaphora.attention.gpu_plan import Tiling, WorkList
from anaphora.attention.transfer import to_device

TABLE_ENTRIES = 2**22
"""Block ids of all rows of a step together; 16 MB."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceList:
    """A work list on the device: ``counts`` there and ``launches`` here are of small items, large items, merges."""

    small: Tensor
    large: Tensor
    members: Tensor
    merges: Tensor
    positions: Tensor
    tables: Tensor
    counts: tuple[Tensor, ...]
    launches: tuple[int, int, int]
    parts: int


class FixedList:
    """Room for a padded batch. ``tiles``: of several rows too, which groups of prefixes and chunks need."""

    def __init__(self, rows: int, tiles: bool, tiling: Tiling, buffer: Tensor) -> None:
        items, large = 2 * rows + tiling.programs, 0
        if tiles:
            large = 2 * rows // (tiling.small // tiling.heads_per_group + 1) + tiling.programs  # two levels of groups
        self._buffer = buffer
        # In the order of the buffer: counts, small, large, members, merges, positions; then the tables.
        self._sizes = [-(-size // 4) * 4 for size in (12, items * 8, large * 8, rows * 8, rows * 3, rows)]
        self._edges = np.cumsum([0, *self._sizes]).tolist()
        counts, *lists = (buffer[a:b] for a, b in zip(self._edges, self._edges[1:], strict=False))
        parts = 4 * rows + tiling.programs * (tiling.large // tiling.heads_per_group)
        launches = (items, large, rows)
        self.list = DeviceList(*lists, buffer[self._edges[-1] :], counts.split(4), launches, parts)

    @staticmethod
    def buffer(rows: int, tiling: Tiling, device: torch.device) -> Tensor:
        """For lists of up to ``rows`` rows, one at a time."""
        return torch.zeros(64 * rows + 64 * tiling.programs + TABLE_ENTRIES, dtype=torch.int32, device=device)

    def fill(self, work: WorkList) -> bool:
        """Send a step's list there, in one copy. False, and nothing is sent, if it does not fit."""
        lists = (work.small, work.large, work.members, work.merges, work.positions)
        fits = all(array.size <= size for array, size in zip(lists, self._sizes[1:], strict=True))
        if not fits or work.parts > self.list.parts or work.tables.size > TABLE_ENTRIES:
            return False
        counts = np.repeat(np.array([len(work.small), len(work.large), len(work.merges)], np.int32), 4)
        packed = np.zeros(self._edges[-1] + work.tables.size, np.int32)
        for array, begin in zip((counts, *lists, work.tables), self._edges, strict=True):
            packed[begin : begin + array.size] = array.ravel()
        self._buffer[: packed.size].copy_(to_device(packed, self._buffer.device))
        return True
