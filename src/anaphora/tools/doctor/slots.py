"""Changing parts inside texts that are otherwise the same: clocks, ids, names, retrieved documents."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from anaphora.text.outline import TOOLS
from anaphora.tools.doctor.findings import Finding, Repair, around, shown
from anaphora.tools.doctor.load import Log
from anaphora.tools.doctor.patterns import Pattern, Patterns, Span
from anaphora.tools.doctor.prompts import Prompt, Run, Segment
from anaphora.tools.doctor.store import Store
from anaphora.tools.doctor.values import LONG_TEXT, Verdict, classify, spelt_alike, widen
from anaphora.tools.doctor.variation import Occurrence

LONG_LINE = 100
"""Characters beside a value beyond which only its sentence moves, not its line."""
LONGEST_UNIT = 300
"""Characters of constant text that move with a value at most."""
LEAST_AFTER = 400
"""Characters of constant text that must follow in a user's message: what follows is the reason to mend it."""
SHAPE_LENGTH = 10
PARTED_SLOTS = 3
MOST_FAMILIES = 4
SAME_KIND = 0.8
"""Share of a pattern's texts that must be of kinds with several members before the pattern is parted."""
LEAST_APART = 6
"""Characters more that the texts of each kind must have in common than those of all kinds."""
_SENTENCE_END = re.compile(r"[.!?。！？](?=\s|$)|\n")
_IN_PLACE = {
    "key_order": "write the keys in one order",
    "whitespace": "write the same spaces and line breaks each time",
    "double_bos": "write the BOS token once, in the template or in the prompt, not in both",
}
_KNOWN = (
    (
        re.compile("x-anthropic-billing-header"),
        "this is Claude Code's billing line: set CLAUDE_CODE_ATTRIBUTION_HEADER=0 in its environment to stop it",
    ),
)
"""Lines that well-known clients write, and the switch that stops them."""
_FIRST_ADVICE = {
    "clock_time": "give the model a tool that tells the time, or ",
    "date": "write it where it is needed only: ",
}
_NOT_IN_PROMPT = ("request_id", "session_id", "hash", "counter")

Edges = tuple[int, int]


@dataclass(slots=True)
class Region:
    """Slots of one pattern that lie in the same or neighbouring lines: they are mended together.

    ``units`` has for each member text the span that moves, ``values`` the span of the main slot's value.
    """

    pattern: Pattern
    slots: list[int]
    group: str
    units: dict[int, Span] = field(default_factory=dict)
    values: dict[int, Span] = field(default_factory=dict)
    first: str = ""
    """The value in the first member, which takes the place of all others where a slot is mended in place."""


@dataclass(slots=True)
class SlotMoves:
    """All moves of regions in one log, applied together. ``moves`` maps a region's index to where it goes."""

    store: Store
    regions: list[Region]
    of_text: dict[int, list[int]]
    moves: dict[int, str] = field(default_factory=dict)
    all_system: bool = False
    """All that changes in system texts goes to the end of the last user message."""
    _known: dict[int, tuple[int, str]] = field(default_factory=dict)

    def reset(self) -> None:
        self._known.clear()

    def switch(self, region: int, where: str, on: bool) -> None:
        """``where``: ``user`` (end of the last user message), ``tail`` (of the same text), ``first`` (in place)."""
        if on:
            self.moves[region] = where
        else:
            self.moves.pop(region, None)

    def apply(self, prompt: Prompt, runs: list[Run]) -> list[Run]:
        changed: list[Run] | None = None
        late = ""
        for index, (owner, text) in enumerate(runs):
            if owner < 0 or text != (original := prompt.segments[owner].text) or original not in self.of_text:
                continue
            mended, moved = self.mended(original)
            if mended != text or moved:
                changed = list(runs) if changed is None else changed
                changed[index] = owner, mended
                late += moved
        if changed is None:
            return runs
        return self._appended(prompt, changed, late) if late else changed

    def mended(self, number: int) -> tuple[int, str]:
        """The number of a text without what moves, and what goes to the end of the last user message."""
        if number not in self._known:
            chosen = {i: where for i in self.of_text[number] if (where := self._where(i)) is not None}
            wanted = list(chosen)
            text, tail, late = self.store.text(number), "", ""
            for index in sorted(wanted, key=lambda i: self.regions[i].units[number], reverse=True):
                region, where = self.regions[index], chosen[index]
                start, end = region.values[number] if where == "first" else region.units[number]
                unit = text[start:end].strip("\n")
                if where == "first":
                    text = text[:start] + region.first + text[end:]
                    continue
                text = text[:start] + text[end:]
                if where == "tail":
                    tail = f"{unit}\n{tail}" if tail else unit
                else:
                    late = f"\n{unit}{late}"
            if tail:
                text += tail if text.endswith("\n") or not text else f"\n{tail}"
            self._known[number] = (self.store.intern(text) if wanted else number), late
        return self._known[number]

    def _where(self, region: int) -> str | None:
        return self.moves.get(region) or (
            "user" if self.all_system and self.regions[region].group == "system" else None
        )

    def _appended(self, prompt: Prompt, runs: list[Run], late: str) -> list[Run]:
        """The moved text at the end of the last user message; of a completion, at the end of the prompt."""
        for index in range(len(runs) - 1, -1, -1):
            owner, text = runs[index]
            if owner >= 0 and prompt.segments[owner].role in ("user", "prompt"):
                runs[index] = owner, self.store.intern(f"{self.store.text(text)}\n{late}")
                return runs
        runs.append((-1, self.store.intern(late)))
        return runs


def _group(prompt: Prompt, segment: Segment, store: Store) -> str | None:
    """Texts of which group a segment is compared with; None where it is no text of the application's."""
    if segment.kind == "prompt":
        return "prompt"
    if segment.kind == "tool":
        match = re.search(r'"name": "([^"]+)"', store.text(segment.text))
        return f"tool {match[1]}" if match else None
    if segment.kind != "content":
        return None
    if segment.role in ("system", "developer"):
        return "system"
    return "user" if segment.role == "user" else None


def find(log: Log, conversations: Sequence[int]) -> tuple[list[Finding], SlotMoves]:
    """Every changing part, with its class and its repairs."""
    groups: dict[str, Patterns] = {}
    for prompt in log.prompts:
        for segment in prompt.segments:
            if (name := _group(prompt, segment, log.store)) is not None:
                patterns = groups.get(name)
                if patterns is None:
                    patterns = groups[name] = Patterns(strict=name == "user")
                if not patterns.knows(segment.text):
                    patterns.add(segment.text, log.store.text(segment.text))
    regions = [
        region
        for name, patterns in groups.items()
        for wide in patterns.patterns
        if len(wide.members) > 1
        for pattern in _families(wide, log.store)
        for region in _regions(pattern, name, log.store)
    ]
    of_text: dict[int, list[int]] = defaultdict(list)
    for index, region in enumerate(regions):
        for number in region.units:
            of_text[number].append(index)
    moves = SlotMoves(log.store, regions, dict(of_text))
    places = _places(log.prompts, of_text)
    findings = [
        finding
        for index, region in enumerate(regions)
        if (finding := _finding(index, region, moves, places, log, conversations)) is not None
    ]
    return findings, moves


Place = tuple[Prompt, Segment]


def _places(prompts: Sequence[Prompt], of_text: dict[int, list[int]]) -> dict[int, list[Place]]:
    """Where the texts of each region stand, in log order, one place a request."""
    places: dict[int, list[Place]] = defaultdict(list)
    for prompt in prompts:
        for segment in prompt.segments:
            for region in of_text.get(segment.text, ()):
                if not places[region] or places[region][-1][0] is not prompt:
                    places[region].append((prompt, segment))
    return places


def _families(pattern: Pattern, store: Store) -> list[Pattern]:
    """The pattern, or several in its place where its texts are of a few kinds that happen to share a part.

    Two applications with the same rules, one with a clock before them and one with an id, are two families.
    """
    kinds: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for number in pattern.members:
        text = store.text(number)
        spans = pattern.fit(text) or []
        kinds[tuple(_shape(text[start:end]) for start, end in spans)].append(number)
    first = [value[0] for value in kinds if value]
    if len(first) > 1 and spelt_alike(first):
        return [pattern]
    several = [members for members in kinds.values() if len(members) > 2]
    if pattern.shared < len(pattern.model) - LONG_TEXT or max(map(len, kinds)) > PARTED_SLOTS:
        return [pattern]  # documents, of which some begin alike
    if not 2 <= len(several) <= MOST_FAMILIES or sum(map(len, several)) < SAME_KIND * len(pattern.members):
        return [pattern]
    families = []
    for members in several:
        patterns = Patterns()
        for number in members:
            patterns.add(number, store.text(number))
        families += [family for family in patterns.patterns if len(family.members) > 1]
    apart = min((family.shared for family in families), default=0) - pattern.shared >= LEAST_APART
    return families if apart else [pattern]


def _shape(value: str) -> str:
    return re.sub(r"\d+", "0", value.strip())[:SHAPE_LENGTH]


# --- Regions ---------------------------------------------------------------------------------------------------------


def _regions(pattern: Pattern, group: str, store: Store) -> Iterator[Region]:
    fitted = {number: spans for number in pattern.members if (spans := pattern.fit(store.text(number))) is not None}
    model = pattern.members[0]
    if len(fitted) < 2 or model not in fitted:
        return
    texts = {number: store.text(number) for number in fitted}
    as_they_are = {
        k for k in range(len(fitted[model])) if spelt_alike(list({texts[n][slice(*s[k])] for n, s in fitted.items()}))
    }
    wide = {
        n: [span if k in as_they_are else widen(texts[n], *span) for k, span in enumerate(spans)]
        for n, spans in fitted.items()
    }
    units = {n: [_unit(texts[n], *span, group) for span in spans] for n, spans in wide.items()}
    for slots in _neighbours(texts, units, model):
        slots = [k for k in slots if len({texts[n][slice(*wide[n][k])] for n in fitted}) > 1]
        if not slots:
            continue
        main = max(slots, key=lambda k: (len({texts[n][slice(*wide[n][k])] for n in fitted}), -k))
        span = max(wide[n][slots[-1]][1] - wide[n][slots[0]][0] for n in fitted)
        ends = (slots[0], slots[-1]) if len(slots) > 2 and span >= LONG_TEXT else (main, main)
        region = Region(pattern, slots, group)
        for n, text in texts.items():
            start, end = min(units[n][k][0] for k in slots), max(units[n][k][1] for k in slots)
            whole_lines = (start == 0 or text[start - 1] == "\n") and text[end : end + 1] == "\n"
            region.units[n] = (start, end + 1 if whole_lines else end)
            region.values[n] = (wide[n][ends[0]][0], wide[n][ends[1]][1])
        region.first = texts[model][slice(*region.values[model])]
        if group == "user" and min(len(t) - region.units[n][1] for n, t in texts.items()) < LEAST_AFTER:
            continue
        yield region


def _unit(text: str, start: int, end: int, group: str) -> Span:
    """The line of a value, or the sentence where the line is long: what can move without changing what it says."""
    if group.startswith("tool "):
        return start, end
    low = text.rfind("\n", 0, start) + 1
    high = text.find("\n", end)
    high = len(text) if high < 0 else high
    if start - low > LONG_LINE or high - end > LONG_LINE or (high - low == len(text)):
        for match in _SENTENCE_END.finditer(text, low, start):
            low = match.end()
        while low < start and text[low].isspace():
            low += 1
        if (after := _SENTENCE_END.search(text, end, high)) is not None:
            high = after.end()
    if start - low > LONGEST_UNIT or high - end > LONGEST_UNIT:
        return start, end
    return low, high


def _neighbours(texts: dict[int, str], units: dict[int, list[Span]], model: int) -> list[list[int]]:
    """Slots whose units touch in any member, gathered."""
    groups: list[list[int]] = []
    for k in range(len(units[model])):
        touches = groups and any(
            units[n][k][0] <= units[n][groups[-1][-1]][1]
            or not texts[n][units[n][groups[-1][-1]][1] : units[n][k][0]].strip()
            for n in texts
        )
        if touches:
            groups[-1].append(k)
        else:
            groups.append([k])
    return groups


# --- Findings --------------------------------------------------------------------------------------------------------


def _finding(
    index: int,
    region: Region,
    moves: SlotMoves,
    places: dict[int, list[Place]],
    log: Log,
    conversations: Sequence[int],
) -> Finding | None:
    occurrences, changed = [], []
    before: str | None = None
    for prompt, segment in places[index]:
        value = log.store.text(segment.text)[slice(*region.values[segment.text])]
        occurrences.append(Occurrence(prompt.number, conversations[prompt.number], prompt.time, value))
        if before is not None and value != before:
            changed.append((prompt, segment))
        before = value
    if not changed:
        return None
    prompt, segment = changed[0]
    text = log.store.text(segment.text)
    start, end = region.values[segment.text]
    verdict = classify(occurrences, text[max(0, text.rfind("\n", 0, start), start - 40) : start])
    values = list(dict.fromkeys(occurrence.value for occurrence in occurrences))
    return Finding(
        kind=verdict.kind,
        status="confirmed",
        message=segment.message,
        role=segment.role,
        path=segment.path,
        start=segment.offset + start,
        end=segment.offset + end,
        samples=shown(values),
        repairs=_repairs(index, region, moves, verdict, segment),
        seen=len(changed),
        line=prompt.line,
        varies=verdict.varies,
        context=around(text, start, end),
        note=next((advice for pattern, advice in _KNOWN if pattern.search(text, max(0, start - 200), end)), ""),
    )


def _repairs(index: int, region: Region, moves: SlotMoves, verdict: Verdict, segment: Segment) -> list[Repair]:
    if verdict.kind in _IN_PLACE:
        return [Repair("same place", _IN_PLACE[verdict.kind], partial(moves.switch, index, "first"))]
    what = "take it out of the prompt; if the model needs it, " if verdict.kind in _NOT_IN_PROMPT else ""
    what = what or _FIRST_ADVICE.get(verdict.kind, "")
    if segment.message == TOOLS:
        end = f"{what}keep it out of the tool's description and write it at the end of the last user message"
        return [Repair("end of the last user message", end, partial(moves.switch, index, "user"), rewrites=False)]
    if region.group in ("user", "prompt"):
        return [
            Repair(
                "end of the same text", f"{what}put it behind the constant text", partial(moves.switch, index, "tail")
            )
        ]
    return [
        Repair(
            "end of the last user message",
            f"{what}move its line to the end of the last user message",
            partial(moves.switch, index, "user"),
        ),
        Repair(
            "tail of the system text",
            f"{what}move its line to the end of the system text",
            partial(moves.switch, index, "tail"),
        ),
    ]
