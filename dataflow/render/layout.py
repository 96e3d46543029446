"""The layout of a drawing's boxes and lines: layers from top to bottom, few crossings, no overlap.

Boxes stand in layers, by topological generation. A line to a box further down passes each layer in
between through a *bend*, a narrow item that takes its place among the boxes, so no line crosses a
box. Lines of one kind from one box share their bends: they run as one line and branch off.

Within a layer the order comes from the mean place of each item's neighbors (Sugiyama, Tagawa and
Toda, "Methods for Visual Understanding of Hierarchical System Structures", 1981), kept only if it
reduces crossings; the positions minimize squared distance to the neighbors at a fixed order
(isotonic regression). Everything is deterministic: equal graphs are drawn equally.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from statistics import mean

_BEND_WIDTH = 10.0
_GAP = 26.0
_SWEEPS = 24
_PLACING_SWEEPS = 100


@dataclass(eq=False)
class Item:
    """A box, or a bend of a line, in one layer."""

    name: str  # The box's node; the line's source for a bend
    kind: str  # Kind of the line for a bend, "" for a box
    layer: int  # Its layer, 0 at the top
    width: float  # Width to keep free
    x: float = 0.0  # The item's center


@dataclass(frozen=True, eq=False)
class DrawnLine:
    """A piece of an arrow: from an item to an item of the next layer."""

    upper: Item
    lower: Item
    kind: str


@dataclass
class DrawingLayout:
    """Items by layer, left to right, and the lines between neighboring layers."""

    layers: list[list[Item]]
    lines: list[DrawnLine]
    boxes: dict[str, Item] = field(default_factory=dict[str, Item])

    @property
    def width(self) -> float:
        return max(item.x + item.width / 2 for layer in self.layers for item in layer)


def lay_out(
    generations: Sequence[Sequence[str]],
    widths: Mapping[str, float],
    arrows: Iterable[tuple[str, str, str]],
) -> DrawingLayout:
    """Place boxes and lines."""
    layout = _with_bends(generations, widths, arrows)
    _reduce_crossings(layout)
    _place(layout)
    return layout


def _with_bends(
    generations: Sequence[Sequence[str]],
    widths: Mapping[str, float],
    arrows: Iterable[tuple[str, str, str]],
) -> DrawingLayout:
    layers = [[Item(n, "", depth, widths[n]) for n in row] for depth, row in enumerate(generations)]
    layout = DrawingLayout(layers, [], {item.name: item for layer in layers for item in layer})
    bends: dict[tuple[str, str, int], Item] = {}
    for source, target, kind in arrows:
        upper, lower = layout.boxes[source], layout.boxes[target]
        for depth in range(upper.layer + 1, lower.layer):
            bend = bends.get((source, kind, depth))
            if bend is None:
                bend = bends[source, kind, depth] = Item(source, kind, depth, _BEND_WIDTH)
                layers[depth].append(bend)
                layout.lines.append(DrawnLine(upper, bend, kind))
            upper = bend
        layout.lines.append(DrawnLine(upper, lower, kind))
    return layout


def _neighbors(layout: DrawingLayout, item: Item, *, above: bool) -> list[Item]:
    if above:
        return [line.upper for line in layout.lines if line.lower is item]
    return [line.lower for line in layout.lines if line.upper is item]


def _reduce_crossings(layout: DrawingLayout) -> None:
    best, fewest = [list(layer) for layer in layout.layers], _crossings(layout)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for layer in layout.layers if down else reversed(layout.layers):
            place = _places(layout)
            layer.sort(key=lambda item: _rank(layout, item, place, above=down))
        _swap_neighbors(layout)
        crossings = _crossings(layout)
        if crossings < fewest:
            best, fewest = [list(layer) for layer in layout.layers], crossings
    layout.layers[:] = best


def _places(layout: DrawingLayout) -> dict[int, float]:
    return {
        id(item): (index + 0.5) / len(layer)
        for layer in layout.layers
        for index, item in enumerate(layer)
    }


def _rank(layout: DrawingLayout, item: Item, place: Mapping[int, float], *, above: bool) -> float:
    near = [place[id(other)] for other in _neighbors(layout, item, above=above)]
    return mean(near) if near else place[id(item)]


def _swap_neighbors(layout: DrawingLayout) -> None:
    improved = True
    while improved:
        improved = False
        for depth, layer in enumerate(layout.layers):
            for index in range(len(layer) - 1):
                before = _crossings(layout, (depth - 1, depth))
                layer[index], layer[index + 1] = layer[index + 1], layer[index]
                if _crossings(layout, (depth - 1, depth)) < before:
                    improved = True
                else:
                    layer[index], layer[index + 1] = layer[index + 1], layer[index]


def _crossings(layout: DrawingLayout, gaps: Iterable[int] | None = None) -> int:
    place = {id(item): n for layer in layout.layers for n, item in enumerate(layer)}
    total = 0
    for gap in range(len(layout.layers)) if gaps is None else gaps:
        ends = [
            (place[id(line.upper)], place[id(line.lower)])
            for line in layout.lines
            if line.upper.layer == gap
        ]
        total += sum((a[0] - b[0]) * (a[1] - b[1]) < 0 for a, b in combinations(ends, 2))
    return total


def _place(layout: DrawingLayout) -> None:
    for layer in layout.layers:
        left = 0.0
        for item in layer:
            item.x = left + item.width / 2
            left += item.width + _GAP
    for sweep in range(_PLACING_SWEEPS):
        down = sweep % 2 == 0
        for layer in layout.layers if down else reversed(layout.layers):
            _spread(layer, [_wanted(layout, item) for item in layer])
    left = min(item.x - item.width / 2 for layer in layout.layers for item in layer)
    for layer in layout.layers:
        for item in layer:
            item.x -= left


def _wanted(layout: DrawingLayout, item: Item) -> tuple[float, float]:
    pulls = [
        (_stiffness(line), line.lower.x if line.upper is item else line.upper.x)
        for line in layout.lines
        if item in (line.upper, line.lower)
    ]
    strength = sum(weight for weight, _ in pulls)
    if not strength:
        return item.x, 1.0
    return sum(weight * x for weight, x in pulls) / strength, strength


def _stiffness(line: DrawnLine) -> float:
    return (1.0, 3.0, 12.0)[bool(line.upper.kind) + bool(line.lower.kind)]


def _spread(layer: Sequence[Item], wanted: Sequence[tuple[float, float]]) -> None:
    offsets = [0.0]
    for left, right in pairwise(layer):
        offsets.append(offsets[-1] + (left.width + right.width) / 2 + _GAP)
    pools: list[tuple[float, float, int]] = []  # place, strength, items
    for (want, strength), offset in zip(wanted, offsets, strict=True):
        pools.append((want - offset, strength, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (x, a, m), (y, b, n) = pools[-2:]
            pools[-2:] = [((x * a + y * b) / (a + b), a + b, m + n)]
    places = [place for place, _, count in pools for _ in range(count)]
    for item, place, offset in zip(layer, places, offsets, strict=True):
        item.x = place + offset
