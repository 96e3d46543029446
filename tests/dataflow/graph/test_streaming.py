"""What streams in a step, for every shipped algorithm, and why something does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.dataflow.graph.graph import NodeKind
from penstock.dataflow.graph.streaming import Streaming, streaming
from penstock.dataflow.graph.tracer import build
from penstock.launch.inputs.compose import resolve

from ...algorithms.configured import NAMES, composed

GOLDEN = Path(__file__).parents[1] / "graphs" / "streaming.txt"


def sections() -> dict[str, str]:
    """Algorithm -> its lines."""
    parts = GOLDEN.read_text().rstrip("\n").split("\n\n")
    return {name: rest for name, _, rest in (part.partition("\n") for part in parts)}


def test_every_algorithm_has_its_lines() -> None:
    assert list(sections()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_what_streams(name: str) -> None:
    graph = resolve(composed(name)).main.graph
    found = streaming(graph)
    assert str(found) == sections()[name]
    assert {*found.rollouts, *found.order_of, *found.why_not} == set(found.nodes)
    kinds = (NodeKind.ROLLOUT, NodeKind.TRAIN)
    assert list(found.nodes) == [node.name for node in graph.nodes if node.kind in kinds]
    assert set(found.order_of.values()) <= set(found.rollouts)


def test_grpo_streams_from_end_to_end() -> None:
    assert streaming(build(grpo_step, cfg=GRPO())) == Streaming(
        ("actor.generate",),
        {"actor.train": "actor.generate"},
        {},
        ("actor.generate", "actor.train"),
    )
