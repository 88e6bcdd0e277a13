"""A place where prompts stop being the same, before and after it is known what mending it would save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from anaphora.tools.doctor.read.prompts import Prompt, Run

KEPT_SAMPLES = 5
SAMPLE_LENGTH = 200


class Rewriter(Protocol):
    """Repairs of one kind as they act on prompts, to be asked in log order after ``reset``."""

    def reset(self) -> None: ...

    def apply(self, prompt: Prompt, runs: list[Run]) -> list[Run]:
        """The mended runs; ``runs`` itself where nothing changes."""
        ...


@dataclass(slots=True)
class Repair:
    """One way to mend a finding. ``advice`` says it in words; ``place`` is a short name of where the text goes.

    ``switch`` turns it on or off in its stage. ``rewrites`` tells whether a log's bodies can be rewritten so without
    changing what they say.
    """

    place: str
    advice: str
    switch: Callable[[bool], None]
    rewrites: bool = True


@dataclass(slots=True)
class Finding:
    """``start`` and ``end`` are characters of the message's text; ``context`` shows it as (text, changing?) pairs.

    ``order`` is where it stands in a prompt (message, character), ``seen`` in how many requests it differs.
    """

    kind: str
    status: str
    message: int
    role: str
    path: str
    start: int
    end: int
    samples: list[str]
    repairs: list[Repair]
    seen: int
    line: int
    varies: str = ""
    context: list[tuple[str, bool]] = field(default_factory=list)
    note: str = ""

    @property
    def order(self) -> tuple[int, int]:
        return self.message, self.start


def shown(samples: Sequence[str]) -> list[str]:
    """Some different values, shortened."""
    return [value if len(value) <= SAMPLE_LENGTH else value[: SAMPLE_LENGTH - 1] + "…" for value in samples][
        :KEPT_SAMPLES
    ]


def around(text: str, start: int, end: int, room: int = 60) -> list[tuple[str, bool]]:
    """A changing part with some of the text on both sides."""
    before = ("…" if start > room else "") + text[max(0, start - room) : start]
    value = text[start:end] if end - start <= 2 * room else text[start : start + 2 * room] + "…"
    after = text[end : end + room] + ("…" if len(text) > end + room else "")
    return [(before, False), (value, True), (after, False)]
