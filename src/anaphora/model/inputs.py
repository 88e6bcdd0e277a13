"""From a Batch to the flat tensors of one forward pass.

::

    chunks      slot 3: positions 40..42      slot 1: position 77     slot 5: positions 0..3
    token_ids   [ t40 t41 t42               | t77                   | t0 t1 t2 t3 ]
    positions   [ 40  41  42                | 77                    | 0  1  2  3  ]
    slots       table[40 // 16] · 16 + 8 …  (row below write_from: the null block)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anaphora.attention.base import QueryRange, StepLayout
from anaphora.errors import StepFailed
from anaphora.types import Batch

ROW_MULTIPLE = 16
"""A batch of more rows is padded to a multiple of this; padding writes to the null block and nobody reads it."""


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """``token_ids`` and ``positions`` ``[1, T]`` int64. ``given`` counts the rows whose token came with the batch."""

    token_ids: Tensor
    positions: Tensor
    layout: StepLayout
    sample_rows: tuple[int, ...]
    sample_slots: tuple[int, ...]
    given: int


def flatten(
    batch: Batch, tables: Mapping[int, Sequence[int]], last_tokens: Mapping[int, int], block_size: int
) -> StepInputs:
    """Lay the batch's chunks side by side. ``tables`` and ``last_tokens`` are kept by slot.

    Raises StepFailed where a chunk does not fit its slot (a fault of the engine).
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    queries: list[QueryRange] = []
    rows: list[int] = []
    given = 0
    for chunk in batch.chunks:
        table = tables.get(chunk.slot, ())
        end = chunk.start + chunk.length
        if chunk.length < 1 or len(table) * block_size < end:
            raise StepFailed(
                f"slot {chunk.slot} is to compute positions {chunk.start} to {end - 1}, "
                f"but its block table holds {len(table) * block_size} tokens"
            )
        queries.append(QueryRange(chunk.slot, len(token_ids), chunk.length, chunk.start, table))
        if chunk.token_ids is None:
            if chunk.slot not in last_tokens:
                raise StepFailed(f"slot {chunk.slot} has sampled no token to go on from")
            token_ids.append(last_tokens[chunk.slot])
        else:
            token_ids += chunk.token_ids
            given += chunk.length
        if len(token_ids) != queries[-1].row + chunk.length:
            raise StepFailed(f"the chunk of slot {chunk.slot} is {chunk.length} long but brings other tokens")
        positions += range(chunk.start, end)
        slots += [
            table[position // block_size] * block_size + position % block_size if position >= chunk.write_from else 0
            for position in range(chunk.start, end)
        ]
        if chunk.sample:
            rows.append(len(token_ids) - 1)
    # oneDNN prepares itself anew for each number of rows, which costs as much as 20 rows do: keep to a few numbers.
    padding = -len(slots) % ROW_MULTIPLE if len(slots) > ROW_MULTIPLE else 0
    for values in (token_ids, positions, slots):
        values += [0] * padding
    layout = StepLayout(torch.tensor(slots, dtype=torch.int64), tuple(queries), batch.groups)
    return StepInputs(
        torch.tensor([token_ids], dtype=torch.int64),
        torch.tensor([positions], dtype=torch.int64),
        layout,
        tuple(rows),
        tuple(chunk.slot for chunk in batch.chunks if chunk.sample),
        given,
    )
