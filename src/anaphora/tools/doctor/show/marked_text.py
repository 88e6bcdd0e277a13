"""Shows texts in one line with the parts that change marked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.text import Text

from anaphora.tools.doctor.find.patterns import matching


def marked(parts: Iterable[tuple[str, bool]], console: Console) -> Text:
    """Joins (text, changes?) pairs to one line and marks what changes: by colour, or by «» on a console without it."""
    plain = console.color_system is None or console.no_color
    text = Text()
    for part, changes in parts:
        shown = part.replace("\n", "⏎")
        text.append(f"«{shown}»" if changes and plain else shown, style="bold red" if changes else "dim")
    return text


def compared(text: str, other: str) -> Iterator[tuple[str, bool]]:
    """Splits ``text`` into (part, differs from ``other``?) pairs. Words and ids are marked as a whole."""
    gaps, last = [], 0
    for _, start, length in matching(other, text):
        gaps.append((last, start))
        last = start + length
    done = 0
    for start, end in [*gaps, (last, len(text))] if text != other else []:
        while start > 0 and text[start - 1].isalnum() and end > start:
            start -= 1
        while end < len(text) and text[end].isalnum() and end > start:
            end += 1
        if end > max(start, done):
            yield text[done : max(start, done)], False
            yield text[max(start, done) : end], True
            done = end
    yield text[done:], False
