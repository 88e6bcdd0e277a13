"""Which keys the decode rows of a step attend to together and which each alone: the plan of the CPU backend.

Keys carry their positions already, so the order in which they are read means nothing::

    row 0  ├──────── part 0 ────────┤├─ part 1 ─┤├ segment ┤
    row 1  ├──────── part 0 ────────┤├─ part 1 ─┤├─ segment ─┤├ segment ┤
    row 2  ├──────── part 0 ────────┤├─ segment ─┤
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anaphora.attention.base import QueryRange, StepLayout
from anaphora.types import PrefixGroup

SEGMENT_TOKENS = 256
"""Own keys of a row that one thread goes through; more are cut."""


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
    """Rows (their places in the batch; None: all of the batch) that attend to the same full blocks.

    ``mask`` ``[rows, tokens]`` is added to the scores (-inf where a row may not look), ``blind`` ``[rows]`` is True for
    rows that see nothing of it.
    """

    rows: Tensor | None
    keys: Stretch
    mask: Tensor | None = None
    blind: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DecodePlan:
    """All that a step's decode rows attend to: shared ``parts``, and int32 arrays for the kernel ``attend_own``.

    ``segments`` ``[N, 3]``: row, its first key, the key behind its last. ``rows`` ``[R, 6]``: place in the batch, start
    of its table in ``tables``, its range of segments, its range of shares. ``shares`` ``[S, 2]``: part, row in it.
    """

    parts: tuple[Part, ...]
    segments: NDArray[np.int32]
    rows: NDArray[np.int32]
    tables: NDArray[np.int32]
    shares: NDArray[np.int32]


class _Planner:
    def __init__(self, queries: Sequence[QueryRange], block_size: int, window: int | None, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.queries = queries
        self.block_size = block_size
        self.ends = [q.start + 1 for q in queries]
        self.lows = [max(0, end - window) if window else 0 for end in self.ends]
        self.shared = [0] * len(queries)  # blocks of each row that a group covers
        self.shares: list[list[tuple[int, int]]] = [[] for _ in queries]
        self.parts: list[Part] = []

    def group(self, group: PrefixGroup, members: list[int], whole: bool) -> None:
        """The group's blocks for its rows, from the first that any window reaches; ``whole``: they are the batch."""
        size = self.block_size
        for row in members:
            self.shared[row] = group.last
        first = max(group.first, min(self.lows[row] for row in members) // size)
        if first >= group.last:
            return
        mask = blind = None
        if any(self.lows[row] > first * size for row in members):
            lows = torch.tensor([self.lows[row] for row in members])
            seen = torch.arange(first * size, group.last * size) >= lows[:, None]
            mask, blind = additive(seen, self.dtype), ~seen.any(1)
        for index, row in enumerate(members):
            self.shares[row].append((len(self.parts), index))
        places = None if whole else torch.tensor([self.queries[row].row for row in members])
        keys = Stretch.of(self.queries[members[0]].blocks[first : group.last])
        self.parts.append(Part(places, keys, mask, blind))

    def finish(self) -> DecodePlan:
        """What the rows have alone, cut into segments."""
        rows, segments, tables, start, shares = [], [], [], 0, 0
        for row, query in enumerate(self.queries):
            end, blocks = self.ends[row], -(-self.ends[row] // self.block_size)
            begin = max(self.lows[row], self.shared[row] * self.block_size)
            cuts = [*range(begin, end, SEGMENT_TOKENS), end]
            own = (len(segments), len(segments) + len(cuts) - 1)
            rows.append((query.row, start, *own, shares, shares + len(self.shares[row])))
            segments += [(row, a, b) for a, b in pairwise(cuts)]
            tables.append(np.array(query.blocks, np.int32)[:blocks])
            start += blocks
            shares += len(self.shares[row])
        return DecodePlan(
            tuple(self.parts),
            np.array(segments, np.int32),
            np.array(rows, np.int32),
            np.concatenate(tables),
            np.array([share for row in self.shares for share in row], np.int32),
        )


def plan_decode(layout: StepLayout, block_size: int, window: int | None, dtype: torch.dtype) -> DecodePlan:
    """Plan the queries of length 1, of which there is one at least; ``dtype`` is that of the scores' masks.

    A group never reaches a row's last block, so every row has keys of its own.
    """
    queries = [query for query in layout.queries if query.length == 1]
    places = {query.slot: row for row, query in enumerate(queries)}
    planner = _Planner(queries, block_size, window, dtype)
    for group in sorted(layout.groups, key=lambda g: g.first):
        if members := sorted(places[slot] for slot in group.slots if slot in places):
            planner.group(group, members, len(members) == len(layout.slot_mapping))
    return planner.finish()


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where ``seen``, -inf elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)
