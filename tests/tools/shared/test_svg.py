"""Charts are well-formed, to scale, and escape what they show."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.tools.shared import svg

NAMESPACED = "<div>{}</div>"


def tree(html: str) -> ET.Element:
    return ET.fromstring(NAMESPACED.format(html))


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_round_evenly_spaced_and_within_the_range(low: float, span: float) -> None:
    found = svg.ticks(low, low + span)
    assert 2 <= len(found) <= 7
    assert all(low - 1e-9 <= tick <= low + span + span * 1e-6 for tick in found)
    steps = {f"{b - a:.2g}" for a, b in pairwise(found)}
    assert len(steps) == 1
    assert f"{float(steps.pop()):e}"[0] in "125"


def test_lines_are_to_scale_and_carry_their_names() -> None:
    axes = svg.Axes("seconds", "requests", 0, 10, 4)
    lines = [svg.Line("a < b", "red", [(0, 0), (5, 2), (10, 4)], dots=True), svg.Line("c", "blue", [(0, 4)])]
    root = tree(svg.line_chart('A "title" & more', axes, lines))
    first, second = root.iter("polyline")
    left, right, top, floor = svg.LEFT, svg.WIDTH - svg.RIGHT, svg.TOP, svg.HEIGHT - svg.BOTTOM
    points = [tuple(map(float, pair.split(","))) for pair in first.attrib["points"].split()]
    assert points == [(left, floor), ((left + right) / 2, (top + floor) / 2), (right, top)]
    assert [float(at) for at in second.attrib["points"].split(",")] == [left, top]
    assert len(list(root.iter("circle"))) == 3
    assert [span[0].tail for span in root.iter("span")] == ["a < b", "c"]
    (chart,) = root.iter("svg")
    assert chart.attrib["aria-label"] == 'A "title" & more'
    assert {"seconds", "requests", "0", "10", "4"} <= {text.text for text in root.iter("text")}


def test_bars_share_one_scale() -> None:
    bars = [
        svg.Bar("off", [svg.Segment(1, "red", "wait & see"), svg.Segment(3, "blue", "work")], "4 s"),
        svg.Bar("on", [svg.Segment(2, "red", "wait")], "2 s", whisker=(1.5, 8)),
    ]
    root = tree(svg.bar_chart("Bars", bars, [("waiting", "red")]))
    room = svg.WIDTH - svg.BAR_LEFT - svg.BAR_RIGHT
    assert [float(rect.attrib["width"]) for rect in root.iter("rect")] == pytest.approx(
        [room / 8, room * 3 / 8, room / 4]
    )
    (whisker,) = root.iter("line")
    assert float(whisker.attrib["x2"]) == svg.BAR_LEFT + room
    assert [title.text for title in root.iter("title")] == ["wait & see", "work", "wait"]
    assert [text.text for text in root.iter("text")] == ["off", "4 s", "on", "2 s"]
    assert [span[0].tail for span in root.iter("span")] == ["waiting"]
    assert "legend" not in svg.bar_chart("Bars", bars)
