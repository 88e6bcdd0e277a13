"""Finds conversations whose earlier messages change: rewritten, trimmed, moved, or rendered differently."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from anaphora.tools.doctor.find.findings import Finding, Location, Repair, shorten_samples
from anaphora.tools.doctor.find.history_difference import Difference, difference_of
from anaphora.tools.doctor.find.history_rewriter import HistoryRewriter
from anaphora.tools.doctor.find.patterns import common_prefix, common_suffix
from anaphora.tools.doctor.find.value_classes import widen
from anaphora.tools.doctor.read.load_log import Log
from anaphora.tools.doctor.read.prompts import Prompt

_ADVICE = {
    "rewritten_history": "send earlier messages as they were sent first; shorten them before that",
    "trimmed_history": "drop old messages rarely and many at once, not with each turn",
    "moved_system": "put the constant system text first and leave it there; what changes goes behind the history",
    "key_order": "keep tool calls and results as the text that they were, without parsing and writing them again",
    "whitespace": "keep earlier messages byte for byte, spaces and line breaks too",
    "retokenised": "send token ids back, not text; the same text has other tokens than those that the model wrote",
    "template": "use a chat template that writes earlier messages as it wrote them first",
}
_DEFAULT_ADVICE = "keep this out of earlier messages, or write it once and leave it as it was sent"
TRIM_SHARE = 0.8
"""Share of the history that the repaired log drops at once."""


def find(log: Log, previous: Sequence[int]) -> tuple[list[Finding], HistoryRewriter]:
    """Finds every way in which requests do not extend the request before them in their conversation.

    ``previous`` has for each request the number of the one before it in its conversation, or -1. Returns one finding a
    class, and the rewriter that applies the repairs.
    """
    rewriter = HistoryRewriter(log, previous)
    for prompt in log.prompts:
        if (before := previous[prompt.number]) >= 0:
            difference = difference_of(log, log.prompts[before], prompt)
            if difference is not None:
                rewriter.differences[prompt.number] = difference
    by_kind: dict[str, list[Difference]] = defaultdict(list)
    for difference in rewriter.differences.values():
        by_kind[difference.kind].append(difference)
    if "trimmed_history" in by_kind:
        rewriter.trim = _trim_rarely(log.prompts, previous, rewriter.differences, by_kind["trimmed_history"])
    return [_finding(kind, differences, log, rewriter) for kind, differences in by_kind.items()], rewriter


def _trim_rarely(
    prompts: Sequence[Prompt], previous: Sequence[int], differences: dict[int, Difference], trimmed: list[Difference]
) -> dict[int, tuple[int, int]]:
    """Returns (first message, how many more to drop) by request, so that history is dropped rarely and many at once.

    No request keeps more messages than it did.
    """
    step = min(difference.dropped for difference in trimmed)
    longest = max(len(difference.later.roles) - difference.message for difference in trimmed)
    chunk = max(2 * step, int(TRIM_SHARE * longest) // step * step)
    dropped: dict[int, tuple[int, int]] = {}
    trim: dict[int, tuple[int, int]] = {}
    for prompt in prompts:
        first, count = dropped.get(previous[prompt.number], (0, 0))
        difference = differences.get(prompt.number)
        if difference is not None and difference.kind == "trimmed_history":
            first, count = difference.message, count + difference.dropped
        if count:
            dropped[prompt.number] = first, count
            more = -(-count // chunk) * chunk - count
            while first + more < len(prompt.roles) - 1 and prompt.roles[first + more] == "tool":
                more += 1  # a tool's result is dropped with its call
            trim[prompt.number] = first, min(more, len(prompt.roles) - first - 1)
    return trim


def _finding(kind: str, differences: Sequence[Difference], log: Log, rewriter: HistoryRewriter) -> Finding:
    """Builds the finding of all ``differences`` of one class; the first of them is shown."""
    first = differences[0]
    segments = first.later.segments
    segment = first.new or next((s for s in segments if s.message == first.message), segments[-1])
    text = log.store.text(segment.text)
    start, end, old_value = 0, len(text), ""
    if first.old:
        old = log.store.text(first.old.text)
        start = common_prefix(old, text)
        end = len(text) - common_suffix(old, text, min(len(old), len(text)) - start)
        if kind not in _ADVICE:
            start, end = widen(text, start, end)
        old_value = old[start : len(old) - (len(text) - end)]
    can_rewrite = kind not in ("template", "retokenised")
    advice = _ADVICE.get(kind, _DEFAULT_ADVICE)
    return Finding(
        kind=kind,
        status="confirmed",
        location=Location.in_segment(segment, text, (start, end)),
        samples=shorten_samples([value for value in (old_value, text[start:end]) if value]),
        repairs=[Repair("as first sent", advice, partial(rewriter.switch, kind), rewrites=can_rewrite)],
        seen=len(differences),
        line=first.later.line,
        varies=f"in {len(differences)} of {len(log.prompts)} requests",
        note=_note(kind, differences),
    )


def _note(kind: str, differences: Sequence[Difference]) -> str:
    first = differences[0]
    if first.note:
        return first.note
    if kind == "template":
        return _template_note(first)
    if kind == "trimmed_history":
        steps = sorted({difference.dropped for difference in differences})
        return f"{steps[0] if len(steps) == 1 else f'{steps[0]} to {steps[-1]}'} of the oldest messages go each time"
    return ""


def _template_note(difference: Difference) -> str:
    later = difference.later
    order = [later.segments[owner].message for owner, _ in later.runs if owner >= 0]
    if any(b < a and b < later.num_leading_system() for a, b in itertools.pairwise(order)):
        return "the messages are equal, but the template moves the system text (or the tools) to a later message"
    return "the messages are equal, but the template writes earlier ones differently when new ones follow"
