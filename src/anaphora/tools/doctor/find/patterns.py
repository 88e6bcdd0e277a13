"""Texts that are the same but for a few places: found by comparing them, one after the other.

::

    "You help Ann. It is 10:01. Be brief."      constants  "You help " · ". It is 10:" · ". Be brief."
    "You help Bob. It is 10:07. Be brief."      slots             Ann/Bob          01/07
"""

from __future__ import annotations

import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from zlib import crc32

SHORTEST_CONSTANT = 6
"""Characters between two slots; what is shorter belongs to one slot with both."""
LEAST_SHARED = 0.3
LEAST_KEPT = 0.6
STRICT_SHARED = 150
MATCHED_WORDS = 4000
_WORDS = re.compile(r"\w+|\s+|[^\w\s]")
_ANCHOR = 24
_TRIED = 4
_LINES = 12

Span = tuple[int, int]


def common_prefix(a: str, b: str) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_suffix(a: str, b: str, limit: int) -> int:
    low, high = 0, min(len(a), len(b), limit)
    while low < high:
        middle = (low + high + 1) // 2
        if a[len(a) - middle : len(a) - low] == b[len(b) - middle : len(b) - low]:
            low = middle
        else:
            high = middle - 1
    return low


def matching(a: str, b: str) -> list[tuple[int, int, int]]:
    """What two texts have in common, in order: (place in ``a``, place in ``b``, length)."""
    start = common_prefix(a, b)
    tail = common_suffix(a, b, min(len(a), len(b)) - start)
    blocks = [(0, 0, start)] if start else []
    inner_a, inner_b = a[start : len(a) - tail], b[start : len(b) - tail]
    if inner_a and inner_b:
        for i, j, n in _inner(inner_a, inner_b):
            blocks.append((start + i, start + j, n))
    if tail:
        blocks.append((len(a) - tail, len(b) - tail, tail))
    return blocks


def squeezed(text: str) -> str:
    """The text without its spaces and line breaks."""
    return "".join(text.split())


def _ends(a: str, b: str) -> list[tuple[int, int, int]]:
    """What two texts have in common at their beginnings and ends, as ``matching`` gives it."""
    start = common_prefix(a, b)
    tail = common_suffix(a, b, min(len(a), len(b)) - start)
    return [(i, j, n) for i, j, n in ((0, 0, start), (len(a) - tail, len(b) - tail, tail)) if n]


def _inner(a: str, b: str) -> list[tuple[int, int, int]]:
    parts_a, parts_b = _WORDS.findall(a), _WORDS.findall(b)
    if len(parts_a) * len(parts_b) > MATCHED_WORDS * 250:
        parts_a, parts_b = a.splitlines(keepends=True), b.splitlines(keepends=True)
    places_a, places_b = _places(parts_a), _places(parts_b)
    matcher = difflib.SequenceMatcher(None, parts_a, parts_b, autojunk=len(parts_a) * len(parts_b) > MATCHED_WORDS * 50)
    found: list[tuple[int, int, int]] = []
    done_a = done_b = 0
    for i, j, n in matcher.get_matching_blocks():
        start, other, length = places_a[i], places_b[j], places_a[i + n] - places_a[i]
        if length < 2 * SHORTEST_CONSTANT:
            continue
        # Parts that are frequent begin no match of their own; a match may go on over them.
        before = common_suffix(a[done_a:start], b[done_b:other], max(len(a), len(b)))
        after = common_prefix(a[start + length :], b[other + length :])
        found.append((start - before, other - before, before + length + after))
        done_a, done_b = start + length + after, other + length + after
    return found


def _places(parts: list[str]) -> list[int]:
    places = [0]
    for part in parts:
        places.append(places[-1] + len(part))
    return places


@dataclass(slots=True)
class Pattern:
    """``constants`` are spans of ``model``, the first member's text; ``members`` the numbers of texts, in log order."""

    model: str
    constants: list[Span]
    members: list[int] = field(default_factory=list)

    @property
    def shared(self) -> int:
        return sum(end - start for start, end in self.constants)

    def fit(self, text: str, constants: list[Span] | None = None) -> list[Span] | None:
        """Where the slots are in ``text``; None where it is not of this pattern."""
        spans: list[Span] = []
        place = 0
        chosen = self.constants if constants is None else constants
        for index, (start, end) in enumerate(chosen):
            constant = self.model[start:end]
            if start == 0:
                at = 0 if text.startswith(constant) else -1
            elif index == len(chosen) - 1 and end == len(self.model):
                at = len(text) - len(constant) if text.endswith(constant) else -1
                at = at if at >= place else -1
            else:
                at = text.find(constant, place)
            if at < 0:
                return None
            if start > 0:
                spans.append((place, at))
            place = at + len(constant)
        ends = bool(chosen) and chosen[-1][1] == len(self.model)
        if ends and place != len(text):
            return None
        return spans if ends else [*spans, (place, len(text))]

    def narrowed(self, text: str) -> list[Span] | None:
        """The constants that ``text`` has as well; None where the two have too little in common."""
        kept: list[Span] = []
        blocks = []
        respaced = squeezed(self.model) == squeezed(text)
        for i, j, n in _ends(self.model, text) if respaced else matching(self.model, text):
            # What the text has before the model's first or behind its last character needs a slot there.
            low, high = i + (i == 0 < j), i + n - (i + n == len(self.model) and j + n < len(text))
            blocks.append((low, high))
        for start, end in self.constants:
            for low, high in blocks:
                s, e = max(start, low), min(end, high)
                if e - s >= SHORTEST_CONSTANT or (e > s and (s == 0 or e == len(self.model))):
                    kept.append((s, e))
        shared = sum(end - start for start, end in kept)
        least = LEAST_SHARED * min(len(self.model), len(text))
        if len(self.members) > 1:
            least = max(least, LEAST_KEPT * self.shared)
        little = shared < max(least, 2 * SHORTEST_CONSTANT) and not respaced
        if little or self.fit(text, kept) is None:
            return None
        return kept


class Patterns:
    """Gathers texts of one kind into patterns; ``strict`` asks for more in common, as users write alike by chance."""

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self.patterns: list[Pattern] = []
        self._of: dict[int, int] = {}
        self._anchors: defaultdict[str, list[int]] = defaultdict(list)

    def knows(self, number: int) -> bool:
        return number in self._of

    def add(self, number: int, text: str, apart: Collection[int] = ()) -> None:
        """``apart`` has texts that are no relatives, such as other parts of the same message."""
        best = self._find(text, {self._of[other] for other in apart if other in self._of})
        if best is None:
            best = len(self.patterns)
            self.patterns.append(Pattern(text, [(0, len(text))]))
        self._of[number] = best
        pattern = self.patterns[best]
        pattern.members.append(number)
        if len(pattern.members) <= 8:
            for anchor in _anchors(text):
                if best not in (known := self._anchors[anchor]):
                    known.append(best)

    def _find(self, text: str, apart: set[int]) -> int | None:
        votes: Counter[int] = Counter()
        for anchor in _anchors(text):
            votes.update(index for index in self._anchors.get(anchor, ())[-_TRIED:] if index not in apart)
        tried = [index for index, _ in votes.most_common(_TRIED)]
        for index in tried:
            if self.patterns[index].fit(text) is not None:
                return index
        if self._strict:
            # What users write is mostly unrelated, and comparing it is the dearest part.
            tried = [index for index in tried if self._alike(index, text)]
        else:
            tried += [i for i in range(max(0, len(self.patterns) - 2), len(self.patterns)) if i not in (*tried, *apart)]
        best, best_shared = None, 0
        for index in tried:
            kept = self.patterns[index].narrowed(text)
            shared = sum(e - s for s, e in kept or ())
            if kept is not None and shared > best_shared and self._enough(shared, text):
                best, best_shared, chosen = index, shared, kept
        if best is not None:
            self.patterns[best].constants = chosen
        return best

    def _alike(self, index: int, text: str) -> bool:
        model = self.patterns[index].model
        start = common_prefix(model, text)
        shared = start + common_suffix(model, text, min(len(model), len(text)) - start)
        if shared < STRICT_SHARED // 2:
            # A clock near the beginning and a question at the end leave whole lines between them the same.
            shared = sum(map(len, set(model.split("\n")) & set(text.split("\n"))))
        return shared >= STRICT_SHARED // 2

    def _enough(self, shared: int, text: str) -> bool:
        return not self._strict or shared >= max(STRICT_SHARED, len(text) // 2)


def _anchors(text: str) -> set[str]:
    """Short texts by which likely relatives are found: beginning, end, and lines that relatives would choose too."""
    lines = {line[:_ANCHOR] for line in text.split("\n") if len(line) >= _ANCHOR}
    chosen = sorted(lines, key=lambda line: crc32(line.encode("utf-8", "replace")))[:_LINES]
    return {text[:_ANCHOR], text[-_ANCHOR:], *chosen}
