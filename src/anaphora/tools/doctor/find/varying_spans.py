"""Finds spans that change inside texts that are otherwise the same: clock times, ids, names, retrieved documents."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from anaphora.text.outline import TOOLS
from anaphora.tools.doctor.find.findings import Finding, Location, Repair, shorten_samples
from anaphora.tools.doctor.find.pattern_families import split_into_families
from anaphora.tools.doctor.find.patterns import Patterns
from anaphora.tools.doctor.find.regions import Region, regions_of
from anaphora.tools.doctor.find.span_rewriter import SpanRewriter
from anaphora.tools.doctor.find.tool_rewriter import UNORDERED_LISTS
from anaphora.tools.doctor.find.value_classes import canonical_json, classify
from anaphora.tools.doctor.find.variation import Occurrence
from anaphora.tools.doctor.read.load_log import Log
from anaphora.tools.doctor.read.prompts import SYSTEM_ROLES, Prompt, Segment
from anaphora.tools.doctor.read.token_store import TokenStore

LABEL_LENGTH = 40
"""Characters before a value, in its line, that may name it."""
_IN_PLACE = {
    "key_order": "write the keys in one order",
    "whitespace": "write the same spaces and line breaks each time",
    "double_bos": "write the BOS token once, in the template or in the prompt, not in both",
}
"""Classes that are repaired without moving anything."""
_KNOWN_LINES = (
    (
        re.compile("x-anthropic-billing-header"),
        "this is Claude Code's billing line: set CLAUDE_CODE_ATTRIBUTION_HEADER=0 in its environment to stop it",
    ),
)
"""Lines that well-known clients write, and the switch that stops them."""
_ADVICE_FIRST = {
    "clock_time": "give the model a tool that tells the time, or ",
    "date": "write it where it is needed only: ",
}
_NOT_IN_PROMPT = ("request_id", "session_id", "hash", "counter")
"""Classes that a model rarely needs."""

Sighting = tuple[Prompt, Segment]
"""A segment whose text is one of a region's, with its prompt."""


def find(log: Log, conversations: Sequence[int]) -> tuple[list[Finding], SpanRewriter]:
    """Finds every region of the log's texts that changes from one request to the next.

    ``conversations`` has the conversation number of each request. Returns the findings, with class and repairs, and the
    rewriter that applies the repairs.
    """
    regions = [
        region
        for group, patterns in _patterns_by_group(log).items()
        for pattern in patterns.patterns
        if len(pattern.members) > 1
        for family in split_into_families(pattern, log.store)
        for region in regions_of(family, group, log.store)
    ]
    regions_of_text: dict[int, list[int]] = defaultdict(list)
    for index, region in enumerate(regions):
        for number in region.moved:
            regions_of_text[number].append(index)
    rewriter = SpanRewriter(log.store, regions, dict(regions_of_text))
    sightings = _sightings(log.prompts, regions_of_text)
    findings = [
        finding
        for index, region in enumerate(regions)
        if (finding := _finding(region, partial(rewriter.switch, index), sightings[index], log, conversations))
    ]
    return findings, rewriter


# --- Texts that are compared with each other -------------------------------------------------------------------------


def _group(prompt: Prompt, segment: Segment, store: TokenStore) -> str | None:
    """Names the group of texts that a segment is compared with; None for texts that the application did not write."""
    if segment.kind == "prompt":
        return "prompt"
    if segment.kind == "tool":
        match = re.search(r'"name": "([^"]+)"', store.text(segment.text))
        return f"tool {match[1]}" if match else None
    if segment.kind == "variable":
        return "template"
    if segment.kind != "content":
        return None
    if segment.role in SYSTEM_ROLES:
        return "system"
    return "user" if segment.role == "user" else None


def _patterns_by_group(log: Log) -> dict[str, Patterns]:
    groups: dict[str, Patterns] = {}
    schemas: set[tuple[str, str | None]] = set()
    for prompt in log.prompts:
        for segment in prompt.segments:
            if (group := _group(prompt, segment, log.store)) is None:
                continue
            if (patterns := groups.get(group)) is None:
                patterns = groups[group] = Patterns(strict=group == "user")
            if segment.text in patterns or (segment.kind == "tool" and _is_reordered(segment, group, schemas, log)):
                continue
            others = (other for other in prompt.segments if other is not segment)
            unrelated = {other.text for other in others if other.message == segment.message >= 0}
            patterns.add(segment.text, log.store.text(segment.text), unrelated)
    return groups


def _is_reordered(segment: Segment, group: str, schemas: set[tuple[str, str | None]], log: Log) -> bool:
    """Tells whether a tool's JSON has come before with its keys in another order; adds it to ``schemas``."""
    schema = group, canonical_json(log.store.text(segment.text), UNORDERED_LISTS)
    known = schema in schemas
    schemas.add(schema)
    return known


def _sightings(prompts: Sequence[Prompt], regions_of_text: dict[int, list[int]]) -> dict[int, list[Sighting]]:
    """Returns the segments with each region's texts, in log order, at most one a request."""
    sightings: dict[int, list[Sighting]] = defaultdict(list)
    for prompt in prompts:
        for segment in prompt.segments:
            for region in regions_of_text.get(segment.text, ()):
                if not sightings[region] or sightings[region][-1][0] is not prompt:
                    sightings[region].append((prompt, segment))
    return sightings


# --- Findings --------------------------------------------------------------------------------------------------------


def _finding(
    region: Region,
    switch: Callable[[str, bool], None],
    sightings: Sequence[Sighting],
    log: Log,
    conversations: Sequence[int],
) -> Finding | None:
    """Classifies a region and sets its ``kind``; None if it never changes from one request to the next.

    ``switch`` takes a destination and whether the region moves there.
    """
    occurrences: list[Occurrence] = []
    changed: list[Sighting] = []
    for prompt, segment in sightings:
        value = log.store.text(segment.text)[slice(*region.values[segment.text])]
        if occurrences and value != occurrences[-1].value:
            changed.append((prompt, segment))
        occurrences.append(Occurrence(prompt.number, conversations[prompt.number], prompt.time, value))
    if not changed:
        return None
    prompt, segment = changed[0]
    text = log.store.text(segment.text)
    start, end = region.values[segment.text]
    label = text[max(0, text.rfind("\n", 0, start), start - LABEL_LENGTH) : start]
    verdict = classify(occurrences, label)
    region.kind = verdict.kind
    return Finding(
        kind=verdict.kind,
        status="confirmed",
        location=Location.in_segment(segment, text, (start, end)),
        samples=shorten_samples(list(dict.fromkeys(occurrence.value for occurrence in occurrences))),
        repairs=_repairs(region, switch, segment, [prompt for prompt, _ in sightings]),
        seen=len(changed),
        line=prompt.line,
        varies=verdict.varies,
        note=next((advice for line, advice in _KNOWN_LINES if line.search(text, max(0, start - 200), end)), ""),
    )


def _repairs(
    region: Region, switch: Callable[[str, bool], None], segment: Segment, prompts: Sequence[Prompt]
) -> list[Repair]:
    """Lists where the region could go; ``prompts`` are those that have it. Running them tells which is the best."""
    kind = region.kind
    if kind in _IN_PLACE:
        return [Repair("same place", _IN_PLACE[kind], partial(switch, "first"))]
    first = "take it out of the prompt; if the model needs it, " if kind in _NOT_IN_PROMPT else ""
    first = first or _ADVICE_FIRST.get(kind, "")
    if segment.message < 0:
        source = "tool's description" if segment.message == TOOLS else "template"
        advice = f"{first}keep it out of the {source} and write it at the end of the last user message"
        return [Repair("end of the last user message", advice, partial(switch, "user"), rewrites=False)]
    last_user = Repair(
        "end of the last user message",
        f"{first}move its line to the end of the last user message",
        partial(switch, "user"),
    )
    if region.group in ("user", "prompt"):
        before = ", before what opens the answer" if region.group == "prompt" else ""
        advice = f"{first}put it behind the constant text{before}"
        same_text = Repair("end of the same text", advice, partial(switch, "tail"))
        # If each of several user messages has such a value, those of the earlier ones belong to their messages.
        once = all(sum(other.text in region.moved for other in prompt.segments) == 1 for prompt in prompts)
        return [same_text, last_user] if once and region.group == "user" else [same_text]
    very_end = Repair(
        "very end of the prompt",
        f"{first}move its line to a message of its own at the very end, behind tool results too",
        partial(switch, "end"),
    )
    tail = Repair(
        "tail of the system text",
        f"{first}move its line to the end of the system text",
        partial(switch, "tail"),
    )
    # A last message that is not the user's holds a tool's result, say.
    has_rounds = any(prompt.roles and prompt.roles[-1] not in ("user", *SYSTEM_ROLES) for prompt in prompts)
    return [very_end, last_user, tail] if has_rounds else [last_user, tail]
