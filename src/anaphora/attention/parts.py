"""Which keys the decode rows of a step attend to together: the plan of the CPU backend, in integers.

Keys carry their positions already, so without a window their order means nothing: the full blocks of a row are taken
in the order of their ids, where neighbours in the pool make one run that is read in place, without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from anaphora.attention.base import QueryRange, StepLayout
from anaphora.types import PrefixGroup

MIN_RUN_TOKENS = 256
"""A row's neighbouring blocks are attended in place from here on; fewer are gathered with those of the other rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Block ids to read: neighbours in the pool (``first`` to ``first + count - 1``) or any (``index`` ``[count]``)."""

    first: int
    count: int
    index: Tensor | None = None

    @classmethod
    def of(cls, blocks: Sequence[int]) -> Stretch:
        """``blocks`` is not empty."""
        first, count = blocks[0], len(blocks)
        if blocks[-1] - first == count - 1 and all(b - a == 1 for a, b in pairwise(blocks)):
            return cls(first, count)
        return cls(first, count, torch.tensor(blocks))

    def read(self, pool: Tensor, block_size: int) -> Tensor:
        """The blocks' tokens ``[count · block_size, W]`` of the pool ``[S, W]``: a view where they are neighbours."""
        if self.index is None:
            return pool[self.first * block_size : (self.first + self.count) * block_size]
        return pool.view(-1, block_size * pool.shape[1]).index_select(0, self.index).view(-1, pool.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Rows (indices among the decode rows; None: all) that attend to the same full blocks.

    ``mask`` ``[rows, tokens]`` is added to the scores (-inf where a row may not look), ``blind`` ``[rows]`` is True for
    rows that see nothing of it; ``level`` is the part's place in the merge.
    """

    rows: Tensor | None
    keys: Stretch
    level: int
    mask: Tensor | None = None
    blind: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """What is left of each row, gathered side by side: ``index`` ``[rows · B]`` block ids, padded with block 0.

    ``mask`` ``[rows, 1, 1, B · block_size]`` is -inf at unfilled, padded and windowed-out slots; ``unread`` are the
    flat indices of the slots that may hold anything, not-a-number included.
    """

    rows: Tensor | None
    index: Tensor
    mask: Tensor
    unread: Tensor
    level: int


@dataclass(frozen=True, slots=True, eq=False)
class DecodePlan:
    """All parts of a step's decode rows; ``levels`` is the most parts that one row has.

    ``rows`` are their places in the flat batch; None: they are the batch.
    """

    rows: Tensor | None
    parts: tuple[Part, ...]
    tail: Tail | None
    levels: int


class _Planner:
    def __init__(self, queries: Sequence[QueryRange], block_size: int, window: int | None, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.queries = queries
        self.block_size = block_size
        self.ends = [q.start + 1 for q in queries]
        self.lows = [max(0, end - window) if window else 0 for end in self.ends]
        self.windowed = window is not None
        self.levels = [0] * len(queries)
        self.shared = [0] * len(queries)  # blocks of each row that a group covers
        self.parts: list[Part] = []

    def group(self, group: PrefixGroup, members: list[int]) -> None:
        """The group's blocks for its rows, from the first that any window reaches."""
        size = self.block_size
        for row in members:
            self.shared[row] = group.last
        first = max(group.first, min(self.lows[row] for row in members) // size)
        if first >= group.last:
            return
        seen = None
        if any(self.lows[row] > first * size for row in members):
            lows = torch.tensor([self.lows[row] for row in members])
            seen = torch.arange(first * size, group.last * size) >= lows[:, None]
        self._add(members, Stretch.of(self.queries[members[0]].blocks[first : group.last]), seen)

    def own(self, row: int) -> list[int]:
        """Take the long runs of a row's own full blocks as parts; returns the ids of the rest, the last one last."""
        query, end = self.queries[row], self.ends[row]
        last = -(-end // self.block_size)
        first = max(self.shared[row], self.lows[row] // self.block_size)
        blocks = query.blocks[first:last]
        full = len(blocks) - (1 if end % self.block_size else 0)
        if self.windowed or full * self.block_size < MIN_RUN_TOKENS:
            return list(blocks)
        rest: list[int] = []
        for run in _runs(sorted(blocks[:full])):
            if len(run) * self.block_size >= MIN_RUN_TOKENS:
                self._add([row], Stretch(run[0], len(run)), None)
            else:
                rest += run
        return rest + list(blocks[full:])

    def _add(self, members: list[int], keys: Stretch, seen: Tensor | None) -> None:
        mask = None if seen is None else additive(seen, self.dtype)
        blind = None if seen is None or bool(seen.any(1).all()) else ~seen.any(1)
        level = max(self.levels[row] for row in members)
        for row in members:
            self.levels[row] = level + 1
        self.parts.append(Part(self._rows(members), keys, level, mask, blind))

    def _rows(self, members: list[int]) -> Tensor | None:
        return None if members == list(range(len(self.queries))) else torch.tensor(members)

    def tail(self, rest: list[list[int]]) -> Tail | None:
        members = [row for row, blocks in enumerate(rest) if blocks]
        if not members:
            return None
        size = self.block_size
        width = max(len(rest[row]) for row in members)
        index = torch.tensor([rest[row] + [0] * (width - len(rest[row])) for row in members])
        slots = torch.arange(width * size)
        # Slots of a row: full blocks first, then the last one up to the row's position.
        filled = [len(rest[row]) * size - (-self.ends[row] % size) for row in members]
        seen = slots < torch.tensor(filled)[:, None]
        unread = (~seen).flatten().nonzero().squeeze(1)
        if self.windowed:
            firsts = [max(self.shared[row], self.lows[row] // size) * size for row in members]
            skipped = [self.lows[row] - first for row, first in zip(members, firsts, strict=True)]
            seen &= slots >= torch.tensor(skipped)[:, None]
        level = max(self.levels[row] for row in members)
        for row in members:
            self.levels[row] = level + 1
        mask = additive(seen, self.dtype)[:, None, None]
        return Tail(self._rows(members), index.flatten(), mask, unread, level)


def plan_decode(layout: StepLayout, block_size: int, window: int | None, dtype: torch.dtype) -> DecodePlan:
    """Plan the queries of length 1; ``dtype`` is that of the scores' masks."""
    queries = [query for query in layout.queries if query.length == 1]
    places = {query.slot: row for row, query in enumerate(queries)}
    planner = _Planner(queries, block_size, window, dtype)
    for group in sorted(layout.groups, key=lambda g: g.first):
        if members := sorted(places[slot] for slot in group.slots if slot in places):
            planner.group(group, members)
    tail = planner.tail([planner.own(row) for row in range(len(queries))])
    alone = len(queries) == len(layout.slot_mapping)
    rows = None if alone else torch.tensor([query.row for query in queries])
    return DecodePlan(rows, tuple(planner.parts), tail, max(planner.levels))


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where ``seen``, -inf elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)


def _runs(blocks: list[int]) -> list[list[int]]:
    """Cut ascending ids where they are no neighbours."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and runs[-1][-1] == block - 1:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs
