"""Steps as CUDA graphs: one launch instead of hundreds.

A graph is captured for a padded number of rows, with or without large attention tiles (which prefix groups and prompt
chunks need). The graphs share their static inputs in one buffer and their logits in another. Padding rows write to the
null block, and their output is ignored.
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

CAPTURE_SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, *range(256, 1024, 64), *range(1024, 1537, 128))
"""Rows of the graphs, besides the maximum number of sequences. A step uses the next larger size."""

MAX_ROWS_WITH_CHUNKS = 1536
"""Rows of the largest graph for steps with chunks: what 512 running sequences compute while prompts come in."""

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


class StepGraphs:
    """CUDA graphs for steps of up to ``max_seqs`` decode rows, or ``max_tokens`` rows with chunks.

    ``forward`` takes token ids and positions ``[1, T]`` and the rows to sample ``[R]``, and returns logits ``[R, V]``
    in the model's dtype.
    """

    def __init__(self, forward: Forward, backend: TritonAttention, max_seqs: int, max_tokens: int) -> None:
        self._forward = forward
        self._backend = backend
        self._decode_sizes = [*(size for size in CAPTURE_SIZES if size < max_seqs), max_seqs]
        self._chunk_sizes = [size for size in CAPTURE_SIZES if size <= min(MAX_ROWS_WITH_CHUNKS, max_tokens)]
        max_rows = max(self._decode_sizes[-1], *self._chunk_sizes)
        device = torch.device("cuda", torch.cuda.current_device())
        self._inputs = torch.zeros(3 * max_rows, dtype=torch.int64, device=device)
        self._sample_rows = torch.zeros(max_seqs, dtype=torch.int64, device=device)
        self._logits = torch.empty(0)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._backend.reserve_graphs(max_rows)
        self._capture_all()

    def rows(self, count: int, chunks: bool) -> int | None:
        """Rows of the graph for a step of ``count`` rows, with or without chunks; None if it is too large."""
        return next((size for size in (self._chunk_sizes if chunks else self._decode_sizes) if size >= count), None)

    def run(self, inputs: StepInputs) -> Tensor | None:
        """Replay a step. Returns the logits ``[R, V]`` of its sample rows, valid until the next replay.

        ``inputs`` must be padded to the ``rows`` of a graph. None if the step's attention plan does not fit.
        """
        rows = inputs.token_ids.shape[1]
        layout = StepLayout(self._input(2, rows), inputs.layout.queries, inputs.layout.groups)
        large_tiles = self._backend.plan_graph(layout, rows)
        if large_tiles is None:
            return None
        count = len(inputs.sample_slots)
        self._inputs[: 3 * rows].copy_(inputs.rows)
        self._sample_rows[:count].copy_(inputs.sample_rows)
        self._graphs[rows, large_tiles].replay()
        return self._logits[:count]

    def _input(self, index: int, rows: int) -> Tensor:
        """Token ids (0), positions (1) or slot mapping (2) of a graph of ``rows`` rows."""
        return self._inputs[index * rows : (index + 1) * rows]

    def _capture_all(self) -> None:
        """Capture the largest graph first: the others reuse its memory."""
        pool = torch.cuda.graph_pool_handle()
        wanted = {(rows, large_tiles) for rows in self._decode_sizes for large_tiles in (True, False)}
        wanted |= {(rows, True) for rows in self._chunk_sizes}
        for rows, large_tiles in sorted(wanted, reverse=True):
            self._inputs.zero_()
            self._sample_rows.zero_()
            queries = tuple(QueryRange(slot, slot, 1, 0, (0,)) for slot in range(rows))
            layout = StepLayout(self._input(2, rows), queries)
            self._backend.plan_graph(layout, rows, large_tiles)
            self._compute(rows)
            self._backend.plan_graph(layout, rows, large_tiles)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._compute(rows)
            self._graphs[rows, large_tiles] = graph

    def _compute(self, rows: int) -> None:
        samples = self._sample_rows[:rows].clamp(max=rows - 1)  # those behind this step's are left from earlier steps
        logits = self._forward(self._input(0, rows)[None], self._input(1, rows)[None], samples)
        if not len(self._logits):
            self._logits = logits.new_empty(len(self._sample_rows), logits.shape[1])
        self._logits[: len(samples)].copy_(logits)


def bytes_needed(max_seqs: int, vocab_size: int, dtype: torch.dtype) -> int:
    """A rough estimate of the graphs' memory besides weights and KV pool: logits twice, and a layer's activations."""
    return 2 * max_seqs * vocab_size * dtype.itemsize + 2**29
