"""Tells how a value changes over a log: with each request, conversation or release, like a clock, like a counter."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from anaphora.tools.doctor.find import numerals

MAX_CLOCK_LENGTH = 60
MAX_COUNTER_LENGTH = 40
_UNITS = (1, 10**3, 10**6, 10**9)
"""Ticks a second of clocks that count from an epoch: in seconds, ms, µs or ns."""


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A value in one request: the number of the request and of its conversation, Unix time, and the value's text."""

    number: int
    conversation: int
    time: float | None
    value: str


@dataclass(frozen=True, slots=True)
class Variation:
    """How a value changes. ``each_session``: it stays within a conversation and differs between conversations.

    ``stretches``: each value holds for some requests in a row, and never again. ``reused``: conversations share values.
    ``within``: most conversations with several requests have several values. ``text`` says it in words.
    """

    each_request: bool
    each_session: bool
    stretches: bool
    reused: bool
    within: bool
    text: str


def variation_of(occurrences: Sequence[Occurrence]) -> Variation:
    """Describes how the value of ``occurrences`` (in log order) changes."""
    distinct = len({occurrence.value for occurrence in occurrences})
    sessions: dict[int, list[str]] = defaultdict(list)
    for occurrence in occurrences:
        sessions[occurrence.conversation].append(occurrence.value)
    several = [values for values in sessions.values() if len(values) > 1]
    steady = sum(len(set(values)) == 1 for values in several)
    changes = sum(a.value != b.value for a, b in itertools.pairwise(occurrences))
    stretches = changes == distinct - 1 and len(occurrences) >= 2 * distinct
    each_session = bool(several) and steady >= 0.8 * len(several)
    if each_session and stretches and distinct <= 0.5 * len(sessions):
        each_session = False  # it changes for all; few conversations are open at that moment
    each_request = distinct >= 0.9 * len(occurrences) and not each_session
    if each_request:
        text = "a new value in every request"
    elif each_session:
        text = f"the same in a conversation, {distinct} values in {len(sessions)} conversations"
    elif changes < distinct:
        text = f"changes {changes} time{'s' * (changes != 1)} in {len(occurrences)} requests" + _period(occurrences)
    else:
        text = f"{distinct} values in {len(occurrences)} requests, {changes} changes" + _period(occurrences)
    within = bool(several) and steady < 0.5 * len(several)
    return Variation(each_request, each_session, stretches, distinct <= 0.7 * len(sessions), within, text)


def _period(occurrences: Sequence[Occurrence]) -> str:
    """Says the time or the number of requests between changes if it is regular."""
    at = [i for i in range(1, len(occurrences)) if occurrences[i].value != occurrences[i - 1].value]
    times = [time for i in at if (time := occurrences[i].time) is not None]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    if len(gaps) >= 2 and max(gaps) <= 1.2 * min(gaps) + 1:
        return f", about every {sum(gaps) / len(gaps):.0f} s"
    steps = [b - a for a, b in itertools.pairwise(at)]
    if len(steps) >= 2 and max(steps) <= 1.2 * min(steps) + 1 and min(steps) > 1:
        return f", about every {sum(steps) / len(steps):.0f} requests"
    return ""


def grows(occurrences: Sequence[Occurrence]) -> bool:
    """Tells whether values mostly extend the value before them, as a memory does that is appended to."""
    pairs = [(a.value, b.value) for a, b in itertools.pairwise(occurrences) if a.value != b.value]
    return sum(b.startswith(a.rstrip()[: max(8, len(a) - 8)]) for a, b in pairs) >= 0.7 * len(pairs)


def ticks(values: Sequence[str]) -> bool:
    """Tells whether the numbers in the values rise in log order as those of a clock do.

    The last number that changes stays below 60, exceeds 31 (so it is not a day, month or hour), and starts again from
    a lower value when the number before it rises. Dates with the day first are tried too.
    """
    if len(values) < 4 or max(map(len, values)) > MAX_CLOCK_LENGTH:
        return False
    found = [numerals.groups(value)[:8] for value in values]
    width = len(found[0])
    if width < 2 or any(len(group) != width for group in found):
        return False
    for order in (tuple(range(width)), (2, 1, 0, *range(3, width))) if width > 3 else (tuple(range(width)),):
        ordered = [tuple(group[i] for i in order) for group in found]
        changing = [i for i in range(width) if len({group[i] for group in ordered}) > 1]
        if len(changing) < 2 or any(a > b for a, b in itertools.pairwise(ordered)):
            continue
        last = [group[changing[-1]] for group in ordered]
        if 31 < max(last) < 60 and any(a > b for a, b in itertools.pairwise(last)):
            return True
    return False


def follows_log_times(occurrences: Sequence[Occurrence]) -> bool:
    """Tells whether the values advance as the times of the log's requests do; then they are a clock in any format."""
    points = [(o.time, numerals.groups(o.value)) for o in occurrences if len(o.value) <= MAX_CLOCK_LENGTH]
    timed = [(time, found) for time, found in points if time is not None and found]
    width = min((len(found) for _, found in timed), default=0)
    gaps = [b - a for (a, _), (b, _) in itertools.pairwise(timed)]
    if len(timed) < max(4, len(occurrences) // 2) or width != max(len(found) for _, found in timed):
        return False
    if not gaps or max(gaps) < 1.5 * max(min(gaps), 1.0):
        return False  # with requests at a steady pace, a counter advances like a clock
    first, start = timed[0]
    for at in range(width):
        for unit in _UNITS:
            if start[at] > 10**6 and all(abs((f[at] - start[at]) / unit - (t - first)) <= 2 for t, f in timed):
                return True
    return any(_advances(timed, at, 3) or _advances(timed, at, 2) for at in range(width - 1))


def _advances(timed: Sequence[tuple[float, tuple[int, ...]]], at: int, fields: int) -> bool:
    """Tells whether the numbers from ``at`` on are the log's times plus a constant: hours, minutes and seconds.

    ``fields`` is 3; or 2 for minutes and seconds.
    """
    if at + fields > len(timed[0][1]) or any(number >= 60 for _, f in timed for number in f[at : at + fields]):
        return False
    clock = [sum(n * 60**i for i, n in enumerate(reversed(f[at : at + fields]))) for _, f in timed]
    period = 86400 if fields == 3 else 3600
    offsets = [(value - time) % period for value, (time, _) in zip(clock, timed, strict=True)]
    drift = [(offset - offsets[0] + period / 2) % period - period / 2 for offset in offsets]
    return len(set(clock)) > 3 and max(drift) - min(drift) <= 2.5


def counts(values: Sequence[str]) -> bool:
    """Tells whether the values are numbers, however written, that go only up or only down, by similar steps."""
    found = [numerals.number(value) for value in values]
    numbers = [number for number in found if number is not None]
    if len(numbers) < len(values) or max(map(len, values)) > MAX_COUNTER_LENGTH:
        return False
    steps = [b - a for a, b in itertools.pairwise(numbers)]
    one_way = all(step > 0 for step in steps) or all(step < 0 for step in steps)
    return bool(steps) and one_way and max(map(abs, steps)) <= max(1000, 20 * min(map(abs, steps)))
