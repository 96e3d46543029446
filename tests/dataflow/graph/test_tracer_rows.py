"""Rows from several producers, roles that nobody asks, and which rollouts a train call is fed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.algorithms.ops.advantages import paired_baseline, remax_advantage
from penstock.algorithms.roles import (
    PerToken,
    Policy,
    PolicyBatch,
    Prompts,
    Reward,
    Rollout,
    Sampling,
    TokenMask,
    TrainMetrics,
)
from penstock.dataflow.errors import FlowError
from penstock.dataflow.graph.check import check_lag
from penstock.dataflow.graph.graph import Graph
from penstock.dataflow.graph.tracer import build, op


@op(scope="batch", makes_rows=True)
def either(first: Rollout, second: Rollout) -> Rollout:
    return first if len(first.prompt_id) else second


@op(scope="row")
def difference(first: PerToken, mask: TokenMask, *, second: PerToken) -> PerToken:
    return (first - second) * mask


def trained(actor: Policy, roll: Rollout, advantage: PerToken) -> TrainMetrics:
    batch = PolicyBatch(
        tokens=roll.tokens,
        mask=roll.mask,
        behavior_logprob=roll.behavior_logprob,
        advantage=advantage,
    )
    return actor.train(ClippedPolicyLoss(), batch)


def joined_step(prompts: Prompts, actor: Policy, reward: Reward) -> TrainMetrics:
    """`reward` is asked for nothing."""
    first = actor.generate(prompts.prompt, prompts.prompt_id, Sampling())
    second = actor.generate(prompts.prompt, prompts.prompt_id, Sampling())
    roll = either(first, second)
    return trained(actor, roll, roll.behavior_logprob)


def baseline_step(prompts: Prompts, actor: Policy, reward: Reward) -> TrainMetrics:
    sampling = Sampling()
    roll = actor.generate(prompts.prompt, prompts.prompt_id, sampling)
    once = replace(sampling, temperature=0.0)
    greedy = actor.generate(prompts.prompt, prompts.prompt_id, once)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    greedy_score = reward.score(greedy.tokens, greedy.mask, greedy.prompt_id)
    baseline = paired_baseline(
        roll.prompt_id, baseline=greedy_score, baseline_prompt_id=greedy.prompt_id
    )
    return trained(actor, roll, remax_advantage(score, roll.mask, greedy_score=baseline))


def without_behavior(graph: Graph, name: str) -> Graph:
    """As if that node's log-probabilities were not marked as a behavior's."""
    nodes = tuple(
        replace(node, outputs=tuple(replace(o, behavior=False) for o in node.outputs))
        if node.name == name
        else node
        for node in graph.nodes
    )
    return replace(graph, nodes=nodes)


def test_only_an_op_that_makes_rows_takes_those_of_several_producers() -> None:
    def mixed_step(prompts: Prompts, actor: Policy) -> PerToken:
        first = actor.generate(prompts.prompt, prompts.prompt_id, Sampling())
        second = actor.generate(prompts.prompt, prompts.prompt_id, Sampling())
        return difference(first.behavior_logprob, first.mask, second=second.behavior_logprob)

    assert build(joined_step)["either"].outputs[0].rows == "either"
    with pytest.raises(FlowError, match="of different rows: 'actor.generate' made the one and"):
        build(mixed_step)


def test_a_role_that_is_asked_for_nothing_is_no_part_of_the_graph() -> None:
    assert list(build(joined_step).roles) == ["actor"]
    assert list(build(baseline_step).roles) == ["actor", "reward"]


def test_a_rollout_that_only_scores_others_needs_no_correction() -> None:
    check_lag(build(baseline_step), 1)


def test_joined_rollouts_are_trained_on_through_the_op_that_joins_them() -> None:
    graph = build(joined_step)
    check_lag(graph, 1)
    with pytest.raises(FlowError, match="but reads no 'behavior_logprob'"):
        check_lag(without_behavior(graph, "either"), 1)
