"""What streams in a step, for every shipped algorithm, and why something does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.algorithms.papers.remax import ReMax, remax_step
from penstock.algorithms.ppo import PPO, ppo_step
from penstock.dataflow.errors import FlowError
from penstock.dataflow.graph.check import check_lag
from penstock.dataflow.graph.graph import Streaming, check_segments, streaming
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.kinds import NodeKind
from penstock.launch.inputs.run import resolve

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


def test_what_hangs_on_the_rollout_alone_may_go_on() -> None:
    check_segments(build(grpo_step, cfg=GRPO()))
    check_segments(build(ppo_step, cfg=PPO(num_minibatches=1)))


def test_a_step_may_have_few_rows() -> None:
    with pytest.raises(FlowError) as refused:
        check_segments(build(ppo_step, cfg=PPO(num_minibatches=2)))
    said = str(refused.value)
    assert "'actor.train' cuts its rows into 2 minibatches, and with Schedule.segment_to" in said
    assert "set num_minibatches=1, or Schedule(segment_tokens=0)" in said


def test_rows_of_two_rollouts_do_not_meet() -> None:
    with pytest.raises(FlowError) as refused:
        check_segments(build(remax_step, cfg=ReMax()))
    said = str(refused.value)
    assert "takes those of 'actor.generate#2' beside rows of 'actor.generate', which with" in said
    assert "Schedule.segment_tokens are of groups that ended in this step" in said
    assert "or set Schedule(segment_tokens=0)" in said


def test_a_loss_must_know_what_older_weights_sampled() -> None:
    graph = build(grpo_step, cfg=GRPO())
    check_lag(graph, 0, segment_tokens=8)
