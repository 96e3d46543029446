"""Texts and pictures of graphs: nothing is left out, nothing overlaps, everything is escaped."""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.algorithms.losses import CrossEntropyLoss
from penstock.algorithms.ppo import PPO, ppo_step
from penstock.algorithms.reference_grpo import ReferenceGRPO, reference_grpo_step
from penstock.algorithms.roles import Demonstrations, Policy
from penstock.algorithms.sft import SFT, sft_step
from penstock.dataflow.graph.graph import Graph
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.render.mermaid import to_mermaid
from penstock.dataflow.render.svg import DrawnArrow, arrows_of, to_svg

GOLDEN = Path(__file__).parents[1] / "graphs"
SVG = "{http://www.w3.org/2000/svg}"


def two_trains(demos: Demonstrations, actor: Policy, ref: Policy) -> object:
    before = actor.logprob(demos.tokens, demos.mask)
    batch = Demonstrations(tokens=demos.tokens, mask=demos.mask)
    first = actor.train(CrossEntropyLoss(), batch)
    between = actor.logprob(demos.tokens, demos.mask)
    return before, first, between, actor.train(CrossEntropyLoss(), batch)


GRAPHS = {
    "sft": build(sft_step, cfg=SFT()),
    "grpo": build(grpo_step, cfg=GRPO()),
    "reference_grpo": build(reference_grpo_step, cfg=ReferenceGRPO()),
    "ppo": build(ppo_step, cfg=PPO()),
    "two_trains": build(two_trains),
}


def test_text_shows_versions_roles_and_both_kinds_of_arrow() -> None:
    assert str(GRAPHS["two_trains"]) == (
        "graph two_trains\n"
        "  source demos: Demonstrations\n"
        "  role actor: Policy, trained\n"  # not ref, which is asked for nothing
        "\n"
        "actor.logprob  [forward, row]  reads actor@0\n"
        "  tokens ~> demos.tokens\n"
        "  mask ~> demos.mask\n"
        "  -> out f32[sample, token~]\n"
        "\n"
        "actor.train  [train, batch]  actor@0 -> actor@1\n"
        "  loss = CrossEntropyLoss()\n"
        "  batch: Demonstrations\n"
        "    tokens <- demos.tokens\n"
        "    mask <- demos.mask\n"
        "\n"
        "actor.logprob#2  [forward, row]  reads actor@1\n"
        "  tokens ~> demos.tokens\n"
        "  mask ~> demos.mask\n"
        "  -> out f32[sample, token~]\n"
        "\n"
        "actor.train#2  [train, batch]  actor@1 -> actor@2\n"
        "  loss = CrossEntropyLoss()\n"
        "  batch: Demonstrations\n"
        "    tokens <- demos.tokens\n"
        "    mask <- demos.mask\n"
        "\n"
        "returns actor.logprob, actor.train, actor.logprob#2, actor.train#2"
    )


def test_arrows_join_columns_and_show_weights_made_in_the_step() -> None:
    assert arrows_of(GRAPHS["two_trains"]) == (
        DrawnArrow("demos", "actor.logprob", "stream", ("tokens", "mask")),
        DrawnArrow("demos", "actor.train", "barrier", ("tokens", "mask")),
        DrawnArrow("demos", "actor.logprob#2", "stream", ("tokens", "mask")),
        DrawnArrow("actor.train", "actor.logprob#2", "weights", ("actor@1",)),
        DrawnArrow("demos", "actor.train#2", "barrier", ("tokens", "mask")),
        DrawnArrow("actor.train", "actor.train#2", "weights", ("actor@1",)),
    )


def test_an_arrow_is_labeled_by_column_and_by_parameter_where_they_differ() -> None:
    labels = {(a.source, a.target): a.labels for a in arrows_of(GRAPHS["ppo"])}
    assert labels["actor.generate", "critic.value"] == ("tokens", "mask")
    assert labels["critic.value", "critic.train"] == ("old_value",)
    assert labels["gae", "whiten"] == ("advantage → value",)


@pytest.mark.parametrize("name", ["grpo", "two_trains"])
def test_mermaid_is_as_before(name: str) -> None:
    """PENSTOCK_ACCEPT=1 replaces the texts by what is drawn now; read the diff afterwards."""
    file = GOLDEN / f"{name}.mmd"
    text = to_mermaid(GRAPHS[name]) + "\n"
    if os.environ.get("PENSTOCK_ACCEPT") == "1":
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.parametrize("name", GRAPHS)
def test_mermaid_has_every_node_and_every_arrow(name: str) -> None:
    graph = GRAPHS[name]
    text = to_mermaid(graph)
    for node in graph.nodes:
        assert f"<b>{node.name.replace('#', '#35;')}</b>" in text
    drawn = re.findall(r'^  n\d+ (-->|==>|-\.->)\|"[^"]+"\| n\d+$', text, re.MULTILINE)
    kinds = {"stream": "-->", "barrier": "==>", "weights": "-.->"}
    assert drawn == [kinds[arrow.kind] for arrow in arrows_of(graph)]


def boxes(picture: ET.Element) -> list[tuple[float, float, float, float]]:
    """Left, top, right and bottom of every node's box."""
    drawn = [r for r in picture.iter(f"{SVG}rect") if r.get("rx") == "6"]
    sides = [[float(r.attrib[a]) for a in ("x", "y", "width", "height")] for r in drawn]
    return [(x, y, x + width, y + height) for x, y, width, height in sides]


def texts(picture: ET.Element) -> list[tuple[float, float, float, str]]:
    """Left end, baseline, right end and content of every text of the middle group."""
    body = picture.findall(f"{SVG}g")[1]
    found: list[tuple[float, float, float, str]] = []
    for element in body.iter(f"{SVG}text"):
        x, y, size = (float(element.attrib[a]) for a in ("x", "y", "font-size"))
        content = element.text or ""
        found.append((x, y, x + 0.602 * size * len(content), content))
    return found


@pytest.mark.parametrize("name", GRAPHS)
def test_svg_shows_every_node_column_and_label(name: str) -> None:
    graph = GRAPHS[name]
    picture = ET.fromstring(to_svg(graph))
    shown = [content for *_, content in texts(picture)]
    for node in graph.nodes:
        assert shown.count(node.name) == 1
        for output in node.outputs:
            assert f"{output.name} {output.spec}" in shown
    labels = [label for arrow in arrows_of(graph) for label in arrow.labels]
    assert sorted(labels) == sorted(t for t in shown if t in set(labels))
    assert len(boxes(picture)) == len(graph.nodes)


@pytest.mark.parametrize("name", GRAPHS)
def test_svg_texts_fit_their_boxes_and_nothing_overlaps(name: str) -> None:
    picture = ET.fromstring(to_svg(GRAPHS[name]))
    areas = boxes(picture)
    for index, (left, top, right, bottom) in enumerate(areas):
        for other in areas[index + 1 :]:
            assert right < other[0] or other[2] < left or bottom < other[1] or other[3] < top
    drawn = texts(picture)
    for x, y, end, content in drawn:
        around = [a for a in areas if a[0] <= x <= a[2] and a[1] <= y <= a[3]]
        assert all(end <= area[2] for area in around), content
        for x2, y2, end2, content2 in drawn:
            if (x, y) != (x2, y2) and abs(y - y2) < 8:
                assert end < x2 or end2 < x, (content, content2)


@pytest.mark.parametrize("name", GRAPHS)
def test_svg_is_legible_on_a_page_and_needs_nothing_else(name: str) -> None:
    svg = to_svg(GRAPHS[name])
    picture = ET.fromstring(svg)
    assert float(picture.attrib["width"]) <= 1100
    links = re.findall(r"(?:href|src|url)\W+([^\"')]+)", svg)
    assert set(links) <= {"stream", "barrier", "weights"}
    assert picture.find(f"{SVG}rect") is not None  # a background of its own, light or dark page


@pytest.mark.parametrize("name", GRAPHS)
def test_equal_graphs_are_drawn_equally(name: str) -> None:
    assert to_svg(GRAPHS[name]) == to_svg(GRAPHS[name])


def test_names_are_escaped() -> None:
    odd = build(two_trains, name='a < "b" & c')
    picture = ET.fromstring(to_svg(odd))
    title = picture.find(f"{SVG}title")
    assert title is not None
    assert title.text == 'a < "b" & c'
    assert "actor@0 -#gt; actor@1" in to_mermaid(odd)


def test_a_graph_of_one_node_is_drawn() -> None:
    def only_data(demos: Demonstrations) -> object:
        return demos.tokens

    graph: Graph = build(only_data)
    assert len(boxes(ET.fromstring(to_svg(graph)))) == 1
    assert "demos" in to_mermaid(graph)
