"""Real sentences for prompts: policies, questions, answers, articles and code, combined by a seed."""

from __future__ import annotations

import functools
import random
import re
import string
from collections.abc import Iterator
from importlib import resources

import msgspec

_PIECE = re.compile(r"\s*\S+")


@functools.cache
def _passages(name: str) -> tuple[string.Template, ...]:
    text = (resources.files(__package__) / "texts" / f"{name}.txt").read_text(encoding="utf-8").strip()
    separator = r"\n\n(?=\S)" if "\n\n" in text else r"\n"
    return tuple(string.Template(part) for part in re.split(separator, text))


@functools.cache
def _values() -> dict[str, list[str]]:
    raw = (resources.files(__package__) / "texts" / "values.json").read_bytes()
    return msgspec.json.decode(raw, type=dict[str, list[str]])


class Writer:
    """Generates texts from one seed; the same seed gives the same texts."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self.company = self._random.choice(_values()["company"])
        self.code = f"{self._random.randrange(16**6):06X}"

    def passages(self, name: str) -> Iterator[str]:
        """Yields all passages of a kind in random order, then again with other names and numbers, without end."""
        known = list(_passages(name))
        while True:
            self._random.shuffle(known)
            for passage in known:
                yield passage.substitute(self._slots())

    def pieces(self, name: str, count: int, between: str = " ", start: str = "") -> list[str]:
        """Returns ``count`` words of passages, each with the white space before it: joined they are the text."""
        found = _PIECE.findall(start)
        for passage in self.passages(name):
            if len(found) >= count:
                break
            found += _PIECE.findall((between if found else "") + passage)
        return found[:count]

    def _slots(self) -> dict[str, str]:
        pick = self._random
        chosen = {name: pick.choice(values) for name, values in _values().items()}
        return chosen | {
            "company": self.company,
            "Noun": chosen["noun"].capitalize(),
            "days": str(pick.randint(7, 60)),
            "amount": str(pick.randint(15, 480)),
            "percent": str(pick.randint(3, 30)),
            "order": f"{pick.choice('ABCDEFGH')}{pick.randint(100000, 999999)}",
        }


def opening(kind: str, writer: Writer) -> str:
    """Returns the first line of a system prompt; two writers differ from its first word on."""
    if kind == "snippets":
        return f"{writer.code.lower()} is the commit of the repository {writer.company}. Go on at the cursor.\n\n"
    return f"{writer.code} is the edition of this handbook of {writer.company}.\n\n"
