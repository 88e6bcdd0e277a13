"""Reads numbers as people write them: digits of any script, words, Chinese and Roman numerals."""

from __future__ import annotations

import re
from importlib import resources

_ROMAN = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100}
_ROMAN_NUMBER = re.compile(r"(?=.)C{0,3}(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3})")
_CHINESE = {digit: value for value, digit in enumerate("〇一二三四五六七八九")} | {"零": 0}
_CHINESE_NUMBER = re.compile("[〇零一二三四五六七八九十]+")
_GROUP = re.compile(r"\d+|[〇零一二三四五六七八九十]+")
_ORDINAL = re.compile(r"\d+(?:st|nd|rd|th|er|e|ème|\.|º|ª|ste|de)?", re.IGNORECASE)
_GROUPED = re.compile(r"\d{1,3}(?P<mark>[.,'’\s])(?:\d{2,3}(?P=mark))*\d{3}")
"""Digits in groups of three, in India of two above the thousands: ``1.234``, ``1 234 567``, ``12,34,567``."""
_JOINED = re.compile(r"[\s-]+(?:and|und|et|y)[\s-]+|[\s-]+|und", re.IGNORECASE)
MAX_DIGITS = 17
"""Longer numbers are ids, not quantities."""


def _words() -> dict[str, int]:
    lines = (resources.files("anaphora.tools.doctor.find") / "numerals.txt").read_text(encoding="utf-8").splitlines()
    known: dict[str, int] = {}
    for line in lines:
        start, step, *words = line.split()
        for index, word in enumerate(words):
            known.setdefault(word, int(start) + index * int(step))
    return known


_WORDS = _words()


def groups(text: str) -> tuple[int, ...]:
    """Returns every number in digits or Chinese numerals in a text, in order."""
    return tuple(_value(match[0]) for match in _GROUP.finditer(text) if len(match[0]) <= MAX_DIGITS)


def number(text: str) -> int | None:
    """Returns the number that the whole text is, however written, ordinals too; None if it is not a number."""
    text = text.strip(" \t\n.,:;#№()[]")
    if _ORDINAL.fullmatch(text):
        digits = re.match(r"\d+", text)
        return int(digits[0]) if digits and len(digits[0]) <= MAX_DIGITS else None
    if _GROUPED.fullmatch(text) and len(text) <= MAX_DIGITS:
        return int("".join(re.findall(r"\d+", text)))
    if _CHINESE_NUMBER.fullmatch(text):
        return _value(text)
    if _ROMAN_NUMBER.fullmatch(text):
        values = [_ROMAN[letter] for letter in text]
        return sum(-v if v < max(values[i:]) else v for i, v in enumerate(values))
    lower = text.lower()
    if lower in _WORDS:
        return _WORDS[lower]
    parts = [_WORDS.get(part) for part in _JOINED.split(lower)]
    return sum(part for part in parts if part is not None) if parts and None not in parts else None


def _value(text: str) -> int:
    if text[0] not in _CHINESE and text[0] != "十":
        return int(text)
    if "十" not in text:
        return int("".join(str(_CHINESE[digit]) for digit in text))
    tens, _, ones = text.partition("十")
    return 10 * (_CHINESE.get(tens[-1:], 1) if tens else 1) + (_CHINESE.get(ones[:1], 0) if ones else 0)
