"""The chart of a metric: valid SVG, points inside it, round ticks."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.launch.run_dir.curve import draw_curve

POINTS = st.lists(st.floats(-1e6, 1e6), min_size=0, max_size=20).map(
    lambda values: [(float(step), value) for step, value in enumerate(values)]
)


@given(POINTS)
def test_every_point_lies_inside_the_picture(points: list[tuple[float, float]]) -> None:
    svg = draw_curve(points, title="t", label="l")
    root = ElementTree.fromstring(svg)
    lines = [element for element in root if element.tag.endswith("polyline")]
    places = [pair.split(",") for line in lines for pair in (line.get("points") or "").split()]
    assert len(places) == 2 * len(points)
    assert all(0 <= float(x) <= 640 and 0 <= float(y) <= 360 for x, y in places)


def test_a_higher_value_is_drawn_higher() -> None:
    svg = draw_curve([(0, 0.0), (10, 1.0)], title="t", label="l")
    raw = re.search(r'points="([^"]*)"', svg)
    assert raw is not None
    (x0, y0), (x1, y1) = (pair.split(",") for pair in raw[1].split())
    assert float(x1) > float(x0)
    assert float(y1) < float(y0)


def test_text_is_escaped() -> None:
    root = ElementTree.fromstring(draw_curve([(0, 1.0)], title="a < b & c", label="x > y"))
    texts = [element.text for element in root if element.tag.endswith("text")]
    assert "a < b & c" in texts


@pytest.mark.parametrize("value", [0.0, 5.0, -3.25])
def test_a_flat_curve_has_room_around_it(value: float) -> None:
    svg = draw_curve([(0, value), (1, value)], title="t", label="l")
    assert "nan" not in svg
