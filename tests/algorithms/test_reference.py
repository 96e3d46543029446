"""A KL and a moving reference for any step, without a line in the step."""

from __future__ import annotations

from typing import Any

import pytest
from penstock.algorithms.cispo import CISPO, cispo_step
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.algorithms.losses import ReferenceKLPolicyLoss
from penstock.algorithms.ops.rollout_correction import RolloutCorrection
from penstock.algorithms.ppo import PPO, ppo_step
from penstock.algorithms.reference import ReferenceOptions, with_reference
from penstock.algorithms.reference_grpo import ReferenceGRPO, reference_grpo_step
from penstock.algorithms.reinforce_pp import ReinforcePPBaseline, reinforce_pp_baseline_step
from penstock.algorithms.roles import Sampling
from penstock.dataflow.errors import FlowError
from penstock.dataflow.graph.graph import Graph
from penstock.dataflow.graph.tracer import build

SAMPLING = Sampling(num_samples=4, max_new_tokens=8, temperature=0.7)
KL = ReferenceOptions(kl_coef=0.04)
MOVES = ReferenceOptions(sync_every=5, sync_share=0.6)


def arguments(graph: Graph, node: str) -> dict[str, str]:
    found = next(one for one in graph.nodes if one.name == node)
    return {name: str(value) for name, value in found.arguments if name != "loss"}


@pytest.mark.parametrize("correction", [None, RolloutCorrection()])
def test_grpo_with_a_kl_is_reference_grpo(correction: RolloutCorrection | None) -> None:
    options: Any = {"sampling": SAMPLING, "correction": correction}
    added = build(with_reference(grpo_step, KL), cfg=GRPO(**options))
    own = build(reference_grpo_step, cfg=ReferenceGRPO(**options, kl_coef=0.04))
    loss, expected = (graph.nodes[-1].constants["loss"] for graph in (added, own))
    assert isinstance(expected, ReferenceKLPolicyLoss)
    assert vars(loss) == vars(expected)
    assert added.roles == own.roles
    names = sorted(node.name for node in own.nodes)
    assert sorted(node.name for node in added.nodes) == names
    for name in names:
        assert arguments(added, name) == arguments(own, name)


def test_the_reference_moves_before_the_lines_of_the_step() -> None:
    for step, cfg in ((ppo_step, PPO()), (reference_grpo_step, ReferenceGRPO(sampling=SAMPLING))):
        graph = build(with_reference(step, MOVES), cfg=cfg)
        assert [node.name for node in graph.nodes][1] == "ref.follow"
        assert graph.nodes[1].constants == {"share": 0.6, "every": 5}
        assert "reads ref@1" in str(graph)
        assert len(graph.nodes) == len(build(step, cfg=cfg).nodes) + 1


def test_every_loss_of_tokens_takes_a_kl() -> None:
    graph = build(with_reference(cispo_step, KL), cfg=CISPO(sampling=SAMPLING))
    loss = graph.nodes[-1].constants["loss"]
    assert (loss.kl_coef, type(loss.policy).__name__) == (0.04, "CappedWeightLoss")


def test_what_cannot_be_is_refused() -> None:
    twice = with_reference(reinforce_pp_baseline_step, KL)
    with pytest.raises(FlowError, match=r"ReferenceKLPolicyLoss has a KL of its own"):
        build(twice, cfg=ReinforcePPBaseline(sampling=SAMPLING))
    with pytest.raises(FlowError, match=r"'grpo_step' has no role 'ref'"):
        with_reference(grpo_step, MOVES)
    with pytest.raises(ValueError, match=r"'k1' has gradient 0 in expectation"):
        ReferenceOptions(kl_coef=0.1, kl_estimator="k1")
