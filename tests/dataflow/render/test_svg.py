"""Places of boxes and lines, on random graphs: order, room, and lines that skip no layer."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from penstock.dataflow.render.svg import DrawingLayout, Item, lay_out

KINDS = ("stream", "barrier", "weights")


Drawing = tuple[list[list[str]], dict[str, float], list[tuple[str, str, str]]]


@st.composite
def drawings(draw: st.DrawFn) -> Drawing:
    """Layers of named boxes, their widths, and arrows that point down."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    layers = [[f"{depth}.{i}" for i in range(size)] for depth, size in enumerate(sizes)]
    names = [name for layer in layers for name in layer]
    widths = {name: draw(st.floats(20, 200)) for name in names}
    pairs = [(a, b) for a in names for b in names if a.split(".")[0] < b.split(".")[0]]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=12)) if pairs else []
    return layers, widths, [(a, b, draw(st.sampled_from(KINDS))) for a, b in chosen]


@given(drawing=drawings())
def test_items_keep_their_distance_and_stay_in_the_picture(drawing: Drawing) -> None:
    layout = lay_out(*drawing)
    for layer in layout.layers:
        for left, right in pairwise(layer):
            assert left.x + left.width / 2 < right.x - right.width / 2
    lefts = [item.x - item.width / 2 for layer in layout.layers for item in layer]
    assert abs(min(lefts)) < 1e-6
    assert layout.width >= max(lefts)


def follow(layout: DrawingLayout, source: Item, target: Item, kind: str) -> bool:
    """True if lines of one kind lead from source to target through bends of that source only."""
    reached = [source]
    while reached:
        item = reached.pop()
        for line in layout.lines:
            if line.upper is item and line.kind == kind:
                assert line.lower.layer == item.layer + 1
                if line.lower is target:
                    return True
                if line.lower.kind and line.lower.name == source.name:
                    reached.append(line.lower)
    return False


@given(drawing=drawings())
def test_every_arrow_is_a_chain_of_lines(drawing: Drawing) -> None:
    layers, _, arrows = drawing
    layout = lay_out(*drawing)
    assert {name: item.layer for name, item in layout.boxes.items()} == {
        name: depth for depth, layer in enumerate(layers) for name in layer
    }
    for source, target, kind in arrows:
        assert follow(layout, layout.boxes[source], layout.boxes[target], kind)


@given(drawing=drawings())
def test_the_same_drawing_is_laid_out_the_same(drawing: Drawing) -> None:
    one, two = lay_out(*drawing), lay_out(*drawing)
    assert {n: i.x for n, i in one.boxes.items()} == {n: i.x for n, i in two.boxes.items()}


def test_lines_that_need_not_cross_do_not() -> None:
    layers = [["a", "b"], ["c", "d"]]
    layout = lay_out(
        layers, dict.fromkeys("abcd", 50.0), [("a", "d", "stream"), ("b", "c", "stream")]
    )
    x = {name: item.x for name, item in layout.boxes.items()}
    assert (x["a"] < x["b"]) == (x["d"] < x["c"])


def test_one_backbone_serves_all_lines_of_one_kind() -> None:
    layout = lay_out(
        [["a"], ["b"], ["c"], ["d", "e"]],
        dict.fromkeys("abcde", 50.0),
        [("a", "d", "stream"), ("a", "e", "stream"), ("a", "c", "stream"), ("a", "d", "barrier")],
    )
    bends = [(item.kind, item.layer) for layer in layout.layers for item in layer if item.kind]
    assert sorted(bends) == [("barrier", 1), ("barrier", 2), ("stream", 1), ("stream", 2)]
