"""Turns a Batch into the flat tensors of one forward pass.

::

    chunks      slot 3: positions 40..42      slot 1: position 77     slot 5: positions 0..3
    token_ids   [ t40 t41 t42               | t77                   | t0 t1 t2 t3 ]
    positions   [ 40  41  42                | 77                    | 0  1  2  3  ]
    token_slots table[40 // 16] · 16 + 8 …  (positions below write_from: the null block)
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anaphora.attention.base import QueryRange, StepLayout
from anaphora.attention.transfer import to_device
from anaphora.errors import StepFailed
from anaphora.types.batch import Batch

ROW_MULTIPLE = 16
"""Larger batches are padded to a multiple of this. Padding rows write to the null block; their output is ignored."""


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """The tensors of one step, on the device, all views of one int64 tensor.

    ``token_ids`` and ``positions`` are ``[1, T]``; a token id -1 - s stands for the token sampled last in slot s.
    ``rows`` ``[3 T]`` holds token ids, positions and the layout's slot mapping, one after the other. ``sample_rows``
    ``[R]`` are the rows to sample for ``sample_slots``. ``known_tokens`` counts the rows whose token came with the
    batch.
    """

    token_ids: Tensor
    positions: Tensor
    rows: Tensor
    layout: StepLayout
    sample_rows: Tensor
    sample_slots: list[int]
    sample_slots_device: Tensor
    known_tokens: int


def make_inputs(
    batch: Batch,
    tables: Mapping[int, Sequence[int]],
    sampled: Container[int],
    block_size: int,
    device: torch.device,
    padded: int | None = None,
) -> StepInputs:
    """Concatenate the batch's chunks and send them to ``device`` in one copy.

    ``tables`` are block tables by slot; ``sampled`` are the slots that have sampled a token. ``padded`` is the number
    of rows to pad to; None pads to a multiple of ROW_MULTIPLE. Raises StepFailed if a chunk does not fit its slot,
    which is a bug in the engine.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    token_slots: list[int] = []
    queries: list[QueryRange] = []
    rows: list[int] = []
    known_tokens = 0
    row = 0
    for slot, start, length, tokens, write_from, _, sample in batch.chunks:
        table = tables.get(slot, ())
        end = start + length
        if length < 1 or len(table) * block_size < end:
            raise _does_not_fit(slot, start, end, len(table) * block_size)
        queries.append(QueryRange(slot, row, length, start, table, tokens is not None))
        if tokens is None:
            if slot not in sampled:
                raise StepFailed(f"slot {slot} has not sampled a token to continue from")
            token_ids.append(-1 - slot)
        else:
            token_ids += tokens
            known_tokens += length
        row += length
        if len(token_ids) != row:
            raise StepFailed(f"the chunk of slot {slot} has length {length} but another number of tokens")
        if length == 1 and start >= write_from:  # most chunks, so without a call
            positions.append(start)
            token_slots.append(table[start // block_size] * block_size + start % block_size)
        else:
            positions += range(start, end)
            token_slots += _token_slots(start, end, write_from, table, block_size)
        if sample:
            rows.append(row - 1)
    for values in (token_ids, positions, token_slots):
        values += [0] * _padding(row, padded)
    sampling = [chunk.slot for chunk in batch.chunks if chunk.sample]
    sent = to_device(np.array([*token_ids, *positions, *token_slots, *rows, *sampling], np.int64), device)
    total = len(token_slots)
    layout = StepLayout(sent[2 * total : 3 * total], tuple(queries), batch.groups)
    return StepInputs(
        sent[None, :total],
        sent[None, total : 2 * total],
        sent[: 3 * total],
        layout,
        sent[3 * total : 3 * total + len(rows)],
        sampling,
        sent[3 * total + len(rows) :],
        known_tokens,
    )


def _padding(rows: int, padded: int | None) -> int:
    """Return how many rows to add: up to ``padded`` rows, or to a multiple of ROW_MULTIPLE if it is None.

    oneDNN prepares a kernel for each new number of rows, which takes as long as 20 rows: few numbers are used.
    """
    if padded is not None:
        return padded - rows
    return -rows % ROW_MULTIPLE if rows > ROW_MULTIPLE else 0


def _token_slots(start: int, end: int, write_from: int, table: Sequence[int], block_size: int) -> list[int]:
    """Return where K and V of positions ``start`` to ``end - 1`` are written; 0 for those below ``write_from``."""
    return [
        table[position // block_size] * block_size + position % block_size if position >= write_from else 0
        for position in range(start, end)
    ]


def _does_not_fit(slot: int, start: int, end: int, tokens: int) -> StepFailed:
    return StepFailed(
        f"slot {slot} is to compute positions {start} to {end - 1}, but its block table holds {tokens} tokens"
    )
