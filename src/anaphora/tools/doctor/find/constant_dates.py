"""What has not changed in this log but will: a date or a clock in constant text."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from anaphora.tools.doctor.find import dates_and_times
from anaphora.tools.doctor.find.findings import Finding, Repair, around, shown
from anaphora.tools.doctor.read.load_log import Log
from anaphora.tools.doctor.read.prompts import Prompt, Segment

MOST = 5
_ADVICE = "if it is ever made live, put it at the end of the last user message"
_LABEL = 40


def find(log: Log, known: Sequence[Finding]) -> list[Finding]:
    """Clocks and dates in system texts that a word beside them, or the log's own times, say to be the present ones."""
    found: list[Finding] = []
    texts: set[int] = set()
    places = {(finding.message, finding.path) for finding in known}
    for prompt in log.prompts:
        for segment in prompt.segments:
            if segment.text in texts or not (segment.role in ("system", "developer") or segment.kind == "tool"):
                continue
            texts.add(segment.text)
            if (segment.message, segment.path) in places or len(texts) > 50:
                continue
            found += _present(log, prompt, segment)
            if len(found) >= MOST:
                return found[:MOST]
    return found


def _present(log: Log, prompt: Prompt, segment: Segment) -> list[Finding]:
    text = log.store.text(segment.text)
    found = []
    for start, end, kind in dates_and_times.matches(text):
        line = max(text.rfind("\n", 0, start) + 1, start - _LABEL)
        labelled = dates_and_times.NOW.search(text[line:start]) is not None
        if not labelled and not _is_today(text[start:end], prompt.time):
            continue
        found.append(
            Finding(
                kind=kind,
                status="latent",
                message=segment.message,
                role=segment.role,
                path=segment.path,
                start=segment.offset + start,
                end=segment.offset + end,
                samples=shown([text[start:end]]),
                repairs=[Repair("none", _ADVICE, _nothing)],
                seen=0,
                line=prompt.line,
                varies="the same in the whole log",
                context=around(text, start, end),
            )
        )
    return found


def _is_today(text: str, time: float | None) -> bool:
    if time is None:
        return False
    day = datetime.fromtimestamp(time)
    return any(day.strftime(form) in text for form in ("%Y-%m-%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y"))


def _nothing(_: bool) -> None:
    """A latent cause has nothing to switch."""
