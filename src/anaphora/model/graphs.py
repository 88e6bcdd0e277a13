"""Decode steps as CUDA graphs: one launch in place of a thousand.

A graph is of a padded number of rows, with or without groups of prefixes in large tiles; nothing else is fixed. Its
inputs lie in one buffer, the logits in another. Padding rows write to the null block and nobody reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anaphora.attention.base import QueryRange, StepLayout
from anaphora.model.inputs import StepInputs

if TYPE_CHECKING:
    from anaphora.attention.triton import TritonAttention

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
"""Rows of a graph, beside the most that can run. A step takes the next larger one."""

Forward = Callable[[Tensor, Tensor], Tensor]


class DecodeGraphs:
    """Captured for steps of up to ``most_rows`` rows.

    ``forward`` takes token ids and positions ``[1, T]`` and returns logits ``[T, V]`` in the model's dtype.
    """

    def __init__(self, forward: Forward, backend: TritonAttention, most_rows: int, vocab_size: int) -> None:
        self._forward = forward
        self._backend = backend
        self._sizes = [*(size for size in SIZES if size < most_rows), most_rows]
        device = torch.device("cuda", torch.cuda.current_device())
        self._inputs = torch.zeros(3 * self._sizes[-1], dtype=torch.int64, device=device)
        self._logits = torch.empty(self._sizes[-1], vocab_size, dtype=torch.float32, device=device)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._capture_all()

    @staticmethod
    def bytes_needed(most_rows: int, vocab_size: int) -> int:
        """What the graphs take beside the weights and the pool, roughly: logits twice, and what a layer makes."""
        return most_rows * vocab_size * 6 + 2**29

    def rows(self, count: int) -> int | None:
        """Rows of the graph for a step of ``count``; None if there is none."""
        return next((size for size in self._sizes if size >= count), None)

    def run(self, inputs: StepInputs) -> Tensor | None:
        """Logits ``[rows, V]`` float32, valid until the next run; None if the step fits no graph.

        ``inputs`` are padded to the rows of a graph.
        """
        rows = inputs.token_ids.shape[1]
        layout = StepLayout(self._part(rows, 2), inputs.layout.queries, inputs.layout.groups)
        shared = self._backend.plan_fixed(layout, rows)
        if shared is None:
            return None
        for place, values in enumerate((inputs.token_ids[0], inputs.positions[0], inputs.layout.slot_mapping)):
            self._part(rows, place).copy_(values)
        self._graphs[rows, shared].replay()
        return self._logits[:rows]

    def _part(self, rows: int, place: int) -> Tensor:
        return self._inputs[place * rows : (place + 1) * rows]

    def _capture_all(self) -> None:
        """The largest first: the others live in its memory."""
        self._backend.reserve(self._sizes[-1])
        pool = torch.cuda.graph_pool_handle()
        for rows in reversed(self._sizes):
            for shared in (True, False):
                self._inputs.zero_()
                queries = tuple(QueryRange(slot, slot, 1, 0, (0,)) for slot in range(rows))
                layout = StepLayout(self._part(rows, 2), queries)
                self._backend.plan_fixed(layout, rows, shared)
                self._compute(rows)
                self._backend.plan_fixed(layout, rows, shared)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    self._compute(rows)
                self._graphs[rows, shared] = graph

    def _compute(self, rows: int) -> None:
        logits = self._forward(self._part(rows, 0)[None], self._part(rows, 1)[None])
        self._logits[:rows].copy_(logits)
