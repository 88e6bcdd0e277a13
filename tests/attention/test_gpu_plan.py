"""The GPU's attention plan: every row sees each of its keys exactly once, and shared keys are read once per tile."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.attention import gpu_plan
from anaphora.attention.base import QueryRange
from anaphora.attention.gpu_plan import AttentionPlan, Tiling, plan
from anaphora.core.groups import PrefixGroups
from anaphora.types.batch import PrefixGroup

BLOCK = 16
TILING = Tiling(queries_per_kv=4, small_rows=16, large_rows=128, target_programs=33, token_bytes=4096)


def seen(step: AttentionPlan, queries: Sequence[QueryRange]) -> dict[int, list[tuple[int, int]]]:
    """The ranges of key positions of each row; checks that they lie in its own block table."""
    found: dict[int, list[tuple[int, int]]] = {int(row): [] for row in range(len(step.positions))}
    owner = {row: q for q in queries for row in range(q.row, q.row + q.length)}
    for table, begin, end, lowest, first, length, _, _ in np.concatenate((step.small_items, step.large_items)):
        rows = step.item_rows[first : first + length, 0]
        assert lowest == step.positions[rows].min()
        for row in rows.tolist():
            for position in range(begin, min(end, int(step.positions[row]) + 1), BLOCK):
                index = position // BLOCK
                assert step.tables[table + index] == owner[row].blocks[index]
            if begin < end:
                found[row].append((int(begin), int(end)))
    return found


def check(step: AttentionPlan, queries: Sequence[QueryRange]) -> None:
    for row, ranges in seen(step, queries).items():
        ranges.sort()
        assert ranges[0][0] == 0
        assert ranges[-1][1] > step.positions[row]
        assert all(before[1] == after[0] for before, after in pairwise(ranges))
    parts = []
    for items in (step.small_items, step.large_items):
        for *_, first, length, part, direct in items.tolist():
            if not direct:
                parts += (step.item_rows[first : first + length, 1] + part).tolist()
    merged = [part for _, first, count in step.merges.tolist() for part in range(first, first + count)]
    assert sorted(parts) == sorted(merged) == list(range(step.num_partials))


def reads(step: AttentionPlan) -> int:
    """Number of keys read, once per tile."""
    return sum(int(end - begin) for _, begin, end, *_ in np.concatenate((step.small_items, step.large_items)))


def make(paths: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[QueryRange]:
    """Sequences whose block tables are ``paths``; the last ``lengths`` tokens of each come with the step."""
    queries, row = [], 0
    for slot, (path, length) in enumerate(zip(paths, lengths, strict=True)):
        end = len(path) * BLOCK - slot % BLOCK
        length = min(length, end)
        queries.append(QueryRange(slot, row, length, end - length, path))
        row += length
    return queries


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(1, 40), st.sampled_from([1, 1, 1, 2, 70]))),
    st.sampled_from([1, 2**20, 2**40]),
)
def test_every_key_is_seen_once(shapes: list[tuple[int, int, int, int]], saved: int) -> None:
    heads = [list(range(1, 31)), [*range(1, 11), *range(31, 51)], list(range(51, 81))]
    fresh = iter(range(100, 10_000))
    paths = [heads[head][:shared] + [next(fresh) for _ in range(own)] for head, shared, own, _ in shapes]
    queries = make(paths, [length for *_, length in shapes])
    if not queries:
        return
    tree = PrefixGroups()
    for slot, path in enumerate(paths):
        tree.join(slot, path[:-1])
    groups = tree.groups({query.slot for query in queries if query.length == 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_plan, "MIN_SAVED_BYTES", saved)
        check(plan(queries, groups, BLOCK, TILING), queries)


def test_a_shared_prefix_is_read_once_per_tile() -> None:
    prefix = list(range(1, 145))
    queries = make([[*prefix, 1000 + slot] for slot in range(64)], [1] * 64)
    group = PrefixGroup(0, len(prefix), tuple(range(64)))
    own = sum(query.start + 1 - 144 * BLOCK for query in queries)
    assert reads(plan(queries, (group,), BLOCK, TILING)) == 2 * 144 * BLOCK + own
    assert reads(plan(queries, (), BLOCK, TILING)) == 64 * 144 * BLOCK + own


@pytest.mark.parametrize(("rows", "blocks", "shares"), [(2, 15, False), (2, 16, True), (5, 144, False), (64, 64, True)])
def test_the_cost_gate_rejects_groups_that_do_not_pay(rows: int, blocks: int, shares: bool) -> None:
    prefix = list(range(1, blocks + 1))
    queries = make([[*prefix, 1000 + slot] for slot in range(rows)], [1] * rows)
    group = PrefixGroup(0, blocks, tuple(range(rows)))
    step = plan(queries, (group,), BLOCK, TILING)
    check(step, queries)
    assert (reads(step) < reads(plan(queries, (), BLOCK, TILING))) == shares


def test_the_keys_of_a_rejected_group_go_to_the_groups_nested_in_it() -> None:
    paths = [[1, *range(10, 40), 100 + slot] if slot < 2 else [1, 200 + slot] for slot in range(3)]
    queries = make(paths, [1] * 3)
    groups = (PrefixGroup(0, 1, (0, 1, 2)), PrefixGroup(1, 31, (0, 1)))
    step = plan(queries, groups, BLOCK, TILING)
    check(step, queries)
    together = step.small_items[step.small_items[:, 5] == 2]
    assert together[:, 1].min() == 0
    assert together[:, 2].max() == 31 * BLOCK
