"""Groups decoding sequences by the blocks that they share: a radix tree over their block tables.

::

    slots 0 1 2 3 4 5      blocks 1..40 shared by all        ─┬─ blocks 41..60 shared by 0 1 2
                                                              └─ blocks 61..70 shared by 3 4

A node is a run of block-table entries that the same slots share. Joining or leaving touches only the nodes on one
path; the groups of a step are read from the tree and cached until a slot joins or leaves.
"""

from __future__ import annotations

from collections.abc import Sequence

from anaphora.types.batch import PrefixGroup


class _Node:
    """Entries ``first`` to ``first + len(run) - 1`` of the block tables of ``slots``."""

    __slots__ = ("children", "first", "run", "slots")

    def __init__(self, first: int, run: list[int], slots: set[int]) -> None:
        self.first = first
        self.run = run
        self.slots = slots
        self.children: dict[int, _Node] = {}

    def split(self, at: int) -> None:
        """Cut the run after ``at`` entries; the rest becomes the only child."""
        rest = _Node(self.first + at, self.run[at:], set(self.slots))
        rest.children = self.children
        self.run = self.run[:at]
        self.children = {rest.run[0]: rest}

    def merge(self) -> None:
        """Merge this run with its only child, which all of its slots are in: undoes a split."""
        if len(self.children) == 1:
            (child,) = self.children.values()
            if len(child.slots) == len(self.slots):
                self.run += child.run
                self.children = child.children


class PrefixGroups:
    """The decoding slots, grouped by shared leading blocks for attention that reads them once per step.

    A run of shared entries becomes a group if it has at least ``min_blocks`` entries and saves at least ``min_saved``
    block reads per step (entries times members less one); a shorter run becomes part of the groups below it.
    """

    def __init__(self, min_blocks: int = 4, min_saved: int = 8) -> None:
        self.min_blocks = min_blocks
        self.min_saved = min_saved
        self._root = _Node(0, [], set())
        self._paths: dict[int, list[int]] = {}
        self._groups: tuple[PrefixGroup, ...] | None = ()

    def join(self, slot: int, blocks: Sequence[int]) -> None:
        """Add a slot that starts to decode. Its block table begins with ``blocks``, which never change."""
        self._paths[slot] = path = list(blocks)
        self._groups = None
        node = self._root
        node.slots.add(slot)
        at = 0
        while at < len(path):
            child = node.children.get(path[at])
            if child is None:
                node.children[path[at]] = _Node(at, path[at:], {slot})
                return
            same = 0
            while same < len(child.run) and at + same < len(path) and child.run[same] == path[at + same]:
                same += 1
            if same < len(child.run):
                child.split(same)
            child.slots.add(slot)
            at += same
            node = child

    def leave(self, slot: int) -> None:
        """Remove a slot whose sequence ended or is preempted. Does nothing if the slot was never added."""
        path = self._paths.pop(slot, None)
        if path is None:
            return
        self._groups = None
        node = self._root
        node.slots.discard(slot)
        passed: list[_Node] = []
        at = 0
        while at < len(path):
            child = node.children[path[at]]
            child.slots.discard(slot)
            if not child.slots:
                del node.children[path[at]]
                break
            at += len(child.run)
            passed.append(child)
            node = child
        for node in reversed(passed):
            node.merge()

    def groups(self, decoding: set[int]) -> tuple[PrefixGroup, ...]:
        """Return the groups among the slots that decode in this step; each has at least two members."""
        if decoding != self._paths.keys():
            return self._read(decoding)
        if self._groups is None:
            self._groups = self._read(decoding)
        return self._groups

    def _read(self, decoding: set[int]) -> tuple[PrefixGroup, ...]:
        groups: list[PrefixGroup] = []
        stack = [(child, 0) for child in self._root.children.values()]
        while stack:
            node, first = stack.pop()
            members = sorted(node.slots & decoding)
            if len(members) < 2:
                continue
            last = node.first + len(node.run)
            if last - first >= self.min_blocks and (last - first) * (len(members) - 1) >= self.min_saved:
                groups.append(PrefixGroup(first, last, tuple(members)))
                first = last
            stack += [(child, first) for child in node.children.values()]
        return tuple(groups)
