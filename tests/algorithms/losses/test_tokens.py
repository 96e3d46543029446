"""The formulas of losses: printed numbers, gradients, and bounds."""

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
    cross_entropy,
)
from torch import Tensor

Rows = list[list[float]]


def f64(values: Rows | list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_close(actual: Tensor, expected: Rows | list[float]) -> None:
    torch.testing.assert_close(actual, f64(expected), atol=1e-6, rtol=0)


LOG_RATIO = f64([[0.3, -0.3, 0.1], [0.3, -0.5, 1.5]])
BEHAVIOR = torch.full_like(LOG_RATIO, -1)
ADVANTAGE = f64([[1, 1, 1], [-1, -1, -2]])


@pytest.mark.parametrize(
    ("dual_clip", "last", "mean"), [(None, 8.963378, 1.344541), (3.0, 6.0, 0.850645)]
)
def test_clipped_policy_loss(dual_clip: float | None, last: float, mean: float) -> None:
    loss = clipped_policy_loss(
        logprob=BEHAVIOR + LOG_RATIO,
        behavior_logprob=BEHAVIOR,
        advantage=ADVANTAGE,
        dual_clip=dual_clip,
    )
    assert_close(loss, [[-1.2, -0.740818, -1.105171], [1.349859, 0.8, last]])
    assert loss.mean().item() == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize(
    ("eps_high", "first", "mean"), [(0.2, [-1.2, -1.2], 0.14), (0.28, [-1.25, -1.28], 0.114)]
)
def test_clip_higher(eps_high: float, first: list[float], mean: float) -> None:
    ratios = f64([1.25, 1.35, 0.75, 1.3, 1])
    loss = clipped_policy_loss(
        logprob=ratios.log(),
        behavior_logprob=torch.zeros_like(ratios),
        advantage=f64([1, 1, -1, -1, -1]),
        eps_low=0.2,
        eps_high=eps_high,
    )
    assert_close(loss, [*first, 0.8, 1.3, 1])
    assert loss.mean().item() == pytest.approx(mean, abs=1e-6)


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
        logprob=f64([30.0]),
        behavior_logprob=f64([0.0]),
        advantage=f64([-1]),
        log_ratio_clamp=None,
    )
    assert free.item() == pytest.approx(math.exp(30))


advantages = st.lists(st.floats(-3, 3), min_size=4, max_size=4)
log_ratios = st.lists(st.floats(-3, 3), min_size=4, max_size=4)


@given(advantages)
def test_at_ratio_1_the_gradient_is_minus_the_advantage(values: list[float]) -> None:
    logprob = f64([-0.5, -1, -2, -3]).requires_grad_()
    for dual_clip in (None, 3.0):
        loss = clipped_policy_loss(
            logprob=logprob,
            behavior_logprob=logprob.detach(),
            advantage=f64(values),
            dual_clip=dual_clip,
        )
        (gradient,) = torch.autograd.grad(loss.sum(), logprob)
        assert_close(gradient, [-value for value in values])


@given(log_ratios)
def test_without_advantage_there_is_no_gradient(values: list[float]) -> None:
    logprob = f64(values).requires_grad_()
    zeros = torch.zeros(4).double()
    loss = clipped_policy_loss(
        logprob=logprob, behavior_logprob=zeros, advantage=zeros, dual_clip=3.0
    )
    (gradient,) = torch.autograd.grad(loss.sum(), logprob)
    assert not gradient.any()


@given(log_ratios, advantages, st.floats(1.01, 5))
def test_dual_clip_never_raises_the_loss_and_leaves_good_tokens_alone(
    ratios: list[float], values: list[float], dual_clip: float
) -> None:
    logprob, behavior_logprob, advantage = f64(ratios), torch.zeros(4).double(), f64(values)
    plain = clipped_policy_loss(
        logprob=logprob, behavior_logprob=behavior_logprob, advantage=advantage
    )
    dual = clipped_policy_loss(
        logprob=logprob,
        behavior_logprob=behavior_logprob,
        advantage=advantage,
        dual_clip=dual_clip,
    )
    assert (dual <= plain).all()
    assert torch.equal(dual[advantage >= 0], plain[advantage >= 0])


def test_clipped_value_loss() -> None:
    loss = clipped_value_loss(
        value=f64([0.9, 0.2, 0]),
        old_value=f64([0.5, 0.5, 0.5]),
        value_target=f64([1, 0.6, -0.5]),
        eps=0.2,
    )
    assert_close(loss, [0.045, 0.08, 0.32])
    assert loss.mean().item() == pytest.approx(0.148333, abs=1e-6)


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


@pytest.mark.parametrize(
    ("margin", "centering_coef", "expected"),
    [([0.0, 0.0], 0.0, 0.724077), ([0.0, 0.5], 0.0, 0.893669), ([0.0, 0.0], 0.01, 0.748177)],
)
def test_bradley_terry_loss(margin: list[float], centering_coef: float, expected: float) -> None:
    loss = bradley_terry_loss(
        chosen_score=f64([1.2, 0.3]),
        rejected_score=f64([0.7, 0.8]),
        margin=f64(margin),
        centering_coef=centering_coef,
    )
    assert loss.mean().item() == pytest.approx(expected, abs=1e-6)


def test_bradley_terry_centering_term() -> None:
    chosen_score, rejected_score = f64([1.2, 0.3]), f64([0.7, 0.8])
    plain = bradley_terry_loss(chosen_score=chosen_score, rejected_score=rejected_score)
    centered = bradley_terry_loss(
        chosen_score=chosen_score, rejected_score=rejected_score, centering_coef=1.0
    )
    term = centered - plain
    assert term.mean().item() == pytest.approx(2.41, abs=1e-6)


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


def test_cross_entropy() -> None:
    assert_close(cross_entropy(f64([-0.5, -2.0])), [0.5, 2.0])
