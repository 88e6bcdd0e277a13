"""The doctor's form of a request: the texts of its body (segments), and its prompt as runs that refer to them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from anaphora.tools.shared.usage import Usage

SYSTEM_ROLES = ("system", "developer")

Run = tuple[int, int]
"""A stretch of a prompt: (index of the segment that it shows, or NOBODY for the template's own text; text number)."""

TEMPLATE = -2
"""The message index of a segment that is template text with a request's variable in it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One text of a request body.

    ``kind`` is ``tool``, ``content``, ``name``, ``arguments``, ``reasoning``, ``prompt`` (of a completion), or
    ``variable``: template text that shows a value of ``chat_template_kwargs``. ``message`` is the index of its message,
    TOOLS for a tool, TEMPLATE for a variable, 0 for a completion. ``path`` is its JSON path in the body, ``text`` its
    number in the token store. ``offset`` is where it begins, in characters, in the text of its message (of a tool: in
    the text of all tools).
    """

    message: int
    role: str
    kind: str
    path: str
    text: int
    offset: int = 0


@dataclass(slots=True)
class Prompt:
    """A request of the log. ``number`` counts requests from 0, ``pieces`` are the token store's pieces of the prompt.

    ``message_ids`` has one number a message; messages with equal role and texts have equal numbers. ``answer`` is the
    text number of the model's answer, whose tokens are the generated ones; None if the log does not hold the answer.
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
    prefill_s: float | None = None

    @property
    def root(self) -> str:
        """Prompts with different roots (model and salt) never share cached blocks."""
        return f"{self.model}\0{self.salt}"

    def num_leading_system(self) -> int:
        """Returns how many system messages come before the first message of another role."""
        for index, role in enumerate(self.roles):
            if role not in SYSTEM_ROLES:
                return index
        return len(self.roles)
