"""Finds what has not changed in this log but will: a date or a clock time in constant text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from anaphora.tools.doctor.find import dates_and_times
from anaphora.tools.doctor.find.findings import Finding, Location, Repair, shorten_samples
from anaphora.tools.doctor.read.load_log import Log
from anaphora.tools.doctor.read.prompts import SYSTEM_ROLES, Prompt, Segment

MAX_FINDINGS = 5
MAX_TEXTS = 50
LABEL_LENGTH = 40
_ADVICE = "if it is ever made live, put it at the end of the last user message"


def find(log: Log, known: Sequence[Finding]) -> list[Finding]:
    """Finds dates and times in system texts and tools that are the present ones.

    Either a word before them says so ("Today is") or they are the day of the request. ``known`` are the findings
    in texts that change; their texts are skipped.
    """
    found: list[Finding] = []
    texts: set[int] = set()
    known_paths = {(finding.location.message, finding.location.path) for finding in known}
    for prompt in log.prompts:
        for segment in prompt.segments:
            if segment.text in texts or not (segment.role in SYSTEM_ROLES or segment.kind == "tool"):
                continue
            texts.add(segment.text)
            if (segment.message, segment.path) in known_paths or len(texts) > MAX_TEXTS:
                continue
            found += _present_dates(log, prompt, segment)
            if len(found) >= MAX_FINDINGS:
                return found[:MAX_FINDINGS]
    return found


def _present_dates(log: Log, prompt: Prompt, segment: Segment) -> Iterator[Finding]:
    text = log.store.text(segment.text)
    for start, end, kind in dates_and_times.matches(text):
        label = max(text.rfind("\n", 0, start) + 1, start - LABEL_LENGTH)
        labelled = dates_and_times.NOW.search(text[label:start]) is not None
        if labelled or _is_day_of(prompt.time, text[start:end]):
            yield Finding(
                kind=kind,
                status="latent",
                location=Location.in_segment(segment, text, (start, end)),
                samples=shorten_samples([text[start:end]]),
                repairs=[Repair("none", _ADVICE, _switch_nothing)],
                seen=0,
                line=prompt.line,
                varies="the same in the whole log",
            )


def _is_day_of(time: float | None, text: str) -> bool:
    if time is None:
        return False
    day = datetime.fromtimestamp(time)
    return any(day.strftime(form) in text for form in ("%Y-%m-%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y"))


def _switch_nothing(_: bool) -> None:
    """The repair of a latent finding changes nothing in this log."""
