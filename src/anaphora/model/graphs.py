"""Steps as CUDA graphs: one launch in place of hundreds.

A graph is of a padded number of rows, with or without large tiles, which groups of prefixes and chunks of prompts
need; nothing else is fixed. Its inputs lie in one buffer, the logits of the rows that sample in another. Padding rows
write to the null block and nobody reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anaphora.attention.base import QueryRange, StepLayout
from anaphora.model.inputs import StepInputs

if TYPE_CHECKING:
    from anaphora.attention.gpu import TritonAttention

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, *range(256, 1024, 64), *range(1024, 1537, 128))
"""Rows of a graph, beside the most that can run. A step takes the next larger one."""

MOST_WITH_CHUNKS = 1536
"""Rows of a step with chunks: what a server with 512 running sequences computes at once while prompts come in."""

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


class StepGraphs:
    """Captured for steps of up to ``most_seqs`` decode rows, or ``most_tokens`` of any.

    ``forward`` takes token ids and positions ``[1, T]`` and the rows that sample ``[R]``, and returns logits ``[R, V]``
    in the model's dtype.
    """

    def __init__(self, forward: Forward, backend: TritonAttention, most_seqs: int, most_tokens: int) -> None:
        self._forward = forward
        self._backend = backend
        self._decode_sizes = [*(size for size in SIZES if size < most_seqs), most_seqs]
        self._chunk_sizes = [size for size in SIZES if size <= min(MOST_WITH_CHUNKS, most_tokens)]
        most = max(self._decode_sizes[-1], *self._chunk_sizes)
        device = torch.device("cuda", torch.cuda.current_device())
        self._inputs = torch.zeros(3 * most, dtype=torch.int64, device=device)
        self._samples = torch.zeros(most_seqs, dtype=torch.int64, device=device)
        self._logits = torch.empty(0)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._backend.reserve_graphs(most)
        self._capture_all()

    def rows(self, count: int, chunks: bool) -> int | None:
        """Rows of the graph for a step of ``count``; None if there is none."""
        return next((size for size in (self._chunk_sizes if chunks else self._decode_sizes) if size >= count), None)

    def run(self, inputs: StepInputs) -> Tensor | None:
        """Logits ``[R, V]`` of the rows that sample, valid until the next run; None if the step fits no graph.

        ``inputs`` are padded to the rows of a graph.
        """
        rows = inputs.token_ids.shape[1]
        layout = StepLayout(self._part(rows, 2), inputs.layout.queries, inputs.layout.groups)
        tiles = self._backend.plan_graph(layout, rows)
        if tiles is None:
            return None
        count = len(inputs.sample_slots)
        self._inputs[: 3 * rows].copy_(inputs.rows)
        self._samples[:count].copy_(inputs.sample_rows)
        self._graphs[rows, tiles].replay()
        return self._logits[:count]

    def _part(self, rows: int, place: int) -> Tensor:
        return self._inputs[place * rows : (place + 1) * rows]

    def _capture_all(self) -> None:
        """The largest first: the others live in its memory."""
        pool = torch.cuda.graph_pool_handle()
        wanted = {(rows, tiles) for rows in self._decode_sizes for tiles in (True, False)}
        wanted |= {(rows, True) for rows in self._chunk_sizes}
        for rows, tiles in sorted(wanted, reverse=True):
            self._inputs.zero_()
            self._samples.zero_()
            queries = tuple(QueryRange(slot, slot, 1, 0, (0,)) for slot in range(rows))
            layout = StepLayout(self._part(rows, 2), queries)
            self._backend.plan_graph(layout, rows, tiles)
            self._compute(rows)
            self._backend.plan_graph(layout, rows, tiles)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._compute(rows)
            self._graphs[rows, tiles] = graph

    def _compute(self, rows: int) -> None:
        samples = self._samples[:rows].clamp(max=rows - 1)  # behind those of the step lie older ones
        logits = self._forward(self._part(rows, 0)[None], self._part(rows, 1)[None], samples)
        if not len(self._logits):
            self._logits = logits.new_empty(len(self._samples), logits.shape[1])
        self._logits[: len(samples)].copy_(logits)


def bytes_needed(most_seqs: int, vocab_size: int, dtype: torch.dtype) -> int:
    """What the graphs take beside the weights and the pool, roughly: logits twice, and what a layer makes."""
    return 2 * most_seqs * vocab_size * dtype.itemsize + 2**29
