"""Dates and times of day as people and programs write them, in many languages."""

from __future__ import annotations

import re
from importlib import resources

_MONTHS, _WEEKDAYS = (
    (resources.files("anaphora.tools.doctor") / f"{name}.txt").read_text(encoding="utf-8").split()
    for name in ("months", "weekdays")
)


def _any(words: list[str]) -> str:
    return "(?:" + "|".join(sorted({re.escape(word) for word in words}, key=len, reverse=True)) + ")"


_MONTH = rf"{_any(_MONTHS)}\b\.?"
_WEEKDAY = rf"(?:\b{_any(_WEEKDAYS)}\b\.?,?\s+)?"
_ZONE = r"(?:\s?(?:Z\b|UTC|GMT|[A-Z]{2,4}T\b|MEZ|MESZ|UTC|МСК)(?:[+-]\d{1,2}(?::?\d\d)?)?|\s?[+-]\d\d:?\d\d\b)?"
_DATE = "|".join(
    (
        r"\b\d{4}(?P<s>[-/._])\d{1,2}(?P=s)\d{1,2}",
        r"\b\d{1,2}\.\s?\d{1,2}\.\s?(?:\d{4}|\d\d)\b",
        r"\b\d{1,2}(?P<t>[/-])\d{1,2}(?P=t)(?:\d{4}|\d\d)\b",
        rf"\b\d{{1,2}}(?:st|nd|rd|th|er|\.|º|ª)?[\s-](?:of\s|de\s|do\s)?{_MONTH}(?:[\s,-]*(?:de\s|del\s)?\d{{4}})?",
        rf"\b{_MONTH}\s\d{{1,2}}(?:st|nd|rd|th)?\b(?:,?\s?\d{{4}})?",
        rf"\b{_MONTH}\s\d{{4}}",
        r"\d{2,4}\s?[年년]\s?\d{1,2}\s?[月월]\s?\d{1,2}\s?[日일号]?",
        r"\b20\d\d(?:0[1-9]|1[0-2])(?:[0-2]\d|3[01])(?=\b|T|_)",
        r"\b\d{4}-W\d\d(?:-\d)?\b",
    )
)
_TIME = "|".join(
    (
        rf"\d{{1,2}}:\d\d(?::\d\d(?:[.,]\d+)?)?(?:\s?(?:[AaPp][Mm]\b|[AaPp]\.\s?[Mm]\.))?{_ZONE}(?:\s?(?:Uhr|heures|hrs|h)\b)?",
        r"\b\d{1,2}\s?[hH]\s?\d\d(?:\s?(?:m|min|mn|')?\s?\d\d\s?s?)?\b(?:\s?m(?:in)?\b)?",
        r"(?:上午|下午|오전|오후|午前|午後)?\s?\d{1,2}\s?[时時點点시:]\s?\d{1,2}\s?[分분]?(?:\s?\d{1,2}\s?[秒초])?",
        r"\b\d{1,2}(?:\.\d\d)?\s?(?:[AaPp][Mm]\b|[AaPp]\.\s?[Mm]\.|Uhr\b|o'clock)",
        r"(?<=\dT)\d{6}(?:\.\d+)?Z?|(?<=\d[_-])\d{6}\b",
        r"(?<=\d\s)\d{1,2}\.\d\d(?:\.\d\d)?\b",
    )
)
_EPOCH = r"\b1[5-9]\d{8}(?:[.]?\d{3,6}|\.\d+)?\b"
_BETWEEN = r"(?:T|\s*[,;@|·_-]?\s*(?:at|um|à|a las|alle|às|om|kl\.?|o|в|klo|saat)?\s*|\s*\([^)\n]{1,20}\)\s*)"

DATE = re.compile(_WEEKDAY + f"(?:{_DATE})", re.IGNORECASE)
TIME = re.compile(_TIME, re.IGNORECASE)
EPOCH = re.compile(_EPOCH)
_renamed = _DATE.replace("?P<s>", "?P<u>").replace("?P=s", "?P=u").replace("?P<t>", "?P<v>").replace("?P=t", "?P=v")
DATETIME = re.compile(
    f"{_WEEKDAY}(?:{_DATE}){_BETWEEN}(?:{_TIME})|(?:{_TIME}){_BETWEEN}{_WEEKDAY}(?:{_renamed})", re.IGNORECASE
)
NOW = re.compile(
    r"\b(?:current|currently|now|today|today's|present|as of|date|time|datetime|timestamp|clock|generated|updated"
    r"|heute|jetzt|aktuell\w*|datum|uhrzeit|stand|aujourd'hui|actuel\w*|heure|hoy|ahora|fecha|hora|actual|oggi|adesso"
    r"|data|ora|hoje|agora|vandaag|nu|tijd|dziś|dzisiaj|teraz|czas|сегодня|сейчас|время|дата|bugün|tarih|saat|idag)\b"
    r"|现在|今天|当前|時間|时间|日期|今日|現在|日時|오늘|현재|시간|날짜",
    re.IGNORECASE,
)
"""Words that say that a date or time is the present one."""


def matches(text: str) -> list[tuple[int, int, str]]:
    """Every date and time in a text as (start, end, ``clock_time`` or ``date``), in order, not overlapping."""
    found: list[tuple[int, int, str]] = []
    for pattern, kind in ((DATETIME, "clock_time"), (DATE, "date"), (TIME, "clock_time"), (EPOCH, "clock_time")):
        for match in pattern.finditer(text):
            start, end = match.span()
            if all(end <= s or start >= e for s, e, _ in found):
                found.append((start, end, kind))
    return sorted(found)
