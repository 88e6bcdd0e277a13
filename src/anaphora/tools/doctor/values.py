"""What a changing part of a prompt is, told by how it changes; names beside it only break ties."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from anaphora.tools.doctor import clocks

_UUID = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.IGNORECASE)
_HEX = re.compile(r"[0-9a-f]{5,}", re.IGNORECASE)
_PATH = re.compile(r"(?:[A-Za-z]:\\|\\\\|~?/|\.{1,2}/)?[\w.@ -]*(?:[/\\][\w.@+-]+)+[/\\]?|[A-Za-z]:\\[\w.\\ -]*")
_VERSION = re.compile(r"v?\d+\.\d+(?:\.\d+)*(?:[-+.][\w.]+)?", re.IGNORECASE)
_WORD = re.compile(r"[\w@+\-./\\:~]")
_IDENTIFIER = re.compile(r"(?=.*\d)[\w\-:.+/=]{4,}|[\w-]{16,}")
_LABELS = (
    ("version", r"version|build|release|revision|\brev\b|deploy|commit"),
    ("hash", r"hash|sha\d*|digest|checksum|etag|md5|fingerprint|crc"),
    ("session_id", r"session|sitzung|conversation|thread|chat|dialog|séance|sesi[oó]n"),
    ("request_id", r"request|\breq|trace|span|run|nonce|correlation|invocation|message|uuid|ticket|job"),
    ("user_data", r"user|customer|account|client|tenant|member|name|email|kunde|nutzer|utilisateur|usuario|cliente"),
    ("counter", r"count|counter|turn|step|sequence|\bseq\b|attempt|iteration|number|\bno\b|#"),
)
LONG_TEXT = 160
LONGEST_CLOCK = 60
JUDGED_VALUES = 1000


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A value in one request: the request's number, its conversation, its time, and the value's text."""

    number: int
    conversation: int
    time: float | None
    value: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """``kind`` is the class; ``varies`` says in words how the value changes over the log."""

    kind: str
    varies: str


def widen(text: str, start: int, end: int) -> tuple[int, int]:
    """The whole value of which ``text[start:end]`` changes: a date, an id, a path, a word."""
    covering: list[tuple[int, int]] = []
    if end - start <= LONGEST_CLOCK:
        low, high = max(0, start - 90), min(len(text), end + 90)
        window = text[low:high]
        spans = [(s, e) for s, e, _ in clocks.matches(window)] + [m.span() for m in _UUID.finditer(window)]
        covering = [(s + low, e + low) for s, e in spans if s + low <= start and e + low >= end]
    if covering:
        return min(covering, key=lambda span: span[1] - span[0])
    while start > 0 and _WORD.match(text[start - 1]):
        start -= 1
    while end < len(text) and _WORD.match(text[end]):
        end += 1
    while end > start and text[end - 1] in ".:,":
        end -= 1
    return start, end


def classify(occurrences: Sequence[Occurrence], label: str) -> Verdict:
    """The class of a slot with at least two different values, in log order; ``label`` is the text before it."""
    values = list(dict.fromkeys(occurrence.value for occurrence in occurrences))[:JUDGED_VALUES]
    varies = _how(occurrences)
    for kind, test in _TESTS:
        if test(values):
            return Verdict(kind, varies.text)
    if _same_but_for(items)(values) and _mostly(values, lambda value: len(value) >= 40):
        listed = re.search(r"tool|function|werkzeug|outil|herramient", f"{label}{values[0]}", re.IGNORECASE)
        return Verdict("tool_order" if listed else "retrieved_text", f"{varies.text}; the same parts in another order")
    if (clock := _clock(values)) is not None:
        return Verdict(clock, varies.text)
    hint = _hint(label)
    if all(_VERSION.fullmatch(value.strip()) for value in values) and not varies.each_request:
        return Verdict("version", varies.text)
    if hint == "version" and not varies.each_request and len(values) <= max(2, len(occurrences) // 3):
        return Verdict("version", varies.text)
    if _mostly(values, _is_path):
        return Verdict("path", varies.text)
    if _ticks(values):
        return Verdict("clock_time", varies.text)
    if (
        _mostly(values, lambda value: _IDENTIFIER.fullmatch(value.strip()) is not None)
        or _numbers(values)
        or _hex(values)
    ):
        return Verdict(_identifier(values, varies, hint), varies.text)
    if _mostly(values, lambda value: len(value) >= LONG_TEXT) and not varies.each_session:
        return Verdict("user_data" if _grows(occurrences) else "retrieved_text", varies.text)
    if hint in ("session_id", "request_id") and _mostly(values, lambda value: bool(re.search(r"\d", value))):
        return Verdict(hint, varies.text)
    return Verdict("user_data" if _mostly(values, lambda v: bool(re.search(r"[^\W\d]", v))) else "other", varies.text)


# --- How it varies ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Variation:
    each_request: bool
    each_session: bool
    text: str


def _how(occurrences: Sequence[Occurrence]) -> _Variation:
    distinct = len({occurrence.value for occurrence in occurrences})
    sessions: dict[int, list[str]] = defaultdict(list)
    for occurrence in occurrences:
        sessions[occurrence.conversation].append(occurrence.value)
    several = [values for values in sessions.values() if len(values) > 1]
    steady = sum(len(set(values)) == 1 for values in several)
    each_session = bool(several) and steady >= 0.8 * len(several)
    each_request = distinct >= 0.9 * len(occurrences) and not each_session
    changes = sum(a.value != b.value for a, b in itertools.pairwise(occurrences))
    if each_request:
        text = "a new value in every request"
    elif each_session:
        text = f"the same in a conversation, {distinct} values in {len(sessions)} conversations"
    elif changes < distinct:
        text = f"changes {changes} time{'s' * (changes != 1)} in {len(occurrences)} requests" + _period(occurrences)
    else:
        text = f"{distinct} values in {len(occurrences)} requests, {changes} changes" + _period(occurrences)
    return _Variation(each_request, each_session, text)


def describe(occurrences: Sequence[Occurrence]) -> str:
    """In words how a value changes over a log."""
    return _how(occurrences).text


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


def _grows(occurrences: Sequence[Occurrence]) -> bool:
    """Whether later values mostly hold earlier ones: a memory that is written on."""
    pairs = [(a.value, b.value) for a, b in itertools.pairwise(occurrences) if a.value != b.value]
    return sum(b.startswith(a.rstrip()[: max(8, len(a) - 8)]) for a, b in pairs) >= 0.7 * len(pairs)


# --- What it is ------------------------------------------------------------------------------------------------------


def _mostly(values: Sequence[str], test: Callable[[str], bool]) -> bool:
    return sum(map(test, values)) >= 0.8 * len(values)


def _same_but_for(key: Callable[[str], Any]) -> Callable[[Sequence[str]], bool]:
    """Whether ``key`` makes several values equal, for nearly all of them."""

    def test(values: Sequence[str]) -> bool:
        keys = [key(value) for value in values]
        return len(values) > 1 and None not in keys and len(set(keys)) <= max(1, len(values) // 3)

    return test


def canonical(text: str) -> str | None:
    """A JSON object or array with its keys sorted, None for other text."""
    if text.strip()[:1] not in ("{", "["):
        return None
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):
        return None


def items(text: str) -> str | None:
    """The parts of a list in sorted order (lines, or what commas part); None where there are fewer than two."""
    for separator in ("\n\n", "\n", ",", ";"):
        parts = sorted(part.strip() for part in text.split(separator) if part.strip())
        if len(parts) > 1:
            return "\0".join(parts)
    return None


def squeezed(text: str) -> str:
    return "".join(text.split())


def _is_bos(values: Sequence[str]) -> bool:
    return all(re.fullmatch(r"(<s>|<\|begin_of_text\|>|<bos>|<\|startoftext\|>)*", value) for value in values)


_TESTS: tuple[tuple[str, Callable[[Sequence[str]], bool]], ...] = (
    ("double_bos", _is_bos),
    ("whitespace", _same_but_for(lambda value: squeezed(value).strip(".:,"))),
    ("key_order", _same_but_for(canonical)),
)


def spelt_alike(values: Sequence[str]) -> bool:
    """Whether values say the same, and only spaces, key order or a repeated BOS token make them differ."""
    return any(test(values) for _, test in _TESTS)


def _clock(values: Sequence[str]) -> str | None:
    kinds: list[str] = []
    for value in values:
        if len(value) > 2 * LONGEST_CLOCK:
            continue
        found = clocks.matches(value)
        covered = sum(end - start for start, end, _ in found)
        if covered < 0.6 * len(value.strip()):
            continue
        kinds.append("clock_time" if any(kind == "clock_time" for _, _, kind in found) else "date")
    if len(kinds) < 0.8 * len(values):
        return None
    return max(set(kinds), key=kinds.count)


def _ticks(values: Sequence[str]) -> bool:
    """Whether the groups of digits rise in log order like a clock's: the last ones stay below 60 and wrap around."""
    if len(values) < 4 or max(map(len, values)) > LONGEST_CLOCK:
        return False
    groups = [tuple(int(group) for group in re.findall(r"\d+", value)[:8] if len(group) < 18) for value in values]
    width = len(groups[0])
    if width < 2 or any(len(group) != width for group in groups):
        return False
    orders = [tuple(range(width))]
    if width > 3:
        orders.append((2, 1, 0, *range(3, width)))
    rising = any(
        all(tuple(a[i] for i in order) <= tuple(b[i] for i in order) for a, b in itertools.pairwise(groups))
        for order in orders
    )
    moving = [i for i in range(width) if len({group[i] for group in groups}) > 1]
    if not moving:
        return False
    wraps = any(a[moving[-1]] > b[moving[-1]] for a, b in itertools.pairwise(groups))
    return rising and wraps and all(group[moving[-1]] < 60 for group in groups)


def _is_path(value: str) -> bool:
    value = value.strip()
    return _PATH.fullmatch(value) is not None and len(re.findall(r"[/\\]", value)) >= 2


def _numbers(values: Sequence[str]) -> bool:
    return all(re.fullmatch(r"\s*[#№]?\d+\s*", value) for value in values)


def _hex(values: Sequence[str]) -> bool:
    """Whether all are hexadecimal numbers of one length."""
    return len({len(value) for value in values}) == 1 and all(_HEX.fullmatch(value) for value in values)


def _counts(values: Sequence[str]) -> bool:
    """Whether the last number of the values goes up (or down) by small steps."""
    found = [re.findall(r"\d+", value) for value in values]
    if not all(found) or len({re.sub(r"\d+", "", value) for value in values}) > 1:
        return False
    numbers = [int(groups[-1]) for groups in found if len(groups[-1]) < 18]
    steps = [b - a for a, b in itertools.pairwise(numbers)]
    if len(numbers) != len(values) or not steps:
        return False
    one_way = all(step > 0 for step in steps) or all(step < 0 for step in steps)
    return one_way and max(map(abs, steps)) <= max(1000, 20 * min(map(abs, steps)))


def _hint(label: str) -> str | None:
    """The class that the last words before a value suggest; the nearest word counts."""
    best, where = None, -1
    for kind, pattern in _LABELS:
        for match in re.finditer(pattern, label.lower()):
            if match.start() > where:
                best, where = kind, match.start()
    return best


def _identifier(values: Sequence[str], varies: _Variation, hint: str | None) -> str:
    stripped = [value.strip() for value in values]
    if hint == "version" and not varies.each_request:
        return "version"
    if varies.each_session:
        return hint if hint in ("user_data", "hash", "session_id") else "session_id"
    if hint in ("session_id", "user_data", "hash", "request_id"):
        return hint
    if _counts(stripped) and (_numbers(stripped) or hint == "counter"):
        return "counter"
    if _mostly(stripped, lambda value: _HEX.fullmatch(value) is not None):
        if not varies.each_request or _mostly(stripped, lambda value: len(value) in (40, 64)):
            return "hash"
        return "request_id"
    if _counts(stripped):
        return "counter"
    if _numbers(stripped) and max(map(len, stripped)) < 5:
        return "other"
    return "request_id" if varies.each_request else "user_data"
