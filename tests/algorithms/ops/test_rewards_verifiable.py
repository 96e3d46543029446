"""Clip, Delta and the rewards of verifiers: the printed examples, and what must always hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock.algorithms.ops.rewards import (
    clipped_step_reward,
    constrained_score,
    delta_step_reward,
    process_shaped_reward,
    weighted_score,
    weighted_sum,
)
from torch import Tensor


def column(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def close(actual: Tensor, *expected: float) -> None:
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.double().flatten(), wanted, atol=1e-6, rtol=0)


def process_reward(scores: Tensor, ends: Tensor, **how: Any) -> Tensor:
    """The rewards of steps alone, where every token was sampled."""
    nothing, every = torch.zeros_like(scores), torch.ones_like(ends)
    return process_shaped_reward(nothing, every, step_score=scores, step_end=ends, coef=1.0, **how)


SCORES = column(0.9, 0.95, 0.4, 0.8)
ALL = torch.ones(1, 4, dtype=torch.bool)


def test_clip_and_delta_of_the_printed_steps() -> None:
    close(clipped_step_reward(SCORES, ALL, threshold=0.5), 0, 0, -0.1, 0)
    delta = delta_step_reward(SCORES, ALL)
    close(delta, -0.05, 0.55, 0.4, 0)
    close(delta.flip(1).cumsum(1).flip(1)[:, :3], 0.9, 0.95, 0.4)
    both = process_reward(SCORES, ALL, clip=0.5, delta=True)
    close(both, 0, 0.1, -0.1, 0)
    close(1 + 0.02 * both.sum(1), 1)
    close(process_reward(SCORES, ALL, clip=None, delta=False), 0.9, 0.95, 0.4, 0.8)


def test_steps_may_lie_anywhere_among_tokens() -> None:
    nan = float("nan")
    scores = column(nan, 0.9, nan, 0.95, 0.4, nan, 0.8, nan)
    ends = torch.tensor([[0, 1, 0, 1, 1, 0, 1, 0]]).bool()
    close(delta_step_reward(scores, ends), 0, -0.05, 0, 0.55, 0.4, 0, 0, 0)
    close(process_reward(scores, ends, clip=0.5), 0, 0, 0, 0.1, -0.1, 0, 0, 0)


def test_token_rewards_get_the_steps_and_the_success() -> None:
    success = column(0, 0, 0, 1)
    shaped = process_shaped_reward(success, ALL, step_score=SCORES, step_end=ALL, coef=0.02)
    close(shaped, 0, 0.002, -0.002, 1)
    masked = torch.tensor([[False, True, True, True]])
    shaped = process_shaped_reward(success, masked, step_score=SCORES, step_end=ALL, coef=1.0)
    close(shaped, 0, 0.1, -0.1, 1)


def test_rows_without_steps_or_with_one_get_nothing_from_delta() -> None:
    ends = torch.tensor([[False, False, False, False], [False, True, False, False]])
    scores = torch.full((2, 4), 0.9, dtype=torch.float64)
    assert not delta_step_reward(scores, ends).any()
    empty = torch.zeros(2, 0)
    assert delta_step_reward(empty, empty.bool()).shape == (2, 0)


STEPS = st.lists(st.tuples(st.floats(-3, 3), st.booleans()), min_size=1, max_size=9)


@given(STEPS, st.floats(-1, 1))
def test_returns_telescope_and_clip_never_rewards(
    steps: list[tuple[float, bool]], threshold: float
) -> None:
    score = column(*(value for value, _ in steps))
    ends = torch.tensor([[end for _, end in steps]])
    clipped = clipped_step_reward(score, ends, threshold=threshold)
    assert (clipped <= 0).all()
    returns = delta_step_reward(score, ends).flip(1).cumsum(1).flip(1)
    where = ends[0].nonzero().flatten().tolist()
    for place in where[:-1]:
        assert returns[0, place].item() == pytest.approx(score[0, place].item(), abs=1e-9)
    assert all(returns[0, place].item() == 0 for place in where[-1:])


@given(STEPS)
def test_padding_changes_nothing(steps: list[tuple[float, bool]]) -> None:
    score = column(*(value for value, _ in steps))
    ends = torch.tensor([[end for _, end in steps]])
    longer = torch.nn.functional.pad(score, (0, 3), value=7.0)
    more = torch.nn.functional.pad(ends, (0, 3))
    padded = process_reward(longer, more)
    assert torch.equal(padded[:, : score.shape[1]], process_reward(score, ends))
    assert not padded[:, score.shape[1] :].any()


def test_scores_are_combined_and_gated() -> None:
    score, other = torch.tensor([1.0, -2]), torch.tensor([0.5, 4])
    close(weighted_score(score, other=other, other_weight=-1), 0.5, -6)
    close(weighted_sum({"a": score, "b": other}, {"b": 0.5}), 1.25, 0)
    passed = torch.tensor([0.0, 1])
    close(constrained_score(score, passed), 0, -2)
    assert constrained_score(score, passed, violation_score=-torch.inf)[0] == -torch.inf
    assert constrained_score(score, passed * torch.nan).isnan().all()
    with pytest.raises(ValueError, match="weights are given for c, scores are: a"):
        weighted_sum({"a": score}, {"c": 1.0})


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="step_score must be a floating tensor of the mask's"):
        clipped_step_reward(SCORES, ALL[:, :3])
