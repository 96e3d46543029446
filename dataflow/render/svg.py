"""A graph as one self-contained SVG picture, fit for a paper or a page, light or dark.

One arrow joins two nodes however many columns travel along it. Data arrows come in two kinds: one
that *streams* may carry part of a batch before the rest is there, a *barrier* waits for all of it.
A third kind joins a train call to the calls after it that read the weights it made.

Boxes are filled by kind and carry a stripe in their role's color. Every text is monospaced, so its
width is known without a font file and always fits its box.

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
from html import escape
from itertools import combinations, pairwise
from statistics import mean
from typing import Literal

from ..graph.graph import Graph, Node
from ..kinds import NodeKind

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


ArrowKind = Literal["stream", "barrier", "weights"]


@dataclass(frozen=True)
class DrawnArrow:
    source: str  # Name of the node it leaves
    target: str  # Name of the node it enters
    kind: ArrowKind  # See the module
    # What it carries, one text a column: `mask`, or `behavior_logprob → logprob` where the input's
    # name differs from the column's.
    labels: tuple[str, ...]


def arrows_of(graph: Graph) -> tuple[DrawnArrow, ...]:
    """Every arrow, in the order of the nodes they enter."""
    arrows: list[DrawnArrow] = []
    for node in graph.nodes:
        labels: dict[str, list[str]] = {}
        kinds: dict[str, ArrowKind] = {}
        for path, ref in node.inputs:
            text = _label(path.rpartition(".")[2], ref.column)
            carried = labels.setdefault(ref.node, [])
            if text not in carried:
                carried.append(text)
            kinds[ref.node] = "stream" if graph.streams(node, ref) else "barrier"
        arrows.extend(
            DrawnArrow(source, node.name, kinds[source], tuple(texts))
            for source, texts in labels.items()
        )
        arrows.extend(_weight_arrows(graph, node))
    return tuple(arrows)


def _label(parameter: str, column: str) -> str:
    return parameter if column in (parameter, "out") else f"{column} → {parameter}"


def _weight_arrows(graph: Graph, node: Node) -> list[DrawnArrow]:
    return [
        DrawnArrow(maker.name, node.name, "weights", (f"{read.role}@{read.offset}",))
        for read in node.reads
        for maker in graph.nodes
        if maker.kind is NodeKind.TRAIN
        and maker.role == read.role
        and maker.reads[0].offset + 1 == read.offset
    ]


KIND_FILLS: Mapping[NodeKind, str] = {
    NodeKind.SOURCE: "#eaeef2",
    NodeKind.OP: "#ffffff",
    NodeKind.ROLLOUT: "#d8f3dc",
    NodeKind.FORWARD: "#dbeafe",
    NodeKind.TRAIN: "#ffe8cc",
}
"""Fill of a box by what its node does."""

# Okabe and Ito's palette, which readers with any color vision can tell apart.
_ROLE_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")

_LINE_STYLES: Mapping[ArrowKind, str] = {
    "stream": 'stroke="#0b66c3" stroke-width="1.5"',
    "barrier": 'stroke="#1f2328" stroke-width="2.4"',
    "weights": 'stroke="#8250df" stroke-width="1.8" stroke-dasharray="2 4"',
}
_LINE_TEXTS: Mapping[ArrowKind, str] = {
    "stream": "streams: part of a batch may pass",
    "barrier": "barrier: waits for the whole batch",
    "weights": "weights made in this step",
}

_FONT = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"
_MARGIN = 24.0
# Width of a monospaced character over its font size, rounded up (0.602 in common fonts).
_ADVANCE = 0.62
_NAME, _SMALL, _LABEL = 13.0, 11.0, 10.5
_ROW, _LABEL_ROW = 15.0, 12.5
_BOX_PADDING = 14.0
_ARROW = 16.0
_BETWEEN = 42.0


def role_colors(graph: Graph) -> dict[str, str]:
    """A color for each role, by its place in the step's parameters."""
    return {role: _ROLE_COLORS[index % len(_ROLE_COLORS)] for index, role in enumerate(graph.roles)}


def to_svg(graph: Graph) -> str:
    """The graph as SVG text: layers from top to bottom, arrows labeled with their columns.

    A thin blue arrow streams, a thick black one with a bar is a barrier, a dotted one leads from a
    train call to the calls after it that read the weights it made.
    """
    return _Drawing(graph).svg()


def _text_width(text: str, size: float) -> float:
    return len(text) * size * _ADVANCE


class _Drawing:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.colors = role_colors(graph)
        self.arrows = arrows_of(graph)
        self.entering: dict[str, list[DrawnArrow]] = {node.name: [] for node in graph.nodes}
        for arrow in self.arrows:
            self.entering[arrow.target].append(arrow)
        self.texts = {node.name: _box_texts(graph, node) for node in graph.nodes}
        self.layout = lay_out(
            _generations(graph, self.arrows),
            {node.name: self._box_width(node.name) for node in graph.nodes},
            [(arrow.source, arrow.target, arrow.kind) for arrow in self.arrows],
        )
        self.tops, self.box_tops, self.bottoms = self._levels()

    def _box_width(self, name: str) -> float:
        title, *rows = self.texts[name]
        widths = [_text_width(title, _NAME), *(_text_width(row, _SMALL) for row in rows)]
        slots = [_slot_width(arrow) for arrow in self.entering[name]]
        return max(max(widths) + 2 * _BOX_PADDING, sum(slots))

    def _box_height(self, name: str) -> float:
        return len(self.texts[name]) * _ROW + 14.0

    def _levels(self) -> tuple[list[float], list[float], list[float]]:
        tops: list[float] = []
        box_tops: list[float] = []
        bottoms: list[float] = []
        y = 0.0
        for layer in self.layout.layers:
            boxes = [item.name for item in layer if not item.kind]
            labels = [len(a.labels) for name in boxes for a in self.entering[name]]
            tops.append(y)
            y += max(labels) * _LABEL_ROW + _ARROW if labels else 0.0
            box_tops.append(y)
            y += max(self._box_height(name) for name in boxes)
            bottoms.append(y)
            y += _BETWEEN
        return tops, box_tops, bottoms

    def svg(self) -> str:
        head, head_height, head_width = _header(self.graph, self.colors)
        legend, legend_width = _legend(self.graph, self.arrows)
        inner = max(self.layout.width, head_width, legend_width)
        width = inner + 2 * _MARGIN
        height = head_height + self.bottoms[-1] + 74.0 + 2 * _MARGIN
        shift = _MARGIN + (inner - self.layout.width) / 2
        shapes = [self._line(line) for line in self.layout.lines]
        shapes += [self._labels(self.layout.boxes[node.name]) for node in self.graph.nodes]
        shapes += [self._box(node) for node in self.graph.nodes]
        size = f'width="{width:.0f}" height="{height:.0f}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
                f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="{_FONT}" role="img">',
                f"<title>{escape(self.graph.name)}</title>",
                _MARKERS,
                f'<rect {size} rx="8" fill="#ffffff"/>',
                f'<g transform="translate({_MARGIN:.0f} {_MARGIN:.0f})">{head}</g>',
                f'<g transform="translate({shift:.1f} {_MARGIN + head_height:.1f})">',
                *shapes,
                "</g>",
                f'<g transform="translate({_MARGIN:.0f} {height - _MARGIN - 42:.1f})">{legend}</g>',
                "</svg>",
                "",
            ]
        )

    def _ports(self, box: Item) -> dict[tuple[str, str], float]:
        entering = [line.upper for line in self.layout.lines if line.lower is box]
        kinds = [line.kind for line in self.layout.lines if line.lower is box]
        order = sorted(zip(entering, kinds, strict=True), key=lambda pair: (pair[0].x, pair[1]))
        arrows = {(arrow.source, arrow.kind): arrow for arrow in self.entering[box.name]}
        slots = [_slot_width(arrows[upper.name, _kind(kind)]) for upper, kind in order]
        if len(order) == 1:
            # A single arrow points at the middle of its box if its label still fits beside it.
            x = min(box.x, box.x + box.width / 2 - slots[0] + 8)
            return {(order[0][0].name, order[0][1]): x}
        x = box.x - sum(slots) / 2
        ports: dict[tuple[str, str], float] = {}
        for (upper, kind), slot in zip(order, slots, strict=True):
            ports[upper.name, kind] = x + 8
            x += slot
        return ports

    def _exits(self, item: Item) -> dict[str, float]:
        leaving = [line for line in self.layout.lines if line.upper is item]
        ends: dict[str, list[float]] = {}
        for line in leaving:
            ends.setdefault(line.kind, []).append(line.lower.x)
        order = sorted(ends, key=lambda kind: (sum(ends[kind]) / len(ends[kind]), kind))
        spread = 0.0 if item.kind else 28.0
        first = item.x - spread * (len(order) - 1) / 2
        return {kind: first + spread * index for index, kind in enumerate(order)}

    def _line(self, line: DrawnLine) -> str:
        upper, lower = line.upper, line.lower
        x0 = self._exits(upper)[line.kind]
        start = self.box_tops[upper.layer] + self._box_height(upper.name)
        y0 = self.bottoms[upper.layer]
        begin = f"M{x0:.1f} {y0 if upper.kind else start:.1f}V{y0:.1f}"
        x1 = lower.x if lower.kind else self._ports(lower)[upper.name, line.kind]
        y1 = self.tops[lower.layer]
        middle = (y0 + y1) / 2
        curve = f"C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}"
        end = self.bottoms[lower.layer] if lower.kind else self.box_tops[lower.layer]
        style = _LINE_STYLES[_kind(line.kind)]
        marker = "" if lower.kind else f' marker-end="url(#{line.kind})"'
        return f'<path d="{begin}{curve}V{end:.1f}" fill="none" {style}{marker}/>'

    def _labels(self, box: Item) -> str:
        ports = self._ports(box)
        texts: list[str] = []
        for arrow in self.entering[box.name]:
            x = ports[arrow.source, arrow.kind] + 9
            y = self.box_tops[box.layer] - _ARROW - (len(arrow.labels) - 1) * _LABEL_ROW + 4
            for index, label in enumerate(arrow.labels):
                row = y + index * _LABEL_ROW
                texts.append(_text(x, row, label, _LABEL, fill="#424a53"))
        return "".join(texts)

    def _box(self, node: Node) -> str:
        item = self.layout.boxes[node.name]
        left, top = item.x - item.width / 2, self.box_tops[item.layer]
        height = self._box_height(node.name)
        place = f'x="{left:.1f}" y="{top:.1f}" width="{item.width:.1f}" height="{height:.1f}"'
        shapes = [f'<rect {place} rx="6" fill="{KIND_FILLS[node.kind]}" stroke="#57606a"/>']
        if node.role is not None:
            color = self.colors[node.role]
            shapes.append(
                f'<rect x="{left:.1f}" y="{top:.1f}" width="7" height="{height:.1f}" rx="3" '
                f'fill="{color}"/>'
            )
        title, *rows = self.texts[node.name]
        x, y = left + _BOX_PADDING + 3, top + 19
        shapes.append(_text(x, y, title, _NAME, weight="bold"))
        for index, row in enumerate(rows, start=1):
            fill = "#1f2328" if index > len(rows) - len(node.outputs) else "#57606a"
            shapes.append(_text(x, y + index * _ROW, row, _SMALL, fill=fill))
        return "".join(shapes)


def _kind(kind: str) -> ArrowKind:
    return "stream" if kind == "stream" else "barrier" if kind == "barrier" else "weights"


def _generations(graph: Graph, arrows: tuple[DrawnArrow, ...]) -> list[list[str]]:
    depth: dict[str, int] = {}
    for node in graph.nodes:  # in program order, so that each arrow comes from an earlier one
        above = [depth[arrow.source] for arrow in arrows if arrow.target == node.name]
        depth[node.name] = max(above, default=-1) + 1
    num_rows = 1 + max(depth.values(), default=-1)
    return [[name for name, at in depth.items() if at == row] for row in range(num_rows)]


def _box_texts(graph: Graph, node: Node) -> list[str]:
    note = graph.weights_note(node).replace("->", "→")
    about = [f"{node.kind.value}, {node.scope}", *([note] if note else [])]
    return [node.name, *about, *(f"{output.name} {output.spec}" for output in node.outputs)]


def _slot_width(arrow: DrawnArrow) -> float:
    return max(_text_width(label, _LABEL) for label in arrow.labels) + 22.0


def _text(
    x: float, y: float, text: str, size: float, *, fill: str = "#1f2328", weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{fill}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )


def _header(graph: Graph, colors: Mapping[str, str]) -> tuple[str, float, float]:
    shapes = [_text(0, 14, graph.name, 18, weight="bold")]
    y, width = 38.0, _text_width(graph.name, 18)
    for name, contract in graph.roles.items():
        trained = "trained" if graph.trains_per_step.get(name) else "frozen"
        text = f"{name}: {contract.__name__}, {trained}"
        shapes.append(f'<rect x="0" y="{y - 9:.1f}" width="12" height="11" fill="{colors[name]}"/>')
        shapes.append(_text(20, y, text, _SMALL))
        width = max(width, 20 + _text_width(text, _SMALL))
        y += _ROW
    text = f"returns {', '.join(graph.results) or 'nothing'}"
    shapes.append(_text(0, y, text, _SMALL, fill="#57606a"))
    return "".join(shapes), y + 26, max(width, _text_width(text, _SMALL))


def _legend(graph: Graph, arrows: tuple[DrawnArrow, ...]) -> tuple[str, float]:
    fills = {node.kind for node in graph.nodes}
    kinds = {arrow.kind for arrow in arrows}
    shapes: list[str] = []
    x = 0.0
    for kind, fill in KIND_FILLS.items():
        if kind not in fills:
            continue
        shapes.append(f'<rect x="{x:.1f}" y="0" width="16" height="12" rx="3" fill="{fill}" '
                      'stroke="#57606a"/>')  # fmt: skip
        shapes.append(_text(x + 22, 10, kind.value, _SMALL))
        x += 40 + _text_width(kind.value, _SMALL)
    widest, x = x, 0.0
    for kind, text in _LINE_TEXTS.items():
        if kind not in kinds:
            continue
        path = f'<path d="M{x:.1f} 30H{x + 30:.1f}" {_LINE_STYLES[kind]} fill="none" '
        shapes.append(f'{path}marker-end="url(#{kind})"/>')
        shapes.append(_text(x + 38, 34, text, _SMALL))
        x += 56 + _text_width(text, _SMALL)
    return "".join(shapes), max(widest, x)


_MARKERS = (
    "<defs>"
    '<marker id="stream" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
    'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" fill="#0b66c3"/></marker>'
    '<marker id="barrier" viewBox="0 0 12 14" refX="12" refY="7" markerWidth="12" '
    'markerHeight="14" markerUnits="userSpaceOnUse" orient="auto">'
    '<path d="M0 0V14" stroke="#1f2328" stroke-width="3"/>'
    '<path d="M3 2.5L12 7L3 11.5z" fill="#1f2328"/></marker>'
    '<marker id="weights" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
    'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" fill="#8250df"/></marker>'
    "</defs>"
)
