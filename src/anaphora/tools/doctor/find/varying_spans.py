"""Changing parts inside texts that are otherwise the same: clocks, ids, names, retrieved documents."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial

from anaphora.text.outline import TOOLS
from anaphora.tools.doctor.find.findings import Finding, Repair, around, shown
from anaphora.tools.doctor.find.patterns import Pattern, Patterns, Span, common_prefix, common_suffix, squeezed
from anaphora.tools.doctor.find.span_rewriter import MARK, Region, SpanRewriter
from anaphora.tools.doctor.find.tool_definitions import SETS
from anaphora.tools.doctor.find.value_classes import LONG_TEXT, are_times, canonical, classify, spelt_alike, widen
from anaphora.tools.doctor.find.variation import Occurrence
from anaphora.tools.doctor.read.load_log import Log
from anaphora.tools.doctor.read.prompts import Prompt, Segment
from anaphora.tools.doctor.read.token_store import TokenStore

LONG_LINE = 100
"""Characters beside a value beyond which only its sentence moves, not its line."""
LONGEST_UNIT = 300
"""Characters of constant text that move with a value at most."""
LEAST_AFTER = 400
"""Characters of constant text that must follow in a user's message: what follows is the reason to mend it."""
LEAST_BEHIND = 40
"""The same for a completion's prompt, which ends with what is new in it."""
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
SYSTEM = ("system", "developer")
_NOT_IN_PROMPT = ("request_id", "session_id", "hash", "counter")


def _group(prompt: Prompt, segment: Segment, store: TokenStore) -> str | None:
    """Texts of which group a segment is compared with; None where it is no text of the application's."""
    if segment.kind == "prompt":
        return "prompt"
    if segment.kind == "tool":
        match = re.search(r'"name": "([^"]+)"', store.text(segment.text))
        return f"tool {match[1]}" if match else None
    if segment.kind == "variable":
        return "template"
    if segment.kind != "content":
        return None
    if segment.role in SYSTEM:
        return "system"
    return "user" if segment.role == "user" else None


def find(log: Log, conversations: Sequence[int]) -> tuple[list[Finding], SpanRewriter]:
    """Every changing part, with its class and its repairs."""
    groups: dict[str, Patterns] = {}
    schemas: set[tuple[str, str | None]] = set()
    for prompt in log.prompts:
        for segment in prompt.segments:
            if (name := _group(prompt, segment, log.store)) is not None:
                patterns = groups.get(name)
                if patterns is None:
                    patterns = groups[name] = Patterns(strict=name == "user")
                if not patterns.knows(segment.text) and not (
                    segment.kind == "tool" and _known(schemas, name, segment, log)
                ):
                    beside = {
                        other.text
                        for other in prompt.segments
                        if segment.message == other.message and other is not segment
                    }
                    patterns.add(segment.text, log.store.text(segment.text), beside if segment.message >= 0 else ())
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
    moves = SpanRewriter(log.store, regions, dict(of_text))
    places = _places(log.prompts, of_text)
    findings = [
        finding
        for index, region in enumerate(regions)
        if (finding := _finding(index, region, moves, places, log, conversations)) is not None
    ]
    return findings, moves


def _known(schemas: set[tuple[str, str | None]], name: str, segment: Segment, log: Log) -> bool:
    """Whether the tool's JSON has come before, be it with its keys in another order; notes it."""
    key = name, canonical(log.store.text(segment.text), SETS)
    known = key in schemas
    schemas.add(key)
    return known


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


def _families(pattern: Pattern, store: TokenStore) -> list[Pattern]:
    """The pattern, or several in its place where its texts are of a few kinds that happen to share a part.

    Two applications with the same rules, one with a clock before them and one with an id, are two families. A text that
    lacks the part that changes in all others is left alone.
    """
    kinds: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for number in pattern.members:
        text = store.text(number)
        spans = pattern.fit(text) or []
        kinds[tuple(_shape(text[start:end]) for start, end in spans)].append(number)
    first = [value[0] for value in kinds if value]
    if len(first) > 1 and (spelt_alike(first) or are_times(first)):
        return [pattern]
    several = [members for members in kinds.values() if len(members) > 2]
    if pattern.shared < len(pattern.model) - LONG_TEXT or max(map(len, kinds)) > PARTED_SLOTS:
        return [pattern]  # documents, of which some begin alike
    enough = sum(map(len, several)) >= SAME_KIND * len(pattern.members)
    if len(kinds) < 2 or not 1 <= len(several) <= MOST_FAMILIES or not enough:
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


def _regions(pattern: Pattern, group: str, store: TokenStore) -> Iterator[Region]:
    fitted = {number: spans for number in pattern.members if (spans := pattern.fit(store.text(number))) is not None}
    model = pattern.members[0]
    if len(fitted) < 2 or model not in fitted:
        return
    texts = {number: store.text(number) for number in fitted}
    if len({squeezed(text) for text in texts.values()}) == 1:
        yield _respaced(pattern, group, texts)
        return
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
        region.spans = [wide[model][k] for k in slots]
        region.first = texts[model][slice(*region.values[model])]
        least = {"user": LEAST_AFTER, "prompt": LEAST_BEHIND}.get(group, 0)
        if min(region.end_of(t) - region.units[n][1] for n, t in texts.items()) < least:
            continue
        yield region


def _respaced(pattern: Pattern, group: str, texts: dict[int, str]) -> Region:
    """Texts that differ in spaces and line breaks only: one region from the first difference to the last."""
    shortest = min(texts.values(), key=len)
    start = min(common_prefix(shortest, text) for text in texts.values())
    end = min(common_suffix(shortest, text, len(shortest) - start) for text in texts.values())
    region = Region(pattern, [0], group)
    region.units = region.values = {n: (start, len(text) - end) for n, text in texts.items()}
    region.spans = [region.values[pattern.members[0]]]
    region.first = texts[pattern.members[0]][slice(*region.spans[0])]
    return region


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
    if group == "prompt":
        for match in MARK.finditer(text, low, start):
            low = match.end()
        while low < start and text[low].isspace():
            low += 1
        if (mark := MARK.search(text, end, high)) is not None:
            high = mark.start()
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
    moves: SpanRewriter,
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
    region.kind = verdict.kind
    values = list(dict.fromkeys(occurrence.value for occurrence in occurrences))
    return Finding(
        kind=verdict.kind,
        status="confirmed",
        message=max(segment.message, TOOLS),
        role=segment.role,
        path=segment.path,
        start=segment.offset + start,
        end=segment.offset + end,
        samples=shown(values),
        repairs=_repairs(index, region, moves, segment, [prompt for prompt, _ in places[index]]),
        seen=len(changed),
        line=prompt.line,
        varies=verdict.varies,
        context=around(text, start, end),
        note=next((advice for pattern, advice in _KNOWN if pattern.search(text, max(0, start - 200), end)), ""),
    )


def _repairs(
    index: int, region: Region, moves: SpanRewriter, segment: Segment, prompts: Sequence[Prompt]
) -> list[Repair]:
    """Where the region could go, of which the best is found by re-running; ``prompts`` are those that have it."""
    kind = region.kind
    if kind in _IN_PLACE:
        return [Repair("same place", _IN_PLACE[kind], partial(moves.switch, index, "first"))]
    what = "take it out of the prompt; if the model needs it, " if kind in _NOT_IN_PROMPT else ""
    what = what or _FIRST_ADVICE.get(kind, "")
    if segment.message < 0:
        source = "tool's description" if segment.message == TOOLS else "template"
        end = f"{what}keep it out of the {source} and write it at the end of the last user message"
        return [Repair("end of the last user message", end, partial(moves.switch, index, "user"), rewrites=False)]
    last_user = Repair(
        "end of the last user message",
        f"{what}move its line to the end of the last user message",
        partial(moves.switch, index, "user"),
    )
    if region.group in ("user", "prompt"):
        before = ", before what opens the answer" if region.group == "prompt" else ""
        same_text = f"{what}put it behind the constant text{before}"
        # Where each of a user's messages has its own such value, all but the last one's belong where they are.
        once = all(sum(part.text in region.units for part in prompt.segments) == 1 for prompt in prompts)
        return [
            Repair("end of the same text", same_text, partial(moves.switch, index, "tail")),
            *([last_user] if once and region.group == "user" else []),
        ]
    very_end = Repair(
        "very end of the prompt",
        f"{what}move its line to a message of its own at the very end, behind tool results too",
        partial(moves.switch, index, "end"),
    )
    tail = Repair(
        "tail of the system text",
        f"{what}move its line to the end of the system text",
        partial(moves.switch, index, "tail"),
    )
    # A last message that is no user's is one with a tool's result, say.
    rounds = any(prompt.roles and prompt.roles[-1] not in ("user", *SYSTEM) for prompt in prompts)
    return [*([very_end] if rounds else []), last_user, tail]
