"""A role that follows another, as the planner places it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.algorithms.ops.advantages import broadcast_over_tokens, group_advantage
from penstock.algorithms.roles import (
    Policy,
    Prompts,
    ReferencePolicyBatch,
    Reward,
    Sampling,
    TrainMetrics,
)
from penstock.dataflow import PlanError, build
from penstock.planner.cost.calibration import GPU_DEFAULTS
from penstock.planner.inputs.calls import Call, calls_of
from penstock.planner.inputs.model_shape import ModelShape
from penstock.planner.plan.plan import Plan
from penstock.planner.plan.planner import place_ops, plan_step
from penstock.planner.search.pins import Pins

from ..hand_made import h100
from ..shapes import llama
from .test_planner import WORKLOAD


@dataclass(frozen=True, kw_only=True)
class Average:
    """Options of the step."""

    sampling: Sampling = Sampling(num_samples=8, max_new_tokens=8)
    loss: ClippedPolicyLoss = ClippedPolicyLoss()


def average_step(
    prompts: Prompts, ref: Policy, actor: Policy, reward: Reward, cfg: Average
) -> tuple[TrainMetrics, TrainMetrics]:
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    batch = ReferencePolicyBatch(
        tokens=roll.tokens,
        mask=roll.mask,
        behavior_logprob=roll.behavior_logprob,
        advantage=broadcast_over_tokens(group_advantage(score, roll.prompt_id), roll.mask),
        ref_logprob=ref.logprob(roll.tokens, roll.mask),
    )
    return actor.train(cfg.loss, batch), ref.follow(actor, share=0.1)


GRAPH = build(average_step, cfg=Average())
MODELS = {"actor": llama(1), "ref": llama(1), "reward": None}


def test_it_is_trained_but_does_not_learn() -> None:
    assert set(GRAPH.trains_per_step) == {"actor", "ref"}
    assert GRAPH.learning_roles == {"actor"}


def test_it_is_one_call_group_with_what_it_follows_and_its_moves_cost_nothing() -> None:
    calls = {call.name: call for call in calls_of(GRAPH, WORKLOAD, MODELS)}
    assert list(calls) == ["actor.generate", "ref.logprob", "actor.train"]
    assert {name: call.call_group for name, call in calls.items()} == {
        "actor.generate": "actor.generate",
        "ref.logprob": "actor",
        "actor.train": "actor",
    }
    assert not calls["ref.logprob"].trained


def test_without_a_model_to_follow_it_is_a_call_group_of_its_own() -> None:
    calls = calls_of(GRAPH, WORKLOAD, {**MODELS, "actor": None})
    assert [(call.name, call.call_group) for call in calls] == [("ref.logprob", "ref")]


def test_a_leader_with_another_model_is_refused() -> None:
    with pytest.raises(PlanError) as refused:
        calls_of(GRAPH, WORKLOAD, {**MODELS, "actor": llama(7)})
    assert str(refused.value) == (
        "'ref.follow': 'ref' follows 'actor' with another model, whose weights it cannot take; "
        "give both the same one"
    )


@pytest.mark.parametrize("apart", [False, True])
def test_a_plan_holds_both_in_one_layout(apart: bool) -> None:
    pins = Pins(apart=(("actor.generate", "actor"),) if apart else ())
    plan = planned(MODELS, pins)
    home = plan.nodes["actor.train"]
    assert plan.nodes["ref.logprob"] == plan.nodes["ref.follow"] == home
    shared = [
        plan.layouts[name].model_dump(exclude={"micro_batch"})
        for name in ("ref.logprob", "actor.train")
    ]
    assert shared[0] == shared[1]


def test_its_weights_count_beside_those_it_follows() -> None:
    layout = {"tp": 2, "pp": 1, "dp": 4, "zero": 1, "checkpointing": False}
    pins = Pins(layouts={"actor.train": layout})
    alone, both = (
        held_bytes(planned(models, pins)) for models in ({**MODELS, "ref": None}, MODELS)
    )
    assert alone["actor"]["weights"] > 0
    assert both == {**alone, "ref": {"weights": alone["actor"]["weights"]}}


def planned(models: Mapping[str, ModelShape | None], pins: Pins) -> Plan:
    return plan_step(GRAPH, models, h100(1), WORKLOAD, max_lag=0, constants=GPU_DEFAULTS, pins=pins)


def held_bytes(plan: Plan) -> Mapping[str, Mapping[str, int]]:
    """What is always held on a device, and for whom."""
    assert plan.prediction is not None
    (memory,) = plan.prediction.memory.values()
    return memory.resident_bytes


def test_a_train_call_without_a_time_runs_where_its_role_is_asked() -> None:
    calls = {"actor.generate": "rollout", "ref.logprob": "train", "actor.train": "train"}
    for home in ("train", "rollout"):
        placed = place_ops(GRAPH, {**calls, "ref.logprob": home}, dict.fromkeys(calls, 1.0))
        assert placed["ref.follow"] == home


def test_calls_know_whom_they_follow() -> None:
    calls: tuple[Call, ...] = calls_of(GRAPH, WORKLOAD, MODELS)
    assert [call.leader for call in calls] == ["", "actor", ""]
