"""How algorithms relate: without its distinguishing part each is another one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.algorithms.pairs import best_and_worst
from penstock.algorithms.roles import PolicyBatch, PolicyOutput, Rollout
from penstock.algorithms.rollout_correction import (
    RolloutCorrection,
    rollout_weight,
    weighted_advantage,
)
from penstock.launch.compose import load_step, step_cfg
from penstock.launch.stages import record

from .configured import NAMES, composed
from .drawn import SEEDS, Data, draw
from .test_properties import ADVANTAGES


def options_of(name: str) -> Any:
    """An algorithm's options as a run has them; None if it has none."""
    algorithm = composed(name).algorithm
    return step_cfg(load_step(algorithm.step, "step"), algorithm.cfg, "cfg").get("cfg")


WITH_KL = [name for name in NAMES if hasattr(options_of(name), "kl_coef")]


def test_many_algorithms_have_a_kl_to_a_reference() -> None:
    assert {"ppo", "rloo", "remax", "reinforce_pp", "p3o", "rebel", "safe_rlhf"} <= {*WITH_KL}


@pytest.mark.parametrize("name", sorted({*WITH_KL} - {"reference_grpo", "adaptive_ppo"}))
def test_without_a_kl_there_is_no_reference(name: str) -> None:
    """Of `reference_grpo` without a KL one says `grpo`, of `adaptive_ppo` `ppo`; they refuse."""
    assert "ref" in record(composed(name).algorithm, "algorithm").roles
    graph = record(composed(name, "algorithm.cfg.kl_coef=0.0").algorithm, "algorithm")
    assert "ref" not in graph.roles
    assert "actor" in graph.trains_per_step


def loss_of(data: Data, behavior: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    loss = ClippedPolicyLoss()
    batch = PolicyBatch(
        tokens=data.columns["tokens"],
        mask=data.columns["mask"],
        behavior_logprob=behavior,
        advantage=advantage,
    )
    return loss(PolicyOutput(logprob=data.logprob), batch, loss.totals(batch)).total


@settings(max_examples=25)
@given(seed=SEEDS, cap=st.sampled_from([1.0, 2.0, None]))
def test_decoupled_ppo_on_fresh_rollouts_is_ppo(seed: int, cap: float | None) -> None:
    """The weights before the update are those that sampled: every factor is 1."""
    data = draw(seed)
    mask, behavior = data.columns["mask"], data.columns["behavior_logprob"]
    weight = rollout_weight(
        mask,
        logprob=behavior,
        behavior_logprob=behavior,
        correction=RolloutCorrection(cap=cap),
    )
    assert torch.equal(weight[mask], torch.ones_like(weight[mask]))
    corrected = weighted_advantage(data.columns["advantage"], weight)
    plain = loss_of(data, behavior, data.columns["advantage"])
    torch.testing.assert_close(loss_of(data, behavior, corrected), plain)


@pytest.mark.parametrize("name", ADVANTAGES)
@settings(max_examples=15)
@given(seed=SEEDS)
def test_rows_may_be_laid_out_by_prompt_or_by_sample(name: str, seed: int) -> None:
    """First all samples of a prompt, or first one sample of every prompt."""
    columns = draw(seed).columns
    ids, score = columns["prompt_id"], columns["score"]
    by_prompt = torch.argsort(ids, stable=True)
    by_sample = torch.cat([by_prompt[0::2], by_prompt[1::2]])
    of_rows = [torch.empty_like(score), torch.empty_like(score)]
    for made, order in zip(of_rows, (by_prompt, by_sample), strict=True):
        made[order] = ADVANTAGES[name](score[order], ids[order])
    torch.testing.assert_close(of_rows[0], of_rows[1])


@settings(max_examples=25)
@given(seed=SEEDS, shift=st.integers(-50, 50))
def test_pairs_are_the_same_whatever_a_prompt_s_scores_have_in_common(
    seed: int, shift: int
) -> None:
    columns = draw(seed).columns
    roll = Rollout(
        prompt_id=columns["prompt_id"],
        tokens=columns["tokens"],
        mask=columns["mask"],
        behavior_logprob=columns["behavior_logprob"],
        finished=columns["chosen"],
    )
    score = (8 * columns["score"]).round()
    moved = score + shift * (columns["prompt_id"] % 7)
    before, after = best_and_worst(roll, score), best_and_worst(roll, moved)
    for field in dataclasses.fields(before):
        if field.name != "score":
            assert torch.equal(getattr(before, field.name), getattr(after, field.name))
