"""A request as the doctor keeps it: segments of the body, and the prompt as runs of text that say whose they are."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from anaphora.tools.shared.usage import Usage

Run = tuple[int, int]
"""(index of the segment that the text belongs to, or NOBODY for the template's own text; number of the text)."""


TEMPLATE = -2
"""The message index of the template's own text where variables of the request stand in it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A text of the body. ``kind``: ``tool``, ``content``, ``name``, ``arguments``, ``reasoning`` or ``prompt``.

    ``variable`` is a text of the template's own with a value of ``chat_template_kwargs`` in it.

    ``message`` is the index of its message, TOOLS for a tool, 0 for a completion's prompt; ``path`` where it is in the
    body, as JSON path; ``offset`` where it begins in its message's text (tools: in all tools' text), in characters.
    """

    message: int
    role: str
    kind: str
    path: str
    text: int
    offset: int = 0


@dataclass(slots=True)
class Prompt:
    """``number`` counts the requests of the log from 0; ``pieces`` are the store's pieces of the whole prompt.

    ``message_ids`` has one number a message: equal messages (role and all texts) have equal numbers.
    """

    number: int
    line: int
    model: str
    time: float | None
    session: str
    salt: str
    segments: list[Segment]
    runs: list[Run]
    pieces: array[int]
    roles: list[str] = field(default_factory=list)
    message_ids: list[int] = field(default_factory=list)
    tool_texts: tuple[int, ...] = ()
    route: str = ""
    usage: Usage | None = None
    answer: int | None = None
    """The number of the text that the model wrote, with its tokens as generated; None where the log does not tell."""
    prefill_s: float | None = None

    @property
    def root(self) -> str:
        """Prompts of different roots never share a cache."""
        return f"{self.model}\0{self.salt}"

    def head_length(self) -> int:
        """How many messages stand before the first that is no system text."""
        for index, role in enumerate(self.roles):
            if role not in ("system", "developer"):
                return index
        return len(self.roles)
