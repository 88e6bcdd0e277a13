"""Findings: where prompts stop being the same, what changes there, and how it could be repaired."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from anaphora.text.outline import TOOLS
from anaphora.tools.doctor.find.patterns import Span
from anaphora.tools.doctor.read.prompts import Prompt, Run, Segment

MAX_SAMPLES = 5
SAMPLE_LENGTH = 200
CONTEXT_LENGTH = 60


class Rewriter(Protocol):
    """Applies the repairs of one kind that are switched on. Call ``reset``, then ``apply`` in log order."""

    def reset(self) -> None: ...

    def apply(self, prompt: Prompt, runs: list[Run]) -> list[Run]:
        """Returns the repaired runs, or ``runs`` itself if nothing changes."""
        ...


@dataclass(slots=True)
class Repair:
    """One way to repair a finding.

    ``destination`` is a short name of where the text goes, ``advice`` the repair in words. ``switch`` turns it on or
    off in its rewriter. ``rewrites`` is False if ``--fix`` cannot rewrite request bodies that way without changing what
    they say.
    """

    destination: str
    advice: str
    switch: Callable[[bool], None]
    rewrites: bool = True


@dataclass(frozen=True, slots=True)
class Location:
    """Where a finding is: characters ``start`` to ``end`` of a message's text (TOOLS: of the text of all tools).

    ``path`` is the JSON path of the text, ``context`` shows it as (text, changes?) pairs.
    """

    message: int
    role: str
    path: str
    start: int
    end: int
    context: list[tuple[str, bool]] = field(default_factory=list)

    @classmethod
    def in_segment(cls, segment: Segment, text: str, span: Span) -> Location:
        """Returns the location of ``text[span]``, where ``text`` is the text of ``segment``."""
        start, end = (segment.offset + at for at in span)
        return cls(max(segment.message, TOOLS), segment.role, segment.path, start, end, surroundings(text, span))

    @property
    def order(self) -> tuple[int, int]:
        """Sorts locations as they follow each other in a prompt."""
        return self.message, self.start


@dataclass(slots=True)
class Finding:
    """A part of the prompts that changes. ``kind`` is its class, such as ``request_id`` or ``tool_order``.

    ``status`` is ``confirmed`` or ``latent``. ``seen`` counts the requests in which it differs, ``line`` is that of the
    first. ``varies`` says in words how the value changes over the log.
    """

    kind: str
    status: str
    location: Location
    samples: list[str]
    repairs: list[Repair]
    seen: int
    line: int
    varies: str = ""
    note: str = ""


def shorten_samples(samples: Sequence[str]) -> list[str]:
    """Returns the first MAX_SAMPLES values, each cut to SAMPLE_LENGTH characters."""
    return [value if len(value) <= SAMPLE_LENGTH else value[: SAMPLE_LENGTH - 1] + "…" for value in samples][
        :MAX_SAMPLES
    ]


def surroundings(text: str, span: Span) -> list[tuple[str, bool]]:
    """Returns (text, changes?) pairs: the text before ``span``, the (shortened) text in it, and the text behind it."""
    (start, end), length = span, CONTEXT_LENGTH
    before = ("…" if start > length else "") + text[max(0, start - length) : start]
    value = text[start:end] if end - start <= 2 * length else text[start : start + 2 * length] + "…"
    after = text[end : end + length] + ("…" if len(text) > end + length else "")
    return [(before, False), (value, True), (after, False)]
