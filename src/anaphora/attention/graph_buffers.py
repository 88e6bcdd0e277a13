"""The static inputs of a CUDA graph's attention: a step's plan in buffers that keep their addresses between replays.

The kernels are launched for as many items as the buffers hold and read the real number on the device. A step whose
plan does not fit runs without a graph.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anaphora.attention.gpu_plan import AttentionPlan, Tiling
from anaphora.attention.transfer import to_device

TABLE_ENTRIES = 2**22
"""Block ids of all rows of a step together; 16 MB."""


@dataclass(frozen=True, slots=True, eq=False)
class DevicePlan:
    """An AttentionPlan on the device. ``arrays`` are its arrays in the same order, flat.

    ``counts`` (on the device) and ``launches`` (on the host) are numbers of small items, large items and merges.
    ``num_rows`` is the number of rows whose keys and values are written.
    """

    arrays: tuple[Tensor, ...]
    counts: tuple[Tensor, ...]
    launches: tuple[int, int, int]
    num_partials: int
    num_rows: int


class GraphBuffers:
    """Views of ``storage`` for plans of a batch padded to ``rows`` rows.

    ``large_tiles``: with room for tiles of several rows, which prefix groups and chunks need.
    """

    def __init__(self, rows: int, large_tiles: bool, tiling: Tiling, storage: Tensor) -> None:
        small, large = 2 * rows + tiling.target_programs, 0
        if large_tiles:  # two levels of prefix groups
            large = 2 * rows // (tiling.small_rows // tiling.queries_per_kv + 1) + tiling.target_programs
        self._storage = storage
        # In the order of the storage: counts, small and large items, item rows, merges, positions; then the tables.
        self._sizes = [-(-size // 4) * 4 for size in (12, small * 8, large * 8, rows * 8, rows * 3, rows)]
        self._edges = np.cumsum([0, *self._sizes]).tolist()
        counts, *arrays = (storage[a:b] for a, b in itertools.pairwise(self._edges))
        partials = 4 * rows + tiling.target_programs * (tiling.large_rows // tiling.queries_per_kv)
        tables = storage[self._edges[-1] :]
        self.plan = DevicePlan((*arrays, tables), counts.split(4), (small, large, rows), partials, rows)

    @staticmethod
    def allocate(rows: int, tiling: Tiling, device: torch.device) -> Tensor:
        """Storage for plans of up to ``rows`` rows, one plan at a time."""
        return torch.zeros(64 * rows + 64 * tiling.target_programs + TABLE_ENTRIES, dtype=torch.int32, device=device)

    def fill(self, plan: AttentionPlan) -> bool:
        """Send ``plan`` to the buffers in one copy. Returns False, and sends nothing, if it does not fit."""
        fits = all(array.size <= size for array, size in zip(plan.arrays[:-1], self._sizes[1:], strict=True))
        if not fits or plan.num_partials > self.plan.num_partials or plan.tables.size > TABLE_ENTRIES:
            return False
        counts = np.repeat(np.array([len(plan.small_items), len(plan.large_items), len(plan.merges)], np.int32), 4)
        packed = np.zeros(self._edges[-1] + plan.tables.size, np.int32)
        for array, begin in zip((counts, *plan.arrays), self._edges, strict=True):
            packed[begin : begin + array.size] = array.ravel()
        self._storage[: packed.size].copy_(to_device(packed, self._storage.device))
        return True
