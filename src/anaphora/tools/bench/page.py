"""The HTML page of a run: one file that works offline, with the table and charts as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jinja2

from anaphora.tools.bench.figures import Figures, not_none, ttft
from anaphora.tools.bench.report import RATE, SECONDS, Report, number
from anaphora.tools.shared import svg

COLORS = {"off": "#b4552d", "on": "#1f7a6d"}
REQUEST_PARTS = (("waiting", "#c9c4b8"), ("prefill", "#b4552d"), ("decode", "#4a6fa5"))

Names = dict[str, str]


@dataclass(frozen=True, slots=True)
class Chart:
    """A titled chart; ``html`` is its legend and its SVG."""

    title: str
    html: str


def render_page(report: Report) -> str:
    """Returns the page as HTML."""
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
        chart_style=svg.STYLE,
    )


def _charts(report: Report, sides: Sequence[str]) -> list[Chart | None]:
    figures = {side: report.figures(side)[0] for side in sides}
    times = {side: sorted(not_none([ttft(s) for seen in report.rounds[side] for s in seen.good])) for side in sides}
    spread = {side: report.figures(side)[1].get("requests_per_s") for side in sides}
    names = report.options.names
    return [
        _ttft_distribution(times, names),
        _rates(figures, spread, names),
        _request_parts(figures, names),
        _sweep(report.sweep_rows(), sides, names),
    ]


def _ttft_distribution(times: dict[str, list[float]], names: Names) -> Chart | None:
    """Share of the requests that had their first token after a number of seconds."""
    if not any(times.values()):
        return None
    end = max(value for values in times.values() for value in values) * 1.03
    lines = []
    for side, values in times.items():
        points = [(0.0, 0.0)]
        for index, value in enumerate(values):
            points += [(value, 100 * index / len(values)), (value, 100 * (index + 1) / len(values))]
        points.append((end, 100 if values else 0))
        lines.append(svg.Line(names[side], COLORS[side], points))
    axes = svg.Axes("seconds after sending", "% of the requests answered by then", 0, end, 100)
    title = "Time to first token"
    return Chart(title, svg.line_chart(title, axes, lines))


def _sweep(rows: list[dict[str, Any]], sides: Sequence[str], names: Names) -> Chart | None:
    """Prefill by concurrency, or the time to first token if the server does not report prefill."""
    reported = all(row[side]["prefill_p50_s"] is not None for row in rows for side in sides)
    key, name = ("prefill_p50_s", "prefill") if reported else ("ttft_p50_s", "time to first token")
    points = {side: [(row["concurrency"], row[side][key]) for row in rows if row[side][key]] for side in sides}
    values = [value for line in points.values() for _, value in line]
    concurrencies = sorted({row["concurrency"] for row in rows})
    if len(concurrencies) < 2 or not values:
        return None
    axes = svg.Axes("requests at once", f"{name} p50, seconds", concurrencies[0], concurrencies[-1], max(values) * 1.08)
    title = f"{name.capitalize()} by concurrency"
    lines = [svg.Line(names[side], COLORS[side], line, dots=True) for side, line in points.items()]
    return Chart(title, svg.line_chart(title, axes, lines))


def _rates(figures: dict[str, Figures], spread: dict[str, tuple[float, float] | None], names: Names) -> Chart | None:
    rates = {side: rate for side, found in figures.items() if (rate := found.get("requests_per_s"))}
    if not rates:
        return None
    bars = [
        svg.Bar(
            names[side],
            [svg.Segment(rate, COLORS[side], "median over the rounds")],
            number(rate, RATE),
            whisker=spread[side] or (rate, rate),
        )
        for side, rate in rates.items()
    ]
    title = "Requests per second"
    return Chart(title, svg.bar_chart(title, bars))


def _request_parts(figures: dict[str, Figures], names: Names) -> Chart | None:
    """The mean request, divided into waiting, prefill and decode."""
    divided = {side: parts for side, found in figures.items() if (parts := _divide(found))}
    if not divided:
        return None
    bars = []
    for side, seconds in divided.items():
        segments = [
            svg.Segment(length, color, f"{name}: {number(length, SECONDS)}")
            for (name, color), length in zip(REQUEST_PARTS, seconds, strict=True)
        ]
        bars.append(svg.Bar(names[side], segments, number(sum(seconds), SECONDS)))
    title = "Where the time of a request goes"
    return Chart(title, svg.bar_chart(title, bars, REQUEST_PARTS))


def _divide(found: Figures) -> tuple[float, float, float] | None:
    prefill, first, whole = (found.get(key) for key in ("prefill_mean_s", "ttft_mean_s", "latency_mean_s"))
    if prefill is None or first is None or whole is None:
        return None
    return max(0.0, first - prefill), prefill, max(0.0, whole - max(first, prefill))
