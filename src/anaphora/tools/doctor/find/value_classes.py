"""What a changing part of a prompt is, told by how it changes; names beside it only break ties."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from anaphora.tools.doctor.find import dates_and_times, numerals
from anaphora.tools.doctor.find.patterns import common_prefix, common_suffix, squeezed
from anaphora.tools.doctor.find.variation import (
    LONGEST_CLOCK,
    Occurrence,
    Variation,
    counts,
    grows,
    how,
    keeps_time,
    ticks,
)

_UUID = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.IGNORECASE)
_HEX = re.compile(r"[0-9a-f]{5,}", re.IGNORECASE)
_PATH = re.compile(r"(?:[A-Za-z]:\\|\\\\|~?/|\.{1,2}/)?[\w.@ -]*(?:[/\\][\w.@+ -]+)+[/\\]?|[A-Za-z]:\\[\w.\\ -]*")
_ROOTED = re.compile(r"(?:[A-Za-z]:\\|\\\\|~?/|\.{1,2}/)\S*[/\\]")
"""The beginning of a path from a root, a home or the working folder."""
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
SHORTEST_PASSAGE = 40
"""Characters of a text that is no name nor a state, where it is another one in each request of a conversation."""
JUDGED_VALUES = 1000


@dataclass(frozen=True, slots=True)
class Verdict:
    """``kind`` is the class; ``varies`` says in words how the value changes over the log."""

    kind: str
    varies: str


def widen(text: str, start: int, end: int) -> tuple[int, int]:
    """The whole value of which ``text[start:end]`` changes: a date, an id, a path, a word."""
    covering: list[tuple[int, int]] = []
    token = _token(text, start, end)
    if end - start <= LONGEST_CLOCK:
        low, high = max(0, start - 90), min(len(text), end + 90)
        window = text[low:high]
        spans = [(s, e) for s, e, _ in dates_and_times.matches(window)]
        if _ROOTED.match(text, *token) is None:  # what changes in a path is part of the path
            spans += [m.span() for m in _UUID.finditer(window)]
        for found in (spans, [m.span() for m in dates_and_times.DAY_NAME.finditer(window)]):
            covering = covering or [(s + low, e + low) for s, e in found if s + low <= start and e + low >= end]
    if covering:
        return min(covering, key=lambda span: span[1] - span[0])
    return token


def _token(text: str, start: int, end: int) -> tuple[int, int]:
    """The word, number, id or path around ``text[start:end]``."""
    while start > 0 and _belongs(text[start - 1]):
        start -= 1
    while end < len(text) and _belongs(text[end]):
        end += 1
    while end > start and text[end - 1] in ".:,":
        end -= 1
    return start, end


def _belongs(character: str) -> bool:
    return _WORD.match(character) is not None and _NO_SPACES.match(character) is None


def classify(occurrences: Sequence[Occurrence], label: str) -> Verdict:
    """The class of a slot with at least two different values, in log order; ``label`` is the text before it."""
    values = list(dict.fromkeys(occurrence.value for occurrence in occurrences))[:JUDGED_VALUES]
    varies = how(occurrences)
    kind = _alike(values) or _time(occurrences, values, varies, label)
    if kind is not None:
        return Verdict(kind, varies.text)
    if _same_but_for(items)(values) and _mostly(values, lambda value: len(value) >= 40):
        listed = re.search(r"tool|function|werkzeug|outil|herramient", f"{label}{values[0]}", re.IGNORECASE)
        return Verdict("tool_order" if listed else "retrieved_text", f"{varies.text}; the same parts in another order")
    if _mostly(values, _is_path):
        return Verdict("path", varies.text)
    label, values = _bare(label, [value.strip() for value in values])
    return Verdict(_named(occurrences, values, varies, _hint(label)), varies.text)


def describe(occurrences: Sequence[Occurrence]) -> str:
    """In words how a value changes over a log."""
    return how(occurrences).text


def _named(occurrences: Sequence[Occurrence], values: Sequence[str], varies: Variation, hint: str | None) -> str:
    """The class of what is neither time nor path: versions, counters, ids, texts, names."""
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
    long = SHORTEST_PASSAGE if varies.within and hint != "user_data" else LONG_TEXT
    if _mostly(values, lambda value: len(value) >= long) and not varies.each_session:
        return "user_data" if grows(occurrences) else "retrieved_text"
    if hint in ("session_id", "request_id") and _mostly(values, lambda value: bool(re.search(r"\d", value))):
        return hint
    if varies.within and not varies.stretches and hint != "user_data" and not grows(occurrences):
        return "other"  # a conversation has one user
    return "user_data" if _mostly(values, lambda v: bool(re.search(r"[^\W\d]", v))) else "other"


def _bare(label: str, values: Sequence[str]) -> tuple[str, Sequence[str]]:
    """What all values begin with, up to a mark such as ``:`` or ``_``, belongs to the label: ``req_``, ``md5:``."""
    first = min(values)
    common = first[: common_prefix(first, max(values))]
    match = re.match(r".*(?:\b[^\W\d]\w*[:=@]|\b[^\W\d_]+[_-])", common)
    at = match.end() if match and all(len(value) > match.end() for value in values) else 0
    return label + common[:at], [value[at:] for value in values]


# --- Time ------------------------------------------------------------------------------------------------------------


def _time(occurrences: Sequence[Occurrence], values: Sequence[str], varies: Variation, label: str) -> str | None:
    """A clock's time, a date, or the time of a release; None where the values are no times."""
    kind = _clock(values)
    if kind != "clock_time" and not varies.each_session and (ticks(values) or keeps_time(occurrences)):
        kind = "clock_time"
    if kind is None:
        return None
    if (varies.stretches or len(values) == len(occurrences) <= 3) and _is_release(values, kind, label):
        return "version"
    return kind


def _is_release(values: Sequence[str], kind: str, label: str) -> bool:
    """Whether a time that stays for many requests is one of a release: by its name, or as a clock would not jump so."""
    days = [match[0] if (match := dates_and_times.DATE.search(value)) else "" for value in values]
    jumps = all(days) and all(a != b for a, b in itertools.pairwise(days))
    return jumps and (kind == "clock_time" or _UPDATED.search(label) is not None)


def _clock(values: Sequence[str]) -> str | None:
    if all(dates_and_times.DAY_NAME.fullmatch(value.strip()) for value in values):
        return "date"
    kinds: list[str] = []
    for value in values:
        if len(value) > 2 * LONGEST_CLOCK:
            continue
        found = dates_and_times.matches(value)
        covered = sum(end - start for start, end, _ in found)
        if covered < 0.6 * len(value.strip()):
            continue
        kinds.append("clock_time" if any(kind == "clock_time" for _, _, kind in found) else "date")
    if len(kinds) < 0.8 * len(values):
        return None
    return max(set(kinds), key=kinds.count)


# --- What it is ------------------------------------------------------------------------------------------------------


def _mostly(values: Sequence[str], test: Callable[[str], bool]) -> bool:
    return sum(map(test, values)) >= 0.8 * len(values)


def _same_but_for(key: Callable[[str], Any]) -> Callable[[Sequence[str]], bool]:
    """Whether ``key`` makes several values equal, for nearly all of them."""

    def test(values: Sequence[str]) -> bool:
        keys = [key(value) for value in values]
        return len(values) > 1 and None not in keys and len(set(keys)) <= max(1, len(values) // 3)

    return test


def canonical(text: str, sets: Collection[str] = ()) -> str | None:
    """A JSON object or array with its keys sorted, and the lists under the keys ``sets``; None for other text."""
    if text.strip()[:1] not in ("{", "["):
        return None
    try:
        found = json.loads(text, object_hook=partial(_unordered, sets=sets) if sets else None)
        return json.dumps(found, sort_keys=True)
    except (ValueError, RecursionError):
        return None


def _unordered(found: dict[str, Any], sets: Collection[str]) -> dict[str, Any]:
    for key in sets:
        if isinstance(value := found.get(key), list):
            found[key] = sorted(value, key=json.dumps)
    return found


def items(text: str) -> str | None:
    """The parts of a list in sorted order (lines, or what commas part); None where there are fewer than two."""
    for separator in ("\n\n", "\n", ",", ";"):
        parts = sorted(part.strip() for part in text.split(separator) if part.strip())
        if len(parts) > 1:
            return "\0".join(parts)
    return None


def _is_bos(values: Sequence[str]) -> bool:
    shortest = min(values, key=len)
    same = min(common_suffix(shortest, value, len(shortest)) for value in values)
    return all(_BOS.fullmatch(value, 0, len(value) - same) for value in values)


_ALIKE: tuple[tuple[str, Callable[[Sequence[str]], bool]], ...] = (
    ("double_bos", _is_bos),
    ("whitespace", _same_but_for(lambda value: squeezed(value).strip(".:,"))),
    ("key_order", _same_but_for(canonical)),
)


def _alike(values: Sequence[str]) -> str | None:
    return next((kind for kind, test in _ALIKE if test(values)), None)


def are_times(values: Sequence[str]) -> bool:
    """Whether the values are dates or times, be they of other months, whose names differ."""
    return _clock(values) is not None


def spelt_alike(values: Sequence[str]) -> bool:
    """Whether values say the same, and only spaces, key order or a repeated BOS token make them differ."""
    return _alike(values) is not None


def _is_path(value: str) -> bool:
    value = value.strip()
    return _PATH.fullmatch(value) is not None and len(re.findall(r"[/\\]", value)) >= 2


def _numbers(values: Sequence[str]) -> bool:
    return all(numerals.number(value) is not None for value in values)


def _coded(values: Sequence[str]) -> bool:
    """Whether the values are codes rather than words: with digits, very long, or all different in one length."""
    if _mostly(values, lambda value: _IDENTIFIER.fullmatch(value) is not None):
        return True
    one_word = all(re.fullmatch(r"[\w-]{5,}", value) for value in values)
    return (
        one_word and len({len(value) for value in values}) == 1 and (len(values) > 5 or not _mostly(values, _is_word))
    )


def _is_word(value: str) -> bool:
    return re.fullmatch(r"[^\W\d_]?[^\W\d_A-Z]*|[^\W\d_a-z]*", value) is not None


def _hex(values: Sequence[str]) -> bool:
    """Whether all are hexadecimal numbers of one length."""
    return len({len(value) for value in values}) == 1 and all(_HEX.fullmatch(value) for value in values)


def _hint(label: str) -> str | None:
    """The class that the last words before a value suggest; the nearest word counts."""
    best, where = None, -1
    for kind, pattern in _LABELS:
        for match in re.finditer(pattern, label.lower()):
            if match.start() > where:
                best, where = kind, match.start()
    return best


def _identifier(values: Sequence[str], varies: Variation, hint: str | None) -> str:
    if hint == "version" and not varies.each_request:
        return "version"
    if varies.each_session and not varies.of_few:
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
