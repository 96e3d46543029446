"""A line chart of one metric over steps, as a self-contained SVG: no plotting library needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 36, 44
_SMOOTHING = 0.1  # share of each new point in the moving mean


def draw_curve(
    points: Sequence[tuple[float, float]], *, title: str, label: str, over: str = "step"
) -> str:
    """The chart as SVG text: the points in light grey, their moving mean on top."""
    xs = [x for x, _ in points] or [0.0]
    ys = [y for _, y in points] or [0.0]
    x_ticks, y_ticks = _ticks(min(xs), max(xs)), _ticks(min(ys), max(ys))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return (
            _LEFT + across * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_WIDTH / 2, 20, title, "middle"),
        _text(_WIDTH / 2, _HEIGHT - 8, over, "middle"),
        f'<text transform="translate(14 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(label)}</text>",
    ]
    for tick in y_ticks:
        x, y = place(x_ticks[0], tick)
        parts.append(f'<path d="M{x:.1f} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        parts.append(_text(x - 6, y + 4, f"{tick:g}", "end"))
    for tick in x_ticks:
        x, y = place(tick, y_ticks[0])
        parts.append(_text(x, y + 16, f"{tick:g}", "middle"))
    parts.append(_line([place(*point) for point in points], "#bbb", 1.0))
    parts.append(_line([place(*point) for point in _smoothed(points)], "#1763a6", 2.0))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    total = weight = 0.0
    smooth: list[tuple[float, float]] = []
    for x, y in points:
        total = (1 - _SMOOTHING) * total + _SMOOTHING * y
        weight = (1 - _SMOOTHING) * weight + _SMOOTHING
        smooth.append((x, total / weight))
    return smooth


def _ticks(low: float, high: float, about: int = 5) -> list[float]:
    if high <= low:
        low, high = low - 0.5, low + 0.5
    raw = (high - low) / about
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [index * step for index in range(first, last + 1)]


def _line(places: Sequence[tuple[float, float]], color: str, width: float) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
