"""Plans a step's attention on the CPU: tasks for the kernel ``attend``.

A task is some rows over a range of keys, read through one block table. A row's keys may be spread over several tasks,
whose partial results are merged::

    row 0     ├──────── shared, two tasks ────────┤├─ shared by 0 and 1 ─┤├ own ┤
    row 1     ├──────── of three rows ────────────┤├─────────────────────┤├─ own, two tasks ─┤
    row 2     ├───────────────────────────────────┤├ own ┤
    rows 3 …  a chunk: some rows a task, each over the keys before it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anaphora.attention.base import QueryRange, StepLayout

SEGMENT_TOKENS = 512
"""Most keys of a task of decode rows; longer ranges are split over threads."""

CHUNK_ROWS = 128
"""Most rows of a task of a chunk."""

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The int32 arrays of ``attention_generic.ATTEND``. ``rows`` is the number of rows of the largest task."""

    tasks: Ints
    members: Ints
    lows: Ints
    ends: Ints
    tables: Ints
    merged: Ints
    merges: Ints
    shares: Ints
    rows: int


def make_plan(layout: StepLayout, block_size: int, window: int | None, chunk_rows: int = CHUNK_ROWS) -> Plan:
    """Returns all tasks of a step, for layers with this ``window``; a chunk has a task for ``chunk_rows`` rows."""
    return _Planner(layout, block_size, window).plan(chunk_rows)


class _Planner:
    def __init__(self, layout: StepLayout, block_size: int, window: int | None) -> None:
        self.layout = layout
        self.block_size = block_size
        self.lows = np.zeros(len(layout.slot_mapping), np.int32)
        self.ends = np.zeros(len(layout.slot_mapping), np.int32)
        for query in layout.queries:
            span = slice(query.row, query.row + query.length)
            self.ends[span] = np.arange(query.start + 1, query.start + query.length + 1, dtype=np.int32)
        if window is not None:
            self.lows[:] = np.maximum(self.ends - window, 0)
        self.tables: list[int] = []
        self.members: list[int] = []
        self.tasks: list[tuple[int, ...]] = []
        self.shares: dict[int, list[int]] = {}  # partial results of each row with several tasks
        self.num_shares = 0

    def plan(self, chunk_rows: int) -> Plan:
        rows = {query.slot: query for query in self.layout.queries if query.length == 1 and not query.prompt}
        shared = dict.fromkeys(rows, 0)  # keys of each row that are covered by groups
        for group in self.layout.groups:
            members = [rows[slot] for slot in group.slots if slot in rows]
            self._group(members, group.first * self.block_size, group.last * self.block_size)
            shared |= {query.slot: max(shared[query.slot], group.last * self.block_size) for query in members}
        for query in rows.values():
            self._own(query, shared[query.slot])
        for query in self.layout.queries:
            if query.length > 1 or query.prompt:
                self._chunk(query, chunk_rows)
        merged = np.zeros(len(self.ends), np.int32)
        merges: list[tuple[int, int, int]] = []
        shares: list[int] = []
        for index, (row, places) in enumerate(self.shares.items()):
            merged[row] = index
            merges.append((row, len(shares), len(shares) + len(places)))
            shares += places
        return Plan(
            np.array(self.tasks, np.int32),
            np.array(self.members, np.int32),
            self.lows,
            self.ends,
            np.array(self.tables, np.int32),
            merged,
            np.array(merges, np.int32),
            np.array(shares, np.int32),
            max((task[1] for task in self.tasks), default=0),
        )

    def _table(self, query: QueryRange, end: int) -> int:
        """Appends the blocks of keys 0 to ``end - 1``; returns their start in ``tables``."""
        start = len(self.tables)
        self.tables += query.blocks[: -(-end // self.block_size)]
        return start

    def _task(self, rows: Sequence[int], table: int, begin: int, end: int, share: bool) -> None:
        base = -1
        if share:
            base, self.num_shares = self.num_shares, self.num_shares + len(rows)
            for index, row in enumerate(rows):
                self.shares.setdefault(row, []).append(base + index)
        places = list(rows)
        all_from, all_to = int(self.lows[places].max()), int(self.ends[places].min())
        self.tasks.append((len(self.members), len(rows), table, begin, end, base, all_from, min(all_to, end)))
        self.members += rows

    def _group(self, members: Sequence[QueryRange], begin: int, end: int) -> None:
        """Keys ``begin`` to ``end - 1`` for rows that share them, from the first block that any window reaches."""
        rows = [query.row for query in members]
        lowest = min((int(self.lows[row]) for row in rows), default=end)
        begin = max(begin, lowest // self.block_size * self.block_size)
        if begin < end:
            table = self._table(members[0], end)
            for first in range(begin, end, SEGMENT_TOKENS):
                self._task(rows, table, first, min(first + SEGMENT_TOKENS, end), share=True)

    def _own(self, query: QueryRange, shared: int) -> None:
        """Add tasks for a row's own keys, which follow the shared ones."""
        row, end = query.row, query.start + 1
        begin = max(int(self.lows[row]), shared)
        if begin < end:
            table = self._table(query, end)
            share = row in self.shares or end - begin > SEGMENT_TOKENS
            for first in range(begin, end, SEGMENT_TOKENS):
                self._task([row], table, first, min(first + SEGMENT_TOKENS, end), share)

    def _chunk(self, query: QueryRange, chunk_rows: int) -> None:
        """Tasks of a chunk, the last rows first: they have the most keys."""
        last = query.row + query.length
        table = self._table(query, query.start + query.length)
        for first in reversed(range(query.row, last, chunk_rows)):
            rows = range(first, min(first + chunk_rows, last))
            self._task(rows, table, int(self.lows[first]), int(self.ends[rows[-1]]), share=False)
