"""Regions: the parts of a pattern's texts that would move together, with the values in them that change.

::

    "Be brief.⏎[Request 7f3a, user Ann]⏎Rules: …"
               ------------------------              moved span: the line; without it, all texts are the same
                        ----       ---               varying spans: in one line, so in one region
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from anaphora.tools.doctor.find.patterns import Pattern, Span, common_prefix, common_suffix, without_spaces
from anaphora.tools.doctor.find.value_classes import LONG_TEXT, say_the_same, widen
from anaphora.tools.doctor.read.token_store import TokenStore

LONG_LINE = 100
"""Characters on one side of a value; in a longer line only the value's sentence moves."""
MAX_MOVED = 300
"""Characters of constant text, on each side, that move with a value at most."""
MIN_AFTER_USER = 400
"""Characters of constant text that must follow a value in a user message: they are what the repair would save."""
MIN_AFTER_PROMPT = 40
"""The same in a completion's prompt, which ends with its new text."""
MAX_ENDING = 200
_SENTENCE_END = re.compile(r"[.!?。！？](?=\s|$)|\n")
MARK = re.compile(r"<[|｜][^<>|｜\s]+[|｜]>|<(?:start|end)_of_turn>|</?think>|</?s>|<</?SYS>>|\[/?INST\]")
"""What chat templates write around messages, as rendered prompts show it."""
_ANSWER_MARKS = re.compile(rf"(?:\s*(?:{MARK.pattern})\w*)+\s*$")


@dataclass(slots=True)
class Region:
    """Neighbouring varying spans of one pattern, which one repair moves together.

    ``group`` is the group of texts (``system``, ``user``, ``prompt``, ``template``, ``tool NAME``). ``moved`` and
    ``values`` map the number of each member text to the span that moves and to the span whose value is classified.
    ``kind`` is the class of the value, set when it is known. ``varying_spans`` are those in the pattern's template, and
    ``first_value`` is the value there, which replaces all others if the region is repaired in place.
    """

    pattern: Pattern
    group: str
    moved: dict[int, Span] = field(default_factory=dict)
    values: dict[int, Span] = field(default_factory=dict)
    kind: str = ""
    varying_spans: list[Span] = field(default_factory=list)
    first_value: str = ""

    def end_of(self, text: str) -> int:
        """Returns where in one of its texts that which moves to the end is inserted.

        A rendered prompt ends with the marks that open the answer, a plain one perhaps with a line such as ``Answer:``
        that all prompts end with. Both stay last.
        """
        if self.group != "prompt":
            return len(text)
        if (found := _ANSWER_MARKS.search(text, max(0, len(text) - MAX_ENDING))) is not None:
            return found.start()
        start, end = self.pattern.constants[-1]
        shared = self.pattern.template[start:end]
        line = shared.find("\n")
        if end < len(self.pattern.template) or len(shared) > MAX_ENDING or line < 0 or not text.endswith(shared):
            return len(text)
        return len(text) - len(shared) + line


def regions_of(pattern: Pattern, group: str, store: TokenStore) -> Iterator[Region]:
    """Yields the regions of a pattern; none if fewer than two of its texts still fit it."""
    fitted = {number: spans for number in pattern.members if (spans := pattern.fit(store.text(number))) is not None}
    first = pattern.members[0]
    if len(fitted) < 2 or first not in fitted:
        return
    texts = {number: store.text(number) for number in fitted}
    if len({without_spaces(text) for text in texts.values()}) == 1:
        yield _respaced(pattern, group, texts)
        return
    widened = _widened(texts, fitted)
    moved = {n: [_moved_span(texts[n], span, group) for span in of_text] for n, of_text in widened.items()}
    for neighbours in _neighbours(texts, moved, first):
        varying = [k for k in neighbours if _num_values(texts, widened, k) > 1]
        if varying:
            region = _region(pattern, group, texts, widened, moved, varying)
            least = {"user": MIN_AFTER_USER, "prompt": MIN_AFTER_PROMPT}.get(group, 0)
            if min(region.end_of(text) - region.moved[n][1] for n, text in texts.items()) >= least:
                yield region


def _num_values(texts: dict[int, str], spans: dict[int, list[Span]], k: int) -> int:
    return len({text[slice(*spans[n][k])] for n, text in texts.items()})


def _widened(texts: dict[int, str], fitted: dict[int, list[Span]]) -> dict[int, list[Span]]:
    """Widens each varying span to the whole date, id or word, unless its values differ in spelling only."""
    count = len(next(iter(fitted.values())))
    kept = {k for k in range(count) if say_the_same(list({texts[n][slice(*s[k])] for n, s in fitted.items()}))}
    return {
        n: [span if k in kept else widen(texts[n], *span) for k, span in enumerate(spans)]
        for n, spans in fitted.items()
    }


def _region(
    pattern: Pattern,
    group: str,
    texts: dict[int, str],
    spans: dict[int, list[Span]],
    moved: dict[int, list[Span]],
    varying: list[int],
) -> Region:
    """Builds the region of the varying spans with the given indices."""
    region, first = Region(pattern, group), pattern.members[0]
    main = max(varying, key=lambda k: (_num_values(texts, spans, k), -k))
    longest = max(spans[n][varying[-1]][1] - spans[n][varying[0]][0] for n in texts)
    # Many changes in a long text are one value, such as a document; else the one with most values stands for all.
    ends = (varying[0], varying[-1]) if len(varying) > 2 and longest >= LONG_TEXT else (main, main)
    for n, text in texts.items():
        start, end = min(moved[n][k][0] for k in varying), max(moved[n][k][1] for k in varying)
        whole_lines = (start == 0 or text[start - 1] == "\n") and text[end : end + 1] == "\n"
        region.moved[n] = (start, end + 1 if whole_lines else end)
        region.values[n] = (spans[n][ends[0]][0], spans[n][ends[1]][1])
    region.varying_spans = [spans[first][k] for k in varying]
    region.first_value = texts[first][slice(*region.values[first])]
    return region


def _respaced(pattern: Pattern, group: str, texts: dict[int, str]) -> Region:
    """Builds one region, from the first difference to the last, of texts that differ in spaces and line breaks only."""
    shortest = min(texts.values(), key=len)
    start = min(common_prefix(shortest, text) for text in texts.values())
    end = min(common_suffix(shortest, text, len(shortest) - start) for text in texts.values())
    region = Region(pattern, group)
    region.moved = region.values = {n: (start, len(text) - end) for n, text in texts.items()}
    region.varying_spans = [region.values[pattern.members[0]]]
    region.first_value = texts[pattern.members[0]][slice(*region.varying_spans[0])]
    return region


def _moved_span(text: str, span: Span, group: str) -> Span:
    """Returns the line of a value, or its sentence if the line is long: what can move without changing what it says."""
    start, end = span
    if group.startswith("tool "):
        return span
    low = text.rfind("\n", 0, start) + 1
    high = text.find("\n", end)
    high = len(text) if high < 0 else high
    if start - low > LONG_LINE or high - end > LONG_LINE or (high - low == len(text)):
        for match in _SENTENCE_END.finditer(text, low, start):
            low = match.end()
        low = _skip_spaces(text, low, start)
        if (after := _SENTENCE_END.search(text, end, high)) is not None:
            high = after.end()
    if group == "prompt":
        for match in MARK.finditer(text, low, start):
            low = match.end()
        low = _skip_spaces(text, low, start)
        if (mark := MARK.search(text, end, high)) is not None:
            high = mark.start()
    return span if start - low > MAX_MOVED or high - end > MAX_MOVED else (low, high)


def _skip_spaces(text: str, at: int, end: int) -> int:
    while at < end and text[at].isspace():
        at += 1
    return at


def _neighbours(texts: dict[int, str], moved: dict[int, list[Span]], first: int) -> list[list[int]]:
    """Groups the indices of varying spans whose moved spans touch, or have only spaces between them, in any text."""
    groups: list[list[int]] = []
    for k in range(len(moved[first])):
        touches = groups and any(
            moved[n][k][0] <= moved[n][groups[-1][-1]][1]
            or not texts[n][moved[n][groups[-1][-1]][1] : moved[n][k][0]].strip()
            for n in texts
        )
        if touches:
            groups[-1].append(k)
        else:
            groups.append([k])
    return groups
