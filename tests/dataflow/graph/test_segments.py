"""Which steps may have rollouts that go on in later steps, and what is said of the others."""

from __future__ import annotations

import pytest
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.algorithms.papers.remax import ReMax, remax_step
from penstock.algorithms.ppo import PPO, ppo_step
from penstock.dataflow.errors import FlowError
from penstock.dataflow.graph.check import check_lag
from penstock.dataflow.graph.segments import check_segments
from penstock.dataflow.graph.tracer import build


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
