"""Index arithmetic from chunks to rows."""

from __future__ import annotations

import pytest
import torch

from anaphora.errors import StepFailed
from anaphora.model.inputs import ROW_MULTIPLE, make_inputs
from anaphora.types.batch import Batch, Chunk

CPU = torch.device("cpu")
TABLES = {0: [7, 3, 9], 1: [5], 2: [1, 2, 4, 6, 8, 10, 11]}


def batch(*chunks: Chunk) -> Batch:
    return Batch(0, (), (), chunks)


def test_chunks_lie_side_by_side() -> None:
    chunks = (
        Chunk(0, 3, 3, (13, 14, 15), 3, (), False),
        Chunk(1, 2, 1, None, 2, (), True),
        Chunk(2, 6, 2, (26, 27), 7, (), True),
    )
    inputs = make_inputs(batch(*chunks), TABLES, {1}, 4, CPU)
    assert inputs.token_ids.tolist() == [[13, 14, 15, -1 - 1, 26, 27]]
    assert inputs.positions.tolist() == [[3, 4, 5, 2, 6, 7]]
    # Position 6 of slot 2 is below write_from: its row goes to the null block.
    assert inputs.layout.slot_mapping.tolist() == [7 * 4 + 3, 3 * 4, 3 * 4 + 1, 5 * 4 + 2, 0, 2 * 4 + 3]
    assert [(q.slot, q.row, q.length, q.start) for q in inputs.layout.queries] == [
        (0, 0, 3, 3),
        (1, 3, 1, 2),
        (2, 4, 2, 6),
    ]
    assert (inputs.sample_rows.tolist(), inputs.sample_slots, inputs.known_tokens) == ([3, 5], [1, 2], 5)


def test_many_rows_are_padded_into_the_null_block() -> None:
    inputs = make_inputs(batch(Chunk(2, 0, 19, tuple(range(19)), 0, (), True)), TABLES, set(), 4, CPU)
    assert inputs.token_ids.shape == inputs.positions.shape == (1, 2 * ROW_MULTIPLE)
    assert inputs.layout.slot_mapping[19:].tolist() == [0] * 13
    assert (inputs.sample_rows.tolist(), inputs.known_tokens) == ([18], 19)


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (Chunk(1, 4, 1, (1,), 4, (), True), "block table holds 4 tokens"),
        (Chunk(5, 0, 1, (1,), 0, (), True), "block table holds 0 tokens"),
        (Chunk(0, 0, 2, (1,), 0, (), True), "another number of tokens"),
        (Chunk(0, 0, 1, None, 0, (), True), "not sampled a token"),
        (Chunk(0, 0, 0, (), 0, (), True), "positions 0 to -1"),
    ],
)
def test_a_chunk_that_does_not_fit_its_slot_fails_the_step(chunk: Chunk, reason: str) -> None:
    with pytest.raises(StepFailed, match=reason):
        make_inputs(batch(chunk), TABLES, set(), 4, CPU)
