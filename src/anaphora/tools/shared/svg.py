"""Charts for the tools' pages as inline SVG: line charts and horizontal bars, with legends; no scripts, no network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 16, 44
BAR_HEIGHT, BAR_GAP, BAR_LEFT, BAR_RIGHT = 30, 14, 90, 110

STYLE = """\
svg { width: 100%; height: auto; display: block; font: 12px system-ui, sans-serif; fill: var(--ink, #222); }
svg .grid { stroke: var(--line, #dcd8ce); stroke-width: 1; }
svg .axis { stroke: var(--soft, #6d6a61); stroke-width: 1; }
svg .soft { fill: var(--soft, #6d6a61); }
.legend { font: .85rem system-ui, sans-serif; margin: .2rem 0 .4rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; margin: 0 .35rem 0 0; vertical-align: -1px; \
border-radius: 2px; }
.legend span { margin-right: 1.1rem; }"""
"""CSS for a page with charts. Colours come from the page's variables --ink, --line and --soft, if it has them."""

Point = tuple[float, float]
Scale = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Axes:
    """Titles and ranges of a line chart: x from ``x_low`` to ``x_high``, y from 0 to ``y_high``, in their own units."""

    x_title: str
    y_title: str
    x_low: float
    x_high: float
    y_high: float


@dataclass(frozen=True, slots=True)
class Line:
    """One line through ``points`` (x, y) in the units of the axes; ``dots`` marks each point."""

    name: str
    color: str
    points: Sequence[Point]
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a bar; ``tip`` is shown when the mouse points at it."""

    length: float
    color: str
    tip: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A horizontal bar of ``segments``, with its value as text; ``whisker`` draws a thin line from low to high."""

    name: str
    segments: Sequence[Segment]
    label: str
    whisker: Point | None = None

    @property
    def length(self) -> float:
        """Sum of the segments."""
        return sum(segment.length for segment in self.segments)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Returns about ``about`` round values (steps of 1, 2 or 5 times a power of ten) from ``low`` to ``high``."""
    rough = (high - low) / about or 1.0
    power = 10 ** math.floor(math.log10(rough))
    step = next((m * power for m in (1, 2, 5) if m * power >= rough), 10 * power)
    first = math.ceil(low / step)
    return [round(index * step, 10) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(title: str, axes: Axes, lines: Sequence[Line]) -> str:
    """Returns a legend and a chart of ``lines`` as HTML."""
    x = _scale(axes.x_low, axes.x_high, LEFT, WIDTH - RIGHT)
    y = _scale(0, axes.y_high, HEIGHT - BOTTOM, TOP)
    right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for tick in ticks(0, axes.y_high):
        parts.append(_line("grid", LEFT, right, y(tick), y(tick)))
        parts.append(_text(f"{tick:g}", f'x="{LEFT - 8}" y="{y(tick) + 4}" text-anchor="end"'))
    for tick in ticks(axes.x_low, axes.x_high):
        parts.append(_line("axis", x(tick), x(tick), floor, floor + 4))
        parts.append(_text(f"{tick:g}", f'x="{x(tick)}" y="{floor + 18}" text-anchor="middle"'))
    parts.append(_line("axis", LEFT, right, floor, floor))
    parts.append(_text(axes.x_title, f'x="{right}" y="{HEIGHT - 8}" text-anchor="end"'))
    turned = f'transform="translate(14 {(floor + TOP) / 2}) rotate(-90)" text-anchor="middle"'
    parts.append(_text(axes.y_title, turned))
    for line in lines:
        points = [(x(across), y(up)) for across, up in line.points]
        parts.append(
            f'<polyline fill="none" stroke="{line.color}" stroke-width="2.2" stroke-linejoin="round" '
            f'points="{" ".join(f"{across},{up}" for across, up in points)}"/>'
        )
        if line.dots:
            parts += [f'<circle cx="{across}" cy="{up}" r="4" fill="{line.color}"/>' for across, up in points]
    return legend([(line.name, line.color) for line in lines]) + _svg(title, HEIGHT, parts)


def bar_chart(title: str, bars: Sequence[Bar], names: Sequence[tuple[str, str]] = ()) -> str:
    """Returns ``bars`` to one scale as HTML, with a legend of ``names`` and their colours if there are any."""
    longest = max([*(bar.length for bar in bars), *(bar.whisker[1] for bar in bars if bar.whisker)])
    x = _scale(0, longest, BAR_LEFT, WIDTH - BAR_RIGHT)
    parts = []
    for number, bar in enumerate(bars):
        y = BAR_GAP + number * (BAR_HEIGHT + BAR_GAP)
        parts.append(f'<text x="0" y="{y + 20}">{escape(bar.name)}</text>')
        at = 0.0
        for segment in bar.segments:
            left, at = x(at), at + segment.length
            parts.append(
                f'<rect x="{left}" y="{y}" width="{round(x(at) - left, 2)}" height="{BAR_HEIGHT}" '
                f'fill="{segment.color}"><title>{escape(segment.tip)}</title></rect>'
            )
        if bar.whisker:
            middle = y + BAR_HEIGHT // 2
            parts.append(_line("axis", x(bar.whisker[0]), x(bar.whisker[1]), middle, middle))
        end = x(max(at, bar.whisker[1] if bar.whisker else 0.0))
        parts.append(f'<text x="{end + 8}" y="{y + 20}">{escape(bar.label)}</text>')
    return legend(names) + _svg(title, len(bars) * (BAR_HEIGHT + BAR_GAP) + BAR_GAP, parts)


def legend(names: Sequence[tuple[str, str]]) -> str:
    """Returns the names with squares of their colours as HTML; nothing if there are none."""
    spans = "".join(f'<span><i style="background:{color}"></i>{escape(name)}</span>' for name, color in names)
    return f'<p class="legend">{spans}</p>\n' if spans else ""


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    return lambda value: round(start + (value - low) / (high - low) * (end - start), 2)


def _line(kind: str, x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1}" x2="{x2}" y1="{y1}" y2="{y2}"/>'


def _text(text: str, attributes: str) -> str:
    return f'<text class="soft" {attributes}>{escape(text)}</text>'


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    start = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
    return "\n".join([start, *parts, "</svg>"]) + "\n"
