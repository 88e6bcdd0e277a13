"""Builds the Batch of one step from the chunks that the scheduler chooses, and remembers whose chunks they are."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from anaphora.cache.manager import Reservation
from anaphora.core.sequence import Sequence
from anaphora.types.batch import Batch, BlockCopy, Chunk, Join, PrefixGroup


class ScheduledChunk(NamedTuple):
    """A chunk in flight: positions ``start`` to ``end - 1`` of a sequence.

    ``admission_count`` is the sequence's at that time; a result counts only if it is still the same.
    """

    sequence: Sequence
    admission_count: int
    slot: int
    start: int
    end: int
    sample: bool


class BatchBuilder:
    """Collects the batch of step number ``step``; ``budget`` is the number of tokens that still fit."""

    def __init__(self, step: int, budget: int) -> None:
        self.step = step
        self.budget = budget
        self.scheduled: list[ScheduledChunk] = []
        self._joins: list[Join] = []
        self._copies: list[BlockCopy] = []
        self._chunks: list[Chunk] = []

    def join(self, sequence: Sequence) -> None:
        """Tell the runner about a sequence that was just admitted."""
        sampling = sequence.request.sampling
        if sequence.choice or sequence.prompt_done:
            sampling = replace(sampling, prompt_logprobs=None)
        self._joins.append(
            Join(
                sequence.slot,
                sampling,
                sequence.choice,
                tuple(sequence.token_ids),
                sequence.num_prompt,
                sequence.request.eos_token_ids,
                tuple(block.id for block in sequence.table.blocks),
            )
        )

    def next_end(self, sequence: Sequence) -> int:
        """Return where the sequence's next chunk ends: one position further, or a prompt as far as the budget goes."""
        start = sequence.num_scheduled
        return start + min(sequence.num_admitted - start, self.budget) if sequence.prefilling else start + 1

    def add(self, sequence: Sequence, end: int, write_from: int, reservation: Reservation) -> None:
        """Add the sequence's chunk up to position ``end``, whose slots from ``write_from`` on are reserved."""
        start, slot = sequence.num_scheduled, sequence.slot
        tokens = tuple(sequence.token_ids[start:end]) if sequence.prefilling else None
        sample = end == sequence.num_tokens
        self._copies += reservation.copies
        changes = tuple(reservation.table_changes)
        self._chunks.append(Chunk(slot, start, end - start, tokens, write_from, changes, sample))
        self.scheduled.append(ScheduledChunk(sequence, sequence.admission_count, slot, start, end, sample))
        self.budget -= end - start
        sequence.num_scheduled = end
        sequence.num_in_flight += sample

    def decoding(self) -> set[int]:
        """Return the slots whose chunk is one sampled token."""
        return {chunk.slot for chunk in self._chunks if chunk.token_ids is None}

    def build(self, groups: tuple[PrefixGroup, ...]) -> Batch:
        """Return the finished batch, with the decode rows that share blocks in ``groups``."""
        return Batch(self.step, tuple(self._joins), tuple(self._copies), tuple(self._chunks), groups)
