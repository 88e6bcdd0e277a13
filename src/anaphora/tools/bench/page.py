"""The HTML page: one file, no network, plots as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

import jinja2

from anaphora.tools.bench.figures import Figures, known, ttft
from anaphora.tools.bench.report import RATE, SECONDS, Report, number

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 16, 44
BAR, BAR_LEFT, BAR_ROOM = 30, 90, 110
COLORS = {"off": "#b4552d", "on": "#1f7a6d"}
PARTS = (("waiting", "#c9c4b8"), ("prefill", "#b4552d"), ("decode", "#4a6fa5"))

Scale = Callable[[float], float]
Names = dict[str, str]


def render_page(report: Report) -> str:
    template = (resources.files(__package__) / "page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    data = report.as_json()
    sides = [side for side in ("off", "on") if data[side]]
    return environment.from_string(template).render(
        data=data,
        rows=report.rows(),
        sides=sides,
        names=report.options.names,
        notes=report.notes(),
        own=not report.options.remote,
        charts=[chart for chart in _charts(report, sides) if chart],
    )


def _charts(report: Report, sides: Sequence[str]) -> list[dict[str, Any] | None]:
    figures = {side: report.figures(side)[0] for side in sides}
    times = {side: sorted(known([ttft(s) for seen in report.rounds[side] for s in seen.good])) for side in sides}
    spread = {side: report.figures(side)[1].get("requests_per_s") for side in sides}
    names = report.options.names
    return [
        _distribution(times, names),
        _rates(figures, spread, names),
        _shares(figures, names),
        _sweep(report.sweep_rows(), sides, names),
    ]


def _ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round values from ``low`` to ``high``."""
    rough = (high - low) / about or 1.0
    power = 10 ** math.floor(math.log10(rough))
    step = next((m * power for m in (1, 2, 5) if m * power >= rough), 10 * power)
    first = math.ceil(low / step)
    return [round(index * step, 10) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _linear(low: float, high: float, start: float, end: float) -> Scale:
    return lambda value: round(start + (value - low) / (high - low) * (end - start), 2)


def _lines(title: str, x_title: str, y_title: str, x: tuple[float, float], y_top: float) -> dict[str, Any]:
    """An empty line chart: its axes with their ticks, and ``place`` to put points on it."""
    across = _linear(*x, LEFT, WIDTH - RIGHT)
    up = _linear(0, y_top, HEIGHT - BOTTOM, TOP)
    return {
        "kind": "lines",
        "title": title,
        "x_title": x_title,
        "y_title": y_title,
        "box": {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT, "top": TOP},
        "floor": HEIGHT - BOTTOM,
        "x_ticks": [(across(tick), f"{tick:g}") for tick in _ticks(*x)],
        "y_ticks": [(up(tick), f"{tick:g}") for tick in _ticks(0, y_top)],
        "place": lambda points: [(across(a), up(b)) for a, b in points],
        "lines": [],
    }


def _distribution(times: dict[str, list[float]], names: Names) -> dict[str, Any] | None:
    """Share of the requests whose first token was there after so many seconds."""
    if not any(times.values()):
        return None
    longest = max(value for values in times.values() for value in values)
    chart = _lines(
        "Time to first token", "seconds after sending", "% of the requests answered by then", (0, longest * 1.03), 100
    )
    for side, values in times.items():
        points = [(0.0, 0.0)]
        for index, value in enumerate(values):
            points += [(value, 100 * index / len(values)), (value, 100 * (index + 1) / len(values))]
        points.append((longest * 1.03, 100 if values else 0))
        chart["lines"].append(
            {"name": names[side], "color": COLORS[side], "points": chart["place"](points), "dots": False}
        )
    return chart


def _sweep(rows: list[dict[str, Any]], sides: Sequence[str], names: Names) -> dict[str, Any] | None:
    """Prefill by concurrency; where the server does not tell it, the time to first token."""
    told = all(row[side]["prefill_p50_s"] is not None for row in rows for side in sides)
    key, name = ("prefill_p50_s", "prefill") if told else ("ttft_p50_s", "time to first token")
    found = {side: [(row["concurrency"], row[side][key]) for row in rows if row[side][key]] for side in sides}
    points = [point for line in found.values() for point in line]
    places = sorted({row["concurrency"] for row in rows})
    if len(places) < 2 or not points:
        return None
    top = max(value for _, value in points) * 1.08
    title = f"{name.capitalize()} by concurrency"
    chart = _lines(title, "requests at once", f"{name} p50, seconds", (places[0], places[-1]), top)
    for side, line in found.items():
        chart["lines"].append(
            {"name": names[side], "color": COLORS[side], "points": chart["place"](line), "dots": True}
        )
    return chart


def _bars(title: str, top: float, count: int) -> tuple[dict[str, Any], Scale]:
    chart = {"kind": "bars", "title": title, "bars": [], "keys": [], "width": WIDTH, "height": count * (BAR + 14) + 14}
    return chart, _linear(0, top, BAR_LEFT, WIDTH - BAR_ROOM)


def _rates(
    figures: dict[str, Figures], spread: dict[str, tuple[float, float] | None], names: Names
) -> dict[str, Any] | None:
    rates = {side: rate for side, found in figures.items() if (rate := found.get("requests_per_s"))}
    if not rates:
        return None
    top = max([*rates.values(), *(ends[1] for ends in spread.values() if ends)])
    chart, across = _bars("Requests per second", top, len(rates))
    for index, (side, rate) in enumerate(rates.items()):
        ends = spread[side] or (rate, rate)
        part = {"x": BAR_LEFT, "width": across(rate) - BAR_LEFT, "color": COLORS[side], "tip": "median over the rounds"}
        chart["bars"].append(
            {
                "name": names[side],
                "y": 14 + index * (BAR + 14),
                "parts": [part],
                "whisker": (across(ends[0]), across(ends[1])),
                "end": across(max(rate, ends[1])),
                "label": number(rate, RATE),
            }
        )
    return chart


def _shares(figures: dict[str, Figures], names: Names) -> dict[str, Any] | None:
    """The mean request, cut into waiting, prefill and decode."""
    cut = {side: parts for side, found in figures.items() if (parts := _cut(found))}
    if not cut:
        return None
    chart, across = _bars("Where the time of a request goes", max(map(sum, cut.values())), len(cut))
    chart["keys"] = list(PARTS)
    for index, (side, seconds) in enumerate(cut.items()):
        segments, at = [], 0.0
        for (name, color), length in zip(PARTS, seconds, strict=True):
            x, end = across(at), across(at + length)
            tip = f"{name}: {number(length, SECONDS)}"
            segments.append({"x": x, "width": round(end - x, 2), "color": color, "tip": tip})
            at += length
        chart["bars"].append(
            {
                "name": names[side],
                "y": 14 + index * (BAR + 14),
                "parts": segments,
                "whisker": None,
                "end": across(at),
                "label": number(at, SECONDS),
            }
        )
    return chart


def _cut(found: Figures) -> tuple[float, float, float] | None:
    prefill, first, whole = (found.get(key) for key in ("prefill_mean_s", "ttft_mean_s", "latency_mean_s"))
    if prefill is None or first is None or whole is None:
        return None
    return max(0.0, first - prefill), prefill, max(0.0, whole - max(first, prefill))
