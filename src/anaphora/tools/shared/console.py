"""The terminal as the doctor writes to it: texts of a log must not steer it."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_SHOWN = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"}
_SHOWN |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
"""Control characters and their pictures: ESC is ␛, and what begins no sequence ends none."""


class LogConsole(Console):
    """Shows the control characters of what it prints; its own colours stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else text.translate(_SHOWN), style, control)
