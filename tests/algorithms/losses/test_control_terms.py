"""Terms of classical control: invalid actions, scale-free critics, and REFUEL as REBEL."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock.algorithms.losses import rebel_loss, sequence_sum
from penstock.algorithms.ops.distributions import action_logprob, entropy_of_logits, masked_logits
from penstock.algorithms.ops.value_transforms import (
    symexp,
    symlog,
    two_hot,
    two_hot_loss,
    two_hot_value,
    value_bins,
)
from torch import Tensor


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_close(actual: Tensor, *expected: float) -> None:
    torch.testing.assert_close(actual.double().flatten(), f64(*expected), atol=1e-6, rtol=0)


# --- invalid actions ------------------------------------------------------------------------------

VALID = torch.tensor([True, True, True, False])


def test_invalid_actions_have_no_probability_and_no_gradient() -> None:
    logits = torch.ones(4, dtype=torch.float64, requires_grad=True)
    assert_close(masked_logits(logits, VALID).softmax(-1).detach(), 0.333333, 0.333333, 0.333333, 0)
    assert_close(entropy_of_logits(logits, VALID).detach()[None], 1.098612)
    logprob = action_logprob(logits, torch.tensor(0), VALID)
    slope = torch.autograd.grad(logprob, logits)[0]
    assert_close(slope, 0.666667, -0.333333, -0.333333, 0)
    assert slope[3] == 0
    unaware = torch.autograd.grad(action_logprob(logits, torch.tensor(0)), logits)[0]
    assert_close(unaware, 0.75, -0.25, -0.25, -0.25)


def test_entropy_is_finite_where_probabilities_vanish() -> None:
    logits = torch.tensor([1000.0, 0, 0, 5], requires_grad=True)
    entropy = entropy_of_logits(logits, VALID)
    entropy.backward()
    assert entropy.item() == pytest.approx(0)
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_a_state_without_a_valid_action_is_refused() -> None:
    with pytest.raises(ValueError, match="a state has no valid action"):
        masked_logits(torch.ones(2, 4), torch.stack([VALID, torch.zeros(4).bool()]))


# --- scale-free critics ---------------------------------------------------------------------------


def test_symlog_and_two_hot() -> None:
    assert_close(symlog(f64(-10, 0, 0.5, 100)), -2.397895, 0, 0.405465, 4.615121)
    bins = f64(-2, -1, 0, 1, 2)
    assert_close(two_hot(f64(0.3), bins), 0, 0, 0.7, 0.3, 0)
    assert_close(two_hot(f64(-2), bins), 1, 0, 0, 0, 0)
    assert_close(two_hot(f64(7), bins), 0, 0, 0, 0, 1)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8))
def test_numbers_survive_their_codes(numbers: list[float]) -> None:
    x = f64(*numbers)
    torch.testing.assert_close(symexp(symlog(x)), x)
    bins = value_bins().double()
    code = two_hot(symlog(x), bins)
    torch.testing.assert_close(code.sum(-1), torch.ones_like(x))
    torch.testing.assert_close(two_hot_value(code.log(), bins), x, rtol=1e-5, atol=1e-6)
    own = two_hot_loss(code.log().clamp(min=-1e4), x, bins)
    assert (own <= two_hot_loss(torch.zeros_like(code), x, bins)).all()


# --- relations between algorithms -----------------------------------------------------------------


def test_refuel_is_rebel_on_the_turn_where_two_conversations_part() -> None:
    """Tokens are turns; the mask is True on turn 1 alone."""
    behavior = torch.stack([f64(-4, -6), f64(-4, -7)])
    logprob = torch.stack([f64(-4.3, -5.8), f64(-4.3, -7.5)]).requires_grad_()
    mask = torch.tensor([[False, True], [False, True]])
    loss = rebel_loss(
        sequence_logprob=sequence_sum(logprob, mask)[None],
        behavior_sequence_logprob=sequence_sum(behavior, mask)[None],
        score=f64(0.9, 0.4)[None],
    )
    assert_close(loss.detach(), 0.04)
    slope = torch.autograd.grad(loss.sum(), logprob)[0]
    assert not slope[:, 0].any()
    assert slope[:, 1].all()
