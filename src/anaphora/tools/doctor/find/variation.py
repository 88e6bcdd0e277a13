"""How a changing part changes over a log: with each request, conversation or release, like a clock, like a counter."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from anaphora.tools.doctor.find import numerals

LONGEST_CLOCK = 60
LONGEST_COUNTER = 40
_UNITS = (1, 10**3, 10**6, 10**9)
"""Of clocks that count since a moment: seconds to nanoseconds."""


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A value in one request: the request's number, its conversation, its time, and the value's text."""

    number: int
    conversation: int
    time: float | None
    value: str


@dataclass(frozen=True, slots=True)
class Variation:
    """``stretches``: each value serves all for a while, and never again. ``of_few``: values come again elsewhere.

    ``within``: most conversations of several requests have several values.
    """

    each_request: bool
    each_session: bool
    stretches: bool
    of_few: bool
    within: bool
    text: str


def how(occurrences: Sequence[Occurrence]) -> Variation:
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
        each_session = False  # few conversations are open when it changes
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
    """The time, or the number of requests, between changes where it is regular."""
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
    """Whether later values mostly hold earlier ones: a memory that is written on."""
    pairs = [(a.value, b.value) for a, b in itertools.pairwise(occurrences) if a.value != b.value]
    return sum(b.startswith(a.rstrip()[: max(8, len(a) - 8)]) for a, b in pairs) >= 0.7 * len(pairs)


def ticks(values: Sequence[str]) -> bool:
    """Whether the numbers in the values rise in log order as a clock's do.

    The last that moves stays below 60, goes beyond any month or hour, and begins anew as the one before it goes up.
    """
    if len(values) < 4 or max(map(len, values)) > LONGEST_CLOCK:
        return False
    found = [numerals.groups(value)[:8] for value in values]
    width = len(found[0])
    if width < 2 or any(len(group) != width for group in found):
        return False
    for order in (tuple(range(width)), (2, 1, 0, *range(3, width))) if width > 3 else (tuple(range(width)),):
        sorted_ = [tuple(group[i] for i in order) for group in found]
        moving = [i for i in range(width) if len({group[i] for group in sorted_}) > 1]
        if len(moving) < 2 or any(a > b for a, b in itertools.pairwise(sorted_)):
            continue
        last = [group[moving[-1]] for group in sorted_]
        if 31 < max(last) < 60 and any(a > b for a, b in itertools.pairwise(last)):
            return True
    return False


def keeps_time(occurrences: Sequence[Occurrence]) -> bool:
    """Whether the values advance as the log's own times do: whatever its format, that is a clock."""
    points = [(o.time, numerals.groups(o.value)) for o in occurrences if len(o.value) <= LONGEST_CLOCK]
    timed = [(time, found) for time, found in points if time is not None and found]
    width = min((len(found) for _, found in timed), default=0)
    gaps = [b - a for (a, _), (b, _) in itertools.pairwise(timed)]
    if len(timed) < max(4, len(occurrences) // 2) or width != max(len(found) for _, found in timed):
        return False
    if not gaps or max(gaps) < 1.5 * max(min(gaps), 1.0):
        return False  # requests at a steady pace: a counter keeps time too
    first, start = timed[0]
    for at in range(width):
        for unit in _UNITS:
            if start[at] > 10**6 and all(abs((f[at] - start[at]) / unit - (t - first)) <= 2 for t, f in timed):
                return True
    return any(_advances(timed, at, 3) or _advances(timed, at, 2) for at in range(width - 1))


def _advances(timed: Sequence[tuple[float, tuple[int, ...]]], at: int, fields: int) -> bool:
    """Whether ``fields`` numbers from ``at`` on are hours, minutes and seconds of the log's times, less a constant."""
    if at + fields > len(timed[0][1]) or any(number >= 60 for _, f in timed for number in f[at : at + fields]):
        return False
    clock = [sum(n * 60**i for i, n in enumerate(reversed(f[at : at + fields]))) for _, f in timed]
    turn = 86400 if fields == 3 else 3600
    ahead = [(value - time) % turn for value, (time, _) in zip(clock, timed, strict=True)]
    behind = [(offset - ahead[0] + turn / 2) % turn - turn / 2 for offset in ahead]
    return len(set(clock)) > 3 and max(behind) - min(behind) <= 2.5


def counts(values: Sequence[str]) -> bool:
    """Whether the values are numbers, in any way of writing, that go up or down by small steps."""
    found = [numerals.number(value) for value in values]
    numbers = [number for number in found if number is not None]
    if len(numbers) < len(values) or max(map(len, values)) > LONGEST_COUNTER:
        return False
    steps = [b - a for a, b in itertools.pairwise(numbers)]
    one_way = all(step > 0 for step in steps) or all(step < 0 for step in steps)
    return bool(steps) and one_way and max(map(abs, steps)) <= max(1000, 20 * min(map(abs, steps)))
