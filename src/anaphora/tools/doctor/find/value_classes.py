"""Classifies values that change, such as ``clock_time`` or ``request_id``, by how they change, then by their label."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from anaphora.tools.doctor.find import dates_and_times, numerals
from anaphora.tools.doctor.find.patterns import common_prefix, common_suffix, without_spaces
from anaphora.tools.doctor.find.variation import (
    MAX_CLOCK_LENGTH,
    Occurrence,
    Variation,
    counts,
    follows_log_times,
    grows,
    ticks,
    variation_of,
)

_UUID = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.IGNORECASE)
_HEX = re.compile(r"[0-9a-f]{5,}", re.IGNORECASE)
_PATH = re.compile(r"(?:[A-Za-z]:\\|\\\\|~?/|\.{1,2}/)?[\w.@ -]*(?:[/\\][\w.@+ -]+)+[/\\]?|[A-Za-z]:\\[\w.\\ -]*")
_ROOTED = re.compile(r"(?:[A-Za-z]:\\|\\\\|~?/|\.{1,2}/)\S*[/\\]")
"""The beginning of a path from a root, a home or the working directory."""
_VERSION = re.compile(r"v?\d+\.\d+(?:\.\d+)*(?:[-+.][\w.]+)?", re.IGNORECASE)
_BOS = re.compile(r"(<s>|<\|begin_of_text\|>|<bos>|<\|startoftext\|>)*")
_MEASURE = re.compile(r"[+-]?\d+[.,]\d+\s?[%\w°€$]{0,3}")
_WORD = re.compile(r"[\w@+\-./\\:~]")
_NO_SPACES = re.compile("[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")
"""Scripts that write no spaces between words."""
_IDENTIFIER = re.compile(r"(?=.*\d)[\w\-:.+/=]{4,}|[\w-]{16,}")
_UPDATED = re.compile(
    r"updat|modif|chang|releas|built|build|revis|version|deploy|edited|publish|effective|geändert"
    r"|aktualisiert|mise? à jour|actualizad|aggiornat|bijgewerkt|更新|改訂|обновл",
    re.IGNORECASE,
)
_LABELS = (
    ("version", r"version|build|release|revision|\brev\b|deploy|commit"),
    ("hash", r"hash|sha\d*|digest|checksum|etag|md5|fingerprint|crc"),
    ("session_id", r"session|sitzung|conversation|thread|chat|dialog|séance|sesi[oó]n"),
    ("request_id", r"request|\breq|trace|span|run|nonce|correlation|invocation|message|uuid|ticket|job"),
    ("user_data", r"user|customer|account|client|tenant|member|name|email|kunde|nutzer|utilisateur|usuario|cliente"),
    ("counter", r"count|counter|turn|step|sequence|\bseq\b|attempt|iteration|number|\bno\b|#"),
)
LONG_TEXT = 160
"""Characters; a value of this length is a text, such as a retrieved document."""
MIN_PASSAGE = 40
"""The same for a value that is different in each request of a conversation, as names and states are not."""
MAX_VALUES = 1000


@dataclass(frozen=True, slots=True)
class Verdict:
    """The class of a value, and in words how it changes over the log."""

    kind: str
    varies: str


def widen(text: str, start: int, end: int) -> tuple[int, int]:
    """Returns the span of the whole date, time, id, path or word that contains ``text[start:end]``."""
    covering: list[tuple[int, int]] = []
    token = _token(text, start, end)
    if end - start <= MAX_CLOCK_LENGTH:
        low, high = max(0, start - 90), min(len(text), end + 90)
        window = text[low:high]
        spans = [(s, e) for s, e, _ in dates_and_times.matches(window)]
        if _ROOTED.match(text, *token) is None:  # a UUID in a path is part of the path
            spans += [m.span() for m in _UUID.finditer(window)]
        for found in (spans, [m.span() for m in dates_and_times.DAY_NAME.finditer(window)]):
            covering = covering or [(s + low, e + low) for s, e in found if s + low <= start and e + low >= end]
    if covering:
        return min(covering, key=lambda span: span[1] - span[0])
    return token


def _token(text: str, start: int, end: int) -> tuple[int, int]:
    """Returns the span of the word, number, id or path around ``text[start:end]``."""
    while start > 0 and _is_token_character(text[start - 1]):
        start -= 1
    while end < len(text) and _is_token_character(text[end]):
        end += 1
    while end > start and text[end - 1] in ".:,":
        end -= 1
    return start, end


def _is_token_character(character: str) -> bool:
    return _WORD.match(character) is not None and _NO_SPACES.match(character) is None


def classify(occurrences: Sequence[Occurrence], label: str) -> Verdict:
    """Classifies a varying span that has at least two different values.

    ``occurrences`` are in log order, ``label`` is the text before the span.
    """
    values = list(dict.fromkeys(occurrence.value for occurrence in occurrences))[:MAX_VALUES]
    varies = variation_of(occurrences)
    kind = _spelling_class(values) or _time_class(occurrences, values, varies, label)
    if kind is not None:
        return Verdict(kind, varies.text)
    if _mostly_equal(sorted_items)(values) and _mostly(values, lambda value: len(value) >= MIN_PASSAGE):
        listed = re.search(r"tool|function|werkzeug|outil|herramient", f"{label}{values[0]}", re.IGNORECASE)
        return Verdict("tool_order" if listed else "retrieved_text", f"{varies.text}; the same parts in another order")
    if _mostly(values, _is_path):
        return Verdict("path", varies.text)
    label, stripped = _label_and_values(label, [value.strip() for value in values])
    return Verdict(_other_class(occurrences, stripped, varies, _hint(label)), varies.text)


def describe(occurrences: Sequence[Occurrence]) -> str:
    """Says in words how a value changes over a log."""
    return variation_of(occurrences).text


def _other_class(occurrences: Sequence[Occurrence], values: Sequence[str], varies: Variation, hint: str | None) -> str:
    """Returns the class of what is neither a time nor a path: a version, counter, id, text or name."""
    few = varies.stretches or len(values) <= max(2, len(occurrences) // 3)
    if hint == "version" and few and not varies.each_request:
        return "version"
    if (few or len(occurrences) <= 3) and _mostly(values, lambda value: _VERSION.fullmatch(value) is not None):
        return "version"
    if counts(values) and hint not in ("session_id", "user_data") and not varies.each_session:
        return "counter"
    if _mostly(values, lambda value: _MEASURE.fullmatch(value) is not None):
        return "other"
    if _coded(values) or _numbers(values) or _hex(values):
        return _identifier(values, varies, hint)
    long = MIN_PASSAGE if varies.within and hint != "user_data" else LONG_TEXT
    if _mostly(values, lambda value: len(value) >= long) and not varies.each_session:
        return "user_data" if grows(occurrences) else "retrieved_text"
    if hint in ("session_id", "request_id") and _mostly(values, lambda value: bool(re.search(r"\d", value))):
        return hint
    if varies.within and not varies.stretches and hint != "user_data" and not grows(occurrences):
        return "other"  # a conversation has one user
    return "user_data" if _mostly(values, lambda v: bool(re.search(r"[^\W\d]", v))) else "other"


def _label_and_values(label: str, values: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Moves what all values begin with, up to ``:``, ``=``, ``_`` or the like, to the label: ``req_``, ``md5:``."""
    first = min(values)
    common = first[: common_prefix(first, max(values))]
    match = re.match(r".*(?:\b[^\W\d]\w*[:=@]|\b[^\W\d_]+[_-])", common)
    at = match.end() if match and all(len(value) > match.end() for value in values) else 0
    return label + common[:at], [value[at:] for value in values]


# --- Time ------------------------------------------------------------------------------------------------------------


def _time_class(occurrences: Sequence[Occurrence], values: Sequence[str], varies: Variation, label: str) -> str | None:
    """Returns ``clock_time``, ``date``, or ``version`` for the time of a release; None if the values are not times."""
    kind = _written_time(values)
    if kind != "clock_time" and not varies.each_session and (ticks(values) or follows_log_times(occurrences)):
        kind = "clock_time"
    if kind is None:
        return None
    if (varies.stretches or len(values) == len(occurrences) <= 3) and _is_release(values, kind, label):
        return "version"
    return kind


def _is_release(values: Sequence[str], kind: str, label: str) -> bool:
    """Tells whether a time that stays for many requests is that of a release: by its label, or because days change."""
    days = [match[0] if (match := dates_and_times.DATE.search(value)) else "" for value in values]
    jumps = all(days) and all(a != b for a, b in itertools.pairwise(days))
    return jumps and (kind == "clock_time" or _UPDATED.search(label) is not None)


def _written_time(values: Sequence[str]) -> str | None:
    """Returns ``clock_time`` or ``date`` if most values are written as such; else None."""
    if all(dates_and_times.DAY_NAME.fullmatch(value.strip()) for value in values):
        return "date"
    kinds: list[str] = []
    for value in values:
        if len(value) > 2 * MAX_CLOCK_LENGTH:
            continue
        found = dates_and_times.matches(value)
        covered = sum(end - start for start, end, _ in found)
        if covered < 0.6 * len(value.strip()):
            continue
        kinds.append("clock_time" if any(kind == "clock_time" for _, _, kind in found) else "date")
    if len(kinds) < 0.8 * len(values):
        return None
    return max(set(kinds), key=kinds.count)


# --- Values with the same meaning ------------------------------------------------------------------------------------


def _mostly(values: Sequence[str], test: Callable[[str], bool]) -> bool:
    return sum(map(test, values)) >= 0.8 * len(values)


def _mostly_equal(normal_form: Callable[[str], Any]) -> Callable[[Sequence[str]], bool]:
    """Returns a test: whether the normal forms of the values are mostly equal."""

    def test(values: Sequence[str]) -> bool:
        forms = [normal_form(value) for value in values]
        return len(values) > 1 and None not in forms and len(set(forms)) <= max(1, len(values) // 3)

    return test


def canonical_json(text: str, unordered: Collection[str] = ()) -> str | None:
    """Returns a JSON object or array with its keys sorted; None for other text.

    Lists under the keys ``unordered`` are sorted too.
    """
    if text.strip()[:1] not in ("{", "["):
        return None
    try:
        found = json.loads(text, object_hook=partial(_sort_lists, keys=unordered) if unordered else None)
        return json.dumps(found, sort_keys=True)
    except (ValueError, RecursionError):
        return None


def _sort_lists(found: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    for key in keys:
        if isinstance(value := found.get(key), list):
            found[key] = sorted(value, key=json.dumps)
    return found


def sorted_items(text: str) -> str | None:
    """Returns the items of a list (lines, or between commas) in sorted order; None if there are fewer than two."""
    for separator in ("\n\n", "\n", ",", ";"):
        parts = sorted(part.strip() for part in text.split(separator) if part.strip())
        if len(parts) > 1:
            return "\0".join(parts)
    return None


def _is_bos(values: Sequence[str]) -> bool:
    shortest = min(values, key=len)
    same = min(common_suffix(shortest, value, len(shortest)) for value in values)
    return all(_BOS.fullmatch(value, 0, len(value) - same) for value in values)


_SPELLING_TESTS: tuple[tuple[str, Callable[[Sequence[str]], bool]], ...] = (
    ("double_bos", _is_bos),
    ("whitespace", _mostly_equal(lambda value: without_spaces(value).strip(".:,"))),
    ("key_order", _mostly_equal(canonical_json)),
)


def _spelling_class(values: Sequence[str]) -> str | None:
    return next((kind for kind, test in _SPELLING_TESTS if test(values)), None)


def say_the_same(values: Sequence[str]) -> bool:
    """Tells whether values differ only in spaces, in the order of JSON keys, or in a repeated BOS token."""
    return _spelling_class(values) is not None


def are_times(values: Sequence[str]) -> bool:
    """Tells whether the values are dates or times, in whatever language."""
    return _written_time(values) is not None


# --- Ids, codes, words -----------------------------------------------------------------------------------------------


def _is_path(value: str) -> bool:
    value = value.strip()
    return _PATH.fullmatch(value) is not None and len(re.findall(r"[/\\]", value)) >= 2


def _numbers(values: Sequence[str]) -> bool:
    return all(numerals.number(value) is not None for value in values)


def _coded(values: Sequence[str]) -> bool:
    """Tells whether the values are codes rather than words: with digits, very long, or all of one length."""
    if _mostly(values, lambda value: _IDENTIFIER.fullmatch(value) is not None):
        return True
    one_word = all(re.fullmatch(r"[\w-]{5,}", value) for value in values)
    return (
        one_word and len({len(value) for value in values}) == 1 and (len(values) > 5 or not _mostly(values, _is_word))
    )


def _is_word(value: str) -> bool:
    return re.fullmatch(r"[^\W\d_]?[^\W\d_A-Z]*|[^\W\d_a-z]*", value) is not None


def _hex(values: Sequence[str]) -> bool:
    """Tells whether all values are hexadecimal numbers of one length."""
    return len({len(value) for value in values}) == 1 and all(_HEX.fullmatch(value) for value in values)


def _hint(label: str) -> str | None:
    """Returns the class that the label suggests; the word nearest to the value counts."""
    best, nearest = None, -1
    for kind, pattern in _LABELS:
        for match in re.finditer(pattern, label.lower()):
            if match.start() > nearest:
                best, nearest = kind, match.start()
    return best


def _identifier(values: Sequence[str], varies: Variation, hint: str | None) -> str:
    """Returns the class of ids, numbers and codes: whose id it is, from how it changes and from its label."""
    if hint == "version" and not varies.each_request:
        return "version"
    if varies.each_session and not varies.reused:
        return hint if hint in ("user_data", "hash", "session_id") else "session_id"
    if hint == "hash" or (hint in ("session_id", "user_data", "request_id") and not varies.each_session):
        return hint
    if _mostly(values, lambda value: _HEX.fullmatch(value) is not None) and not _mostly(values, str.isdecimal):
        if not varies.each_request or _mostly(values, lambda value: len(value) in (40, 64)):
            return "hash"
        return "request_id"
    if _numbers(values) and max(map(len, values)) < 5:
        return "other"
    return "request_id" if varies.each_request else "user_data"
