"""Finds dates and times of day as people and programs write them, in many languages.

The names of months and weekdays are in months.txt and weekdays.txt, which scripts/cldr_names.py writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import resources


def _names(file: str) -> list[str]:
    """Reads the names of all languages from a file: one line a language, its code first."""
    lines = (resources.files("anaphora.tools.doctor.find") / file).read_text(encoding="utf-8").splitlines()
    return [name for line in lines if not line.startswith("#") for name in line.split()[1:]]


def _any(words: Iterable[str]) -> str:
    """Returns a pattern for any of the words, the longest that matches first; shared beginnings are tested once."""
    first_letters: dict[str, list[str]] = {}
    for word in sorted(set(words)):
        first_letters.setdefault(word[:1], []).append(word[1:])
    ends_here = first_letters.pop("", None) is not None
    branches = [re.escape(letter) + _any(rests) for letter, rests in first_letters.items()]
    if not branches:
        return ""
    pattern = branches[0] if len(branches) == 1 and not ends_here else f"(?:{'|'.join(branches)})"
    return f"{pattern}?" if ends_here else pattern


_MONTH = rf"{_any(_names('months.txt'))}(?!\w)\.?"
_DAY_NAME = (
    rf"(?:\b{_any(_names('weekdays.txt'))}(?!\w)\.?"
    r"|(?:星期|礼拜|禮拜|[周週])[一二三四五六日天]|[月火水木金土日]曜日?|[월화수목금토일]요일)"
)
_WEEKDAY = rf"(?:{_DAY_NAME},?\s+)?"
_ZONE = r"(?:\s?(?:Z\b|UTC|GMT|[A-Z]{2,4}T\b|MEZ|MESZ|МСК)(?:[+-]\d{1,2}(?::?\d\d)?)?|\s?[+-]\d\d:?\d\d\b)?"
_HALF = r"(?:\s?(?:AM\b|PM\b|A\.\s?M\.|P\.\s?M\.))"
_CJK_HALF = r"(?:(?:上午|下午|中午|凌晨|早上|晚上|오전|오후|午前|午後)\s?)?"
_CJK = r"(?:\d{1,4}|[〇零一二三四五六七八九十]{1,4})"
_DATE = "|".join(
    (
        r"(?<!\d)\d{4}(?P<s>[-/._])\d{1,2}(?P=s)\d{1,2}(?!\d)",
        r"(?<!\d)\d{1,2}\.\s?(?:0?[1-9]|1[0-2]|[٠-٩]{1,2})\.\s?(?:\d{4}|\d\d)(?!\d)",
        r"(?<!\d)\d{1,2}(?P<t>[/-])\d{1,2}(?P=t)(?:\d{4}|\d\d)(?!\d)",
        rf"(?<!\d)\d{{1,2}}(?:st|nd|rd|th|er|\.|º|ª)?[\s/-](?:of\s|de\s|do\s)?{_MONTH}(?:[\s,/-]*(?:de\s|del\s)?\d{{4}}(?:\sг\.)?)?",
        rf"\b{_MONTH}\s\d{{1,2}}(?:st|nd|rd|th)?(?![\d:])(?:,?\s?\d{{4}}\b)?",
        rf"\b{_MONTH}\s\d{{4}}",
        rf"(?:令和|平成|民國|民国)?\s?{_CJK}\s?[年년]\s?{_CJK}\s?[月월]\s?{_CJK}\s?[日일号號]?",
        r"(?<!\d)(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])(?!\d)",
        r"\b\d{4}-W\d\d(?:-\d)?\b",
    )
)
_TIME = "|".join(
    (
        rf"{_CJK_HALF}(?<!\d)\d{{1,2}}[:：]\d\d(?:[:：]\d\d(?:[.,]\d+)?)?{_HALF}?{_ZONE}(?:\s?(?:Uhr|heures|hrs|h)\b)?",
        r"(?<!\d)\d{1,2}\s?(?:h|heures?)\s?\d\d(?:\s?(?:m|min|mn|')?\s?\d\d\s?s?)?\b(?:\s?m(?:in)?\b)?",
        rf"{_CJK_HALF}{_CJK}\s?[时時點点시]\s?(?:{_CJK}\s?[分분](?:\s?{_CJK}\s?[秒초])?)?",
        rf"(?<!\d)\d{{1,2}}(?:\.\d\d){{0,2}}(?:{_HALF}|\s?Uhr\b|\s?o'clock)",
        r"(?<=\dT)\d{6}(?:\.\d+)?Z?|(?<=\d[_-])\d{6}(?!\d)",
        r"(?<=\d\s)\d{1,2}\.\d\d(?:\.\d\d)?\b",
    )
)
_EPOCH = r"(?<![\d.])1[5-8]\d{8}(?:\d{3}|\d{6}|\d{9}|\.\d+)?(?![\d])"
_COMPACT_DATE = r"(?<!\d)(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])"
_COMPACT = rf"{_COMPACT_DATE}[T_ -]?(?:[01]\d|2[0-3])[0-5]\d(?:[0-5]\d)?(?:\.\d+)?Z?(?!\d)"
_BETWEEN = (
    r"(?:T|\s*[,;:@|·_-]?\s*(?:at|um|à|a las|alle|às|om|kl\.?|o|в|klo|saat|il est)?\s*"
    rf"|\s*\([^)\n]{{1,20}}\)\s*|\s*{_DAY_NAME}\s*)"
)

DATE = re.compile(_WEEKDAY + f"(?:{_DATE})", re.IGNORECASE)
TIME = re.compile(f"(?:{_DAY_NAME},?\\s)?(?:{_TIME})", re.IGNORECASE)
EPOCH = re.compile(_EPOCH)
DAY_NAME = re.compile(rf"{_DAY_NAME}|\b{_MONTH}", re.IGNORECASE)
_renamed = _DATE.replace("?P<s>", "?P<u>").replace("?P=s", "?P=u").replace("?P<t>", "?P<v>").replace("?P=t", "?P=v")
DATETIME = re.compile(
    rf"{_WEEKDAY}(?:{_DATE}){_BETWEEN}(?:{_TIME})(?:\s(?:19|20)\d\d\b)?"
    rf"|(?:{_TIME}){_BETWEEN}{_WEEKDAY}(?:{_renamed})|{_COMPACT}",
    re.IGNORECASE,
)
NOW = re.compile(
    r"\b(?:current|currently|now|today|today's|present|as of|date|time|datetime|timestamp|clock|generated|updated"
    r"|heute|jetzt|aktuell\w*|datum|uhrzeit|stand|aujourd'hui|actuel\w*|heure|hoy|ahora|fecha|hora|actual|oggi|adesso"
    r"|data|ora|hoje|agora|vandaag|nu|tijd|dziś|dzisiaj|teraz|czas|сегодня|сейчас|время|дата|bugün|tarih|saat|idag)\b"
    r"|现在|今天|当前|時間|时间|日期|今日|現在|日時|오늘|현재|시간|날짜",
    re.IGNORECASE,
)
"""Words that mark a date or time as the present one."""


def matches(text: str) -> list[tuple[int, int, str]]:
    """Returns all dates and times in a text as (start, end, ``clock_time`` or ``date``), in order, not overlapping."""
    found: list[tuple[int, int, str]] = []
    for pattern, kind in ((DATETIME, "clock_time"), (DATE, "date"), (TIME, "clock_time"), (EPOCH, "clock_time")):
        for match in pattern.finditer(text):
            start, end = match.span()
            if all(end <= s or start >= e for s, e, _ in found):
                found.append((start, end, kind))
    return sorted(found)
