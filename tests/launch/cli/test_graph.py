"""`penstock graph` in each of its formats."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

from ..conftest import Penstock


def test_text_is_the_default(penstock: Penstock) -> None:
    said = penstock("graph", "algorithm=sft")
    assert said.code == 0
    assert said.out == (
        "graph sft\n"
        "  source demos: Demonstrations\n"
        "  role actor: Policy, trained\n"
        "\n"
        "actor.train  [train, batch]  actor@0 -> actor@1\n"
        "  loss = CrossEntropyLoss()\n"
        "  batch: Demonstrations\n"
        "    tokens <- demos.tokens\n"
        "    mask <- demos.mask\n"
        "  epochs = 1\n"
        "  num_minibatches = 1\n"
        "\n"
        "returns actor.train\n"
    )


def test_text_says_what_could_stream(penstock: Penstock) -> None:
    said = penstock("graph", "algorithm=ppo")
    assert said.out.partition("\n\nwith schedule.streaming above 0\n")[2] == (
        "  actor.generate streams: a part goes on when its last row has ended\n"
        "  actor.train cannot stream: 'whiten' needs the whole batch; use an op of row or group "
        "scope there\n"
        "  critic.train cannot stream: ClippedValueLoss needs sums over all rows before the first; "
        "use a loss with a `divisor`\n"
    )


def test_json_lists_roles_and_nodes(penstock: Penstock) -> None:
    graph = json.loads(penstock("graph", "algorithm=ppo", "format=json").out)
    assert list(graph["roles"]) == ["actor", "critic", "ref", "reward"]


def test_mermaid(penstock: Penstock) -> None:
    assert penstock("graph", "format=mermaid").out.splitlines()[1] == "flowchart TB"


def test_svg_goes_to_a_file(penstock: Penstock) -> None:
    said = penstock("graph", "algorithm=ppo", "format=svg", "output=ppo.svg")
    assert said.out == "wrote ppo.svg\n"
    assert ElementTree.parse("ppo.svg").getroot().tag.endswith("svg")


def test_an_unknown_format(penstock: Penstock) -> None:
    said = penstock("graph", "format=pdf")
    assert said.code == 2
    assert said.err == ("penstock: 'format': expected one of text, mermaid, svg, json, got 'pdf'\n")


def test_a_file_that_cannot_be_written(penstock: Penstock) -> None:
    said = penstock("graph", "output=no/such/folder.txt")
    assert said.code == 2
    assert said.err == (
        "penstock: 'output': 'no/such/folder.txt' cannot be written: there is no such folder\n"
    )


def test_nothing_is_left_in_the_working_directory(penstock: Penstock) -> None:
    penstock("graph", "algorithm=ppo")
    assert list(Path().iterdir()) == []
