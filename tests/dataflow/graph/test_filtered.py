"""Filtered sampling: a loss that would compare two different distributions is refused."""

from __future__ import annotations

import pytest
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.algorithms.ops.rollout_correction import RolloutCorrection, corrected_batch
from penstock.algorithms.roles import Policy, Prompts, Sampling, TrainMetrics
from penstock.dataflow.errors import FlowError
from penstock.dataflow.graph.tracer import build

LOSS = ClippedPolicyLoss()


def filtered_step(
    prompts: Prompts, actor: Policy, correction: RolloutCorrection | None = None
) -> TrainMetrics:
    filtered = Sampling(num_samples=2, top_p=0.9, min_p=0.05)
    roll = actor.generate(prompts.prompt, prompts.prompt_id, filtered)
    batch = corrected_batch(actor, roll, roll.behavior_logprob, correction, 1.0)
    return actor.train(LOSS, batch)


def test_a_ratio_with_a_filtered_distribution_is_refused() -> None:
    with pytest.raises(FlowError) as caught:
        build(filtered_step)
    line = filtered_step.__code__.co_firstlineno + 6
    assert str(caught.value) == (
        f"test_filtered.py:{line}\n"
        "    return actor.train(LOSS, batch)\n"
        "'actor.train' compares log-probabilities of the whole distribution with those of "
        "'actor.generate', which samples from a filtered one (top_p=0.9, min_p=0.05); nothing "
        "makes up for what is never sampled.\n"
        "    Leave out top_p=0.9, min_p=0.05; or set algorithm.cfg.correction.mode=none where the "
        "algorithm has a correction, to compare two passes of the trainer and leave the filter "
        "uncorrected."
    )
    with pytest.raises(FlowError, match=r"samples from a filtered one"):
        build(filtered_step, correction=RolloutCorrection())


def test_a_filter_is_fine_where_no_behavior_log_probability_is_read() -> None:
    def uncorrected(prompts: Prompts, actor: Policy) -> TrainMetrics:
        filtered = Sampling(num_samples=2, top_k=5)
        roll = actor.generate(prompts.prompt, prompts.prompt_id, filtered)
        advantage = actor.logprob(roll.tokens, roll.mask)
        correction = RolloutCorrection(mode="none")
        return actor.train(LOSS, corrected_batch(actor, roll, advantage, correction, 1.0))

    assert "top_k=5" in str(build(uncorrected))
