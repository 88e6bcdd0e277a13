"""Writes the names of months and weekdays that the doctor knows, from the CLDR data in babel.

    python scripts/cldr_names.py

writes months.txt, weekdays.txt and the licence of the data to src/anaphora/tools/doctor/find. One line a language: its
code, then its names in lower case. Wide names come from all LANGUAGES. Abbreviated names come from few of them, because
many are words of another language ("pet" is Friday in Croatian). EXTRA has spellings that people use and CLDR lacks.
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import babel

FOLDER = Path(__file__).resolve().parent.parent / "src" / "anaphora" / "tools" / "doctor" / "find"
LANGUAGES = (
    *("en", "de", "fr", "es", "it", "pt", "nl", "pl", "ru", "uk", "da", "nb", "sv", "tr", "cs", "th", "ar", "he", "hi"),
    *("el", "ro", "hu", "fi", "id", "bg", "ca", "et", "fa", "hr", "lt", "lv", "sk", "sl", "sr"),
)
"""Chinese, Japanese, Korean and Vietnamese are not here: they write months as numbers, which a pattern finds."""
ABBREVIATED = {"months": ("en", "de", "fr", "es", "it", "pt"), "days": ("en",)}
MIN_LENGTH = 3
EXTRA = {
    "months": {"en": "sept", "de": "jän jänner mrz", "fr": "aout fevrier", "es": "setiembre", "ar": "إبريل",
               "hi": "मई फरवरी अक्तूबर"},
    "days": {"en": "tues thur thurs", "de": "sonnabend", "ar": "الإثنين"},
}  # fmt: skip
_NAME = re.compile(r"[^\W\d_][^\s\d.]*")
"""One word without digits; \\w would leave out the vowel signs of Thai and Hindi."""
_OF = re.compile("^d['’]")


def names(kind: str, language: str) -> list[str]:
    """Returns the names of months or days (``kind``) in a language, then those of EXTRA; lower case, each once."""
    widths = ("wide", "abbreviated") if language in ABBREVIATED[kind] else ("wide",)
    forms = getattr(babel.Locale(language), kind)
    tables = [forms[form][width] for width in widths for form in ("format", "stand-alone")]
    found = [table[number].rstrip(".").lower() for table in tables for number in sorted(table)]
    found = [_OF.sub("", name) for name in found]
    usable = [name for name in found if len(name) >= MIN_LENGTH and _NAME.fullmatch(name)]
    return list(dict.fromkeys((*usable, *EXTRA[kind].get(language, "").split())))


def text_of(kind: str) -> str:
    """Returns the file for ``months`` or ``days``."""
    header = f"# CLDR (Unicode licence: CLDR-LICENSE.txt) by babel {importlib.metadata.version('babel')}\n"
    lines = ((language, names(kind, language)) for language in LANGUAGES)
    return header + "".join(f"{language} {' '.join(words)}\n" for language, words in lines if words)


def licence() -> str:
    """Returns the licence of the CLDR data."""
    return (Path(babel.__file__).parent / "locale-data" / "LICENSE.unicode").read_text(encoding="utf-8")


FILES = {"months.txt": lambda: text_of("months"), "weekdays.txt": lambda: text_of("days"), "CLDR-LICENSE.txt": licence}


if __name__ == "__main__":
    for name, make in FILES.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")
