"""Groups of decoding slots that share blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from anaphora.core.groups import PrefixGroups

# Block tables as sequences really hold them: one block id has one predecessor.
paths = st.lists(st.integers(1, 2), max_size=6).map(
    lambda branches: [int("".join(map(str, branches[: i + 1]))) for i in range(len(branches))]
)


class Membership(RuleBasedStateMachine):
    """In whatever order slots join and leave, the groups contain exactly what is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = PrefixGroups(min_blocks=1, min_saved=1)
        self.held: dict[int, list[int]] = {}

    @rule(slot=st.integers(0, 6), path=paths)
    def join(self, slot: int, path: list[int]) -> None:
        self.leave(slot)
        self.groups.join(slot, path)
        self.held[slot] = path

    @rule(slot=st.integers(0, 6))
    def leave(self, slot: int) -> None:
        self.groups.leave(slot)
        self.held.pop(slot, None)

    @invariant()
    def groups_are_what_is_shared(self) -> None:
        shared: dict[tuple[int, int], set[int]] = {}
        for slot, path in self.held.items():
            for at, block in enumerate(path):
                shared.setdefault((at, block), set()).add(slot)
        covered: dict[tuple[int, int], set[int]] = {}
        groups = self.groups.groups(set(self.held))
        for group in groups:
            for slot in group.slots:
                for at in range(group.first, group.last):
                    covered.setdefault((at, self.held[slot][at]), set()).add(slot)
        assert covered == {key: slots for key, slots in shared.items() if len(slots) > 1}
        runs = [(g.first, g.slots) for g in groups]
        assert len(runs) == len(set(runs))

    @invariant()
    def runs_are_not_cut_without_need(self) -> None:
        groups = self.groups.groups(set(self.held))
        for a in groups:
            assert not any(b.slots == a.slots and b.first == a.last for b in groups)


TestMembership = Membership.TestCase


@given(st.dictionaries(st.integers(0, 8), paths), st.sets(st.integers(0, 8)), st.integers(1, 4), st.integers(1, 6))
def test_ranges_of_a_slot_begin_at_zero_and_leave_no_gap(
    held: dict[int, list[int]], decoding: set[int], min_blocks: int, min_saved: int
) -> None:
    groups = PrefixGroups(min_blocks, min_saved)
    for slot, path in held.items():
        groups.join(slot, path)
    reach: dict[int, int] = {}
    for group in sorted(groups.groups(decoding), key=lambda g: g.first):
        assert len(group.slots) >= 2
        assert set(group.slots) <= decoding & held.keys()
        assert group.last - group.first >= min_blocks
        assert (group.last - group.first) * (len(group.slots) - 1) >= min_saved
        for slot in group.slots:
            assert reach.get(slot, 0) == group.first
            reach[slot] = group.last


def test_short_runs_become_part_of_the_groups_below_them() -> None:
    groups = PrefixGroups(min_blocks=3, min_saved=3)
    for slot in range(2):
        groups.join(slot, [1, 2, 10, 11, 12])
    for slot in range(2, 4):
        groups.join(slot, [1, 2, 20, 21, 22])
    found = {(g.first, g.last, g.slots) for g in groups.groups({0, 1, 2, 3})}
    assert found == {(0, 5, (0, 1)), (0, 5, (2, 3))}
