"""Groups texts that differ only in a few spans into patterns, by comparing each text with the earlier ones.

::

    "You help Ann. It is 10:01. Be brief."      constants      "You help " · ". It is 10:" · ". Be brief."
    "You help Bob. It is 10:07. Be brief."      varying spans         Ann/Bob          01/07
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from zlib import crc32

MIN_CONSTANT = 6
"""Characters; a shorter constant between two varying spans is made part of one span with both."""
MIN_SHARED = 0.3
"""Share of the shorter text that two texts of a pattern must have in common."""
MIN_KEPT = 0.6
"""Share of a pattern's constant characters that a further text must have."""
MIN_SHARED_STRICT = 150
"""Characters that user messages must have in common."""
MAX_MATCHED_WORDS = 4000
_WORDS = re.compile(r"\w+|\s+|[^\w\s]")
_ANCHOR_LENGTH = 24
_MAX_COMPARED = 4
_MAX_ANCHOR_LINES = 12
_MAX_ANCHORED = 8

Span = tuple[int, int]
"""(start, end) in characters."""


def common_prefix(a: str, b: str) -> int:
    """Returns the number of characters with which both texts begin."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_suffix(a: str, b: str, limit: int) -> int:
    """Returns the number of characters, at most ``limit``, with which both texts end."""
    low, high = 0, min(len(a), len(b), limit)
    while low < high:
        middle = (low + high + 1) // 2
        if a[len(a) - middle : len(a) - low] == b[len(b) - middle : len(b) - low]:
            low = middle
        else:
            high = middle - 1
    return low


def matching(a: str, b: str) -> list[tuple[int, int, int]]:
    """Returns what two texts have in common, in order: (start in ``a``, start in ``b``, length)."""
    start = common_prefix(a, b)
    tail = common_suffix(a, b, min(len(a), len(b)) - start)
    blocks = [(0, 0, start)] if start else []
    inner_a, inner_b = a[start : len(a) - tail], b[start : len(b) - tail]
    if inner_a and inner_b:
        for i, j, n in _matching_words(inner_a, inner_b):
            blocks.append((start + i, start + j, n))
    if tail:
        blocks.append((len(a) - tail, len(b) - tail, tail))
    return blocks


def without_spaces(text: str) -> str:
    """Returns the text without its spaces and line breaks."""
    return "".join(text.split())


def _matching_ends(a: str, b: str) -> list[tuple[int, int, int]]:
    """Returns what two texts have in common at their beginnings and ends, in the form of ``matching``."""
    start = common_prefix(a, b)
    tail = common_suffix(a, b, min(len(a), len(b)) - start)
    return [(i, j, n) for i, j, n in ((0, 0, start), (len(a) - tail, len(b) - tail, tail)) if n]


def _matching_words(a: str, b: str) -> list[tuple[int, int, int]]:
    """Returns the common runs of words (of lines, in long texts), in the form of ``matching``."""
    parts_a, parts_b = _WORDS.findall(a), _WORDS.findall(b)
    if len(parts_a) * len(parts_b) > MAX_MATCHED_WORDS * 250:
        parts_a, parts_b = a.splitlines(keepends=True), b.splitlines(keepends=True)
    starts_a, starts_b = _starts(parts_a), _starts(parts_b)
    autojunk = len(parts_a) * len(parts_b) > MAX_MATCHED_WORDS * 50
    matcher = difflib.SequenceMatcher(None, parts_a, parts_b, autojunk=autojunk)
    found: list[tuple[int, int, int]] = []
    done_a = done_b = 0
    for i, j, n in matcher.get_matching_blocks():
        start, other, length = starts_a[i], starts_b[j], starts_a[i + n] - starts_a[i]
        if length < 2 * MIN_CONSTANT:
            continue
        # autojunk keeps frequent parts from starting a match; extend the match over them.
        before = common_suffix(a[done_a:start], b[done_b:other], max(len(a), len(b)))
        after = common_prefix(a[start + length :], b[other + length :])
        found.append((start - before, other - before, before + length + after))
        done_a, done_b = start + length + after, other + length + after
    return found


def _starts(parts: list[str]) -> list[int]:
    """Returns the start of each part in the joined text, and the length of that text."""
    return list(itertools.accumulate(map(len, parts), initial=0))


@dataclass(slots=True)
class Pattern:
    """Texts with the same constant parts.

    ``template`` is the text of the first member, ``constants`` are spans of it. ``members`` are their
    text numbers in log order.
    """

    template: str
    constants: list[Span]
    members: list[int] = field(default_factory=list)

    @property
    def shared(self) -> int:
        """The number of constant characters."""
        return sum(end - start for start, end in self.constants)

    def fit(self, text: str, constants: list[Span] | None = None) -> list[Span] | None:
        """Returns the varying spans of ``text`` between the constants; None if constants are missing."""
        spans: list[Span] = []
        position = 0
        chosen = self.constants if constants is None else constants
        for index, (start, end) in enumerate(chosen):
            constant = self.template[start:end]
            if start == 0:
                at = 0 if text.startswith(constant) else -1
            elif index == len(chosen) - 1 and end == len(self.template):
                at = len(text) - len(constant) if text.endswith(constant) else -1
                at = at if at >= position else -1
            else:
                at = text.find(constant, position)
            if at < 0:
                return None
            if start > 0:
                spans.append((position, at))
            position = at + len(constant)
        ends = bool(chosen) and chosen[-1][1] == len(self.template)
        if ends and position != len(text):
            return None
        return spans if ends else [*spans, (position, len(text))]

    def constants_with(self, text: str) -> list[Span] | None:
        """Returns the constants that remain if ``text`` joins; None if the texts have too little in common."""
        kept: list[Span] = []
        blocks = []
        respaced = without_spaces(self.template) == without_spaces(text)
        for i, j, n in _matching_ends(self.template, text) if respaced else matching(self.template, text):
            # Text before the template's first or behind its last character needs a varying span there.
            low, high = i + (i == 0 < j), i + n - (i + n == len(self.template) and j + n < len(text))
            blocks.append((low, high))
        for start, end in self.constants:
            for low, high in blocks:
                s, e = max(start, low), min(end, high)
                if e - s >= MIN_CONSTANT or (e > s and (s == 0 or e == len(self.template))):
                    kept.append((s, e))
        shared = sum(end - start for start, end in kept)
        least = MIN_SHARED * min(len(self.template), len(text))
        if len(self.members) > 1:
            least = max(least, MIN_KEPT * self.shared)
        if shared < max(least, 2 * MIN_CONSTANT) and not respaced:
            return None
        return None if self.fit(text, kept) is None else kept


class Patterns:
    """Groups texts of one kind into patterns.

    ``strict`` requires more in common: user messages are similar by chance.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self.patterns: list[Pattern] = []
        self._pattern_of: dict[int, int] = {}
        self._anchors: defaultdict[str, list[int]] = defaultdict(list)

    def __contains__(self, number: int) -> bool:
        return number in self._pattern_of

    def add(self, number: int, text: str, unrelated: Collection[int] = ()) -> None:
        """Adds the text with this number to the pattern that fits best, or to a new one.

        ``unrelated`` are text numbers whose patterns it must not join, such as other parts of the same message.
        """
        best = self._find(text, {self._pattern_of[other] for other in unrelated if other in self._pattern_of})
        if best is None:
            best = len(self.patterns)
            self.patterns.append(Pattern(text, [(0, len(text))]))
        self._pattern_of[number] = best
        pattern = self.patterns[best]
        pattern.members.append(number)
        if len(pattern.members) <= _MAX_ANCHORED:
            for anchor in _anchors(text):
                if best not in (known := self._anchors[anchor]):
                    known.append(best)

    def _find(self, text: str, unrelated: set[int]) -> int | None:
        """Returns the index of the pattern that ``text`` joins, whose constants it narrows; None if there is none."""
        votes: Counter[int] = Counter()
        for anchor in _anchors(text):
            votes.update(index for index in self._anchors.get(anchor, ())[-_MAX_COMPARED:] if index not in unrelated)
        candidates = [index for index, _ in votes.most_common(_MAX_COMPARED)]
        for index in candidates:
            if self.patterns[index].fit(text) is not None:
                return index
        if self._strict:
            # User messages are mostly unrelated, and comparing them takes the most time.
            candidates = [index for index in candidates if self._is_similar(index, text)]
        else:
            latest = range(max(0, len(self.patterns) - 2), len(self.patterns))
            candidates += [index for index in latest if index not in (*candidates, *unrelated)]
        best, best_shared = None, 0
        for index in candidates:
            kept = self.patterns[index].constants_with(text)
            shared = sum(e - s for s, e in kept or ())
            if kept is not None and shared > best_shared and self._is_enough(shared, text):
                best, best_shared, chosen = index, shared, kept
        if best is not None:
            self.patterns[best].constants = chosen
        return best

    def _is_similar(self, index: int, text: str) -> bool:
        template = self.patterns[index].template
        start = common_prefix(template, text)
        shared = start + common_suffix(template, text, min(len(template), len(text)) - start)
        if shared < MIN_SHARED_STRICT // 2:
            # With a clock near the beginning and a question at the end, whole lines between them are the same.
            shared = sum(map(len, set(template.split("\n")) & set(text.split("\n"))))
        return shared >= MIN_SHARED_STRICT // 2

    def _is_enough(self, shared: int, text: str) -> bool:
        return not self._strict or shared >= max(MIN_SHARED_STRICT, len(text) // 2)


def _anchors(text: str) -> set[str]:
    """Returns short texts by which similar texts are found: beginning, end, and the lines with the lowest checksums.

    Similar texts share most lines, so they mostly choose the same ones.
    """
    lines = {line[:_ANCHOR_LENGTH] for line in text.split("\n") if len(line) >= _ANCHOR_LENGTH}
    chosen = sorted(lines, key=lambda line: crc32(line.encode("utf-8", "replace")))[:_MAX_ANCHOR_LINES]
    return {text[:_ANCHOR_LENGTH], text[-_ANCHOR_LENGTH:], *chosen}
