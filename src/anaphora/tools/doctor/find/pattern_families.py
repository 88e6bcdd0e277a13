"""Splits a pattern whose texts are of a few kinds that happen to share a part."""

from __future__ import annotations

import re
from collections import defaultdict

from anaphora.tools.doctor.find.patterns import Pattern, Patterns
from anaphora.tools.doctor.find.value_classes import LONG_TEXT, are_times, say_the_same
from anaphora.tools.doctor.read.token_store import TokenStore

SHAPE_LENGTH = 10
MAX_VARYING_SPANS = 3
MAX_FAMILIES = 4
MIN_IN_FAMILIES = 0.8
"""Share of a pattern's texts that must be in families of several members before the pattern is split."""
MIN_MORE_SHARED = 6
"""Characters more that the texts of each family must have in common than those of the whole pattern."""


def split_into_families(pattern: Pattern, store: TokenStore) -> list[Pattern]:
    """Returns the pattern, or the families that it consists of.

    Two applications with the same rules, one with a clock before them and one with an id, are two families. A text that
    lacks the part that changes in all others is left out.
    """
    by_shape: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for number in pattern.members:
        text = store.text(number)
        spans = pattern.fit(text) or []
        by_shape[tuple(_shape(text[start:end]) for start, end in spans)].append(number)
    first = [value[0] for value in by_shape if value]
    if len(first) > 1 and (say_the_same(first) or are_times(first)):
        return [pattern]
    several = [members for members in by_shape.values() if len(members) > 2]
    if pattern.shared < len(pattern.template) - LONG_TEXT or max(map(len, by_shape)) > MAX_VARYING_SPANS:
        return [pattern]  # documents; some begin with the same words
    enough = sum(map(len, several)) >= MIN_IN_FAMILIES * len(pattern.members)
    if len(by_shape) < 2 or not 1 <= len(several) <= MAX_FAMILIES or not enough:
        return [pattern]
    families = []
    for members in several:
        patterns = Patterns()
        for number in members:
            patterns.add(number, store.text(number))
        families += [family for family in patterns.patterns if len(family.members) > 1]
    more = min((family.shared for family in families), default=0) - pattern.shared
    return families if more >= MIN_MORE_SHARED else [pattern]


def _shape(value: str) -> str:
    return re.sub(r"\d+", "0", value.strip())[:SHAPE_LENGTH]
