"""The formulas of losses: gradients and bounds. `test_value` has their printed numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock.algorithms.losses.tokens import (
    bradley_terry_loss,
    clipped_policy_loss,
    clipped_value_loss,
)

from ..tensors import assert_close, f64


def test_ratio_against_the_behavior_of_a_stale_row() -> None:
    loss = clipped_policy_loss(
        logprob=f64([0.2 + 0.3, -0.2 + 0.1, 1.2 + 0.05, -0.4]) - 1,
        behavior_logprob=torch.full((4,), -1.0).double(),
        advantage=f64([1, 1, -1, -1]),
    )
    assert loss.mean().item() == pytest.approx(0.546376, abs=1e-6)


def test_the_log_ratio_is_clamped_and_passes_no_gradient_there() -> None:
    logprob = f64([30.0, 1.0]).requires_grad_()
    loss = clipped_policy_loss(
        logprob=logprob, behavior_logprob=torch.zeros(2).double(), advantage=f64([-1, -1])
    )
    (gradient,) = torch.autograd.grad(loss.sum(), logprob)
    assert loss[0].item() == pytest.approx(math.exp(20))
    assert_close(gradient, [0, math.e])
    free = clipped_policy_loss(
        logprob=f64([30.0]), behavior_logprob=f64([0.0]), advantage=f64([-1]), log_ratio_clamp=None
    )
    assert free.item() == pytest.approx(math.exp(30))


advantages = st.lists(st.floats(-3, 3), min_size=4, max_size=4)
log_ratios = st.lists(st.floats(-3, 3), min_size=4, max_size=4)


@given(log_ratios, advantages, st.floats(1.01, 5))
def test_dual_clip_never_raises_the_loss_and_leaves_good_tokens_alone(
    ratios: list[float], values: list[float], dual_clip: float
) -> None:
    logprob, behavior_logprob, advantage = f64(ratios), torch.zeros(4).double(), f64(values)
    plain = clipped_policy_loss(
        logprob=logprob, behavior_logprob=behavior_logprob, advantage=advantage
    )
    dual = clipped_policy_loss(
        logprob=logprob, behavior_logprob=behavior_logprob, advantage=advantage, dual_clip=dual_clip
    )
    assert (dual <= plain).all()
    assert torch.equal(dual[advantage >= 0], plain[advantage >= 0])


@given(log_ratios, advantages)
def test_clipping_the_value_never_lowers_its_loss(
    values: list[float], targets: list[float]
) -> None:
    value, value_target, old_value = f64(values), f64(targets), torch.zeros(4).double()
    plain = clipped_value_loss(
        value=value, old_value=old_value, value_target=value_target, eps=None
    )
    assert torch.equal(plain, 0.5 * (value - value_target).square())
    clipped = clipped_value_loss(value=value, old_value=old_value, value_target=value_target)
    assert (clipped >= plain).all()


@given(st.floats(-50, 50))
def test_bradley_terry_of_equal_scores_is_ln_2(score: float) -> None:
    loss = bradley_terry_loss(chosen_score=f64([score]), rejected_score=f64([score]))
    assert loss.item() == pytest.approx(math.log(2))


def test_bradley_terry_is_finite_for_hopeless_pairs() -> None:
    chosen_score = f64([-1e4]).requires_grad_()
    loss = bradley_terry_loss(chosen_score=chosen_score, rejected_score=f64([1e4]))
    (gradient,) = torch.autograd.grad(loss.sum(), chosen_score)
    assert loss.item() == 2e4
    assert gradient.item() == -1
