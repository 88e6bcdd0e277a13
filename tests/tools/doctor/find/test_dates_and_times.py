"""Dates and times in many languages; the names of months and weekdays are those that scripts/cldr_names.py writes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import re
from importlib import resources
from pathlib import Path
from types import ModuleType

import pytest

from anaphora.tools.doctor.find import dates_and_times

SCRIPT = Path(__file__).resolve().parents[4] / "scripts" / "cldr_names.py"
FOLDER = resources.files("anaphora.tools.doctor.find")


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cldr_names", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_files_of_names_are_those_that_the_script_writes() -> None:
    pytest.importorskip("babel", reason="without babel it is unproved that the files of names come from CLDR unchanged")
    written = re.search(r"babel (\S+)", (FOLDER / "months.txt").read_text("utf-8"))
    assert written is not None
    if written[1] != importlib.metadata.version("babel"):
        pytest.skip(f"the files were written with babel {written[1]}; another version has other CLDR data")
    for name, make in script().FILES.items():
        assert (FOLDER / name).read_text("utf-8") == make(), name


@pytest.mark.parametrize(
    "text",
    [
        "3 September 2026", "12 Sept. 2026", "3. März 2025", "3. Jänner 2025", "4 février 2025", "1 de enero de 2026",
        "14 settembre 2026", "7 de março de 2026", "3 augustus 2026", "5 października 2026", "9 сентября 2026 г.",
        "9 вересня 2026", "5 ağustos 2026", "1. srpna 2026", "12 กันยายน 2026", "12 سبتمبر 2026", "12 ספטמבר 2026",
        "12 मई 2026", "12 Σεπτεμβρίου 2026", "3 iunie 2026", "6 szeptember 2026", "6. syyskuuta 2026", "6 septembris",
        "6 rujna 2026", "6 rugsėjo 2026", "setiembre 2026", "6 abril 2026", "October 3, 2026",
    ],
)  # fmt: skip
def test_dates_of_many_languages(text: str) -> None:
    start = next(i for i, c in enumerate(text) if c.isalnum())
    assert [(s, kind) for s, _, kind in dates_and_times.matches(text)] == [(start, "date")]
    assert dates_and_times.matches(f"{text} 10:15:02")[0][2] == "clock_time"


@pytest.mark.parametrize("text", ["Tues", "Sonnabend", "mercredi", "วันพุธ", "शुक्रवार", "الإثنين", "четвер", "petak"])
def test_names_of_days(text: str) -> None:
    assert dates_and_times.DAY_NAME.fullmatch(text) is not None
    assert dates_and_times.DAY_NAME.fullmatch(text.upper()) is not None


def test_a_word_that_begins_with_a_name_is_not_one() -> None:
    for text in ("maybe", "marching", "sunny", "decision", "mais", "12 marketing 2026"):
        assert dates_and_times.DAY_NAME.search(text) is None, text
        assert dates_and_times.matches(text) == []


def test_the_pattern_for_words_matches_exactly_the_words() -> None:
    letters = ["".join(parts) for n in range(1, 5) for parts in itertools.product("ab.", repeat=n)]
    words = letters[3::4]
    pattern = re.compile(dates_and_times._any(words))
    assert [text for text in letters if pattern.fullmatch(text)] == words
    for text in letters:
        longest = max((word for word in words if text.startswith(word)), key=len, default=None)
        found = pattern.match(text)
        assert (found[0] if found else None) == longest
