"""Whitening, GAE, group-relative advantages: printed numbers and the laws they obey."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.algorithms.ops.advantages import (
    broadcast_over_tokens,
    group_advantage,
    leave_one_out,
    whiten,
)
from penstock.algorithms.ops.reductions import Variance, masked_mean, masked_variance
from penstock.algorithms.ops.returns import GaeTargets, Masking, gae, return_to_go
from torch import Tensor

from ..tensors import Rows, assert_close, f64, mask_of


def widen(column: Tensor, prompt: int, padding: int, fill: float = 0.0) -> Tensor:
    return torch.nn.functional.pad(column, (prompt, padding), value=fill)


# --- whitening ------------------------------------------------------------------------------------

X = f64([[1, 2, 3], [4, 5, 99]])
X_MASK = mask_of([[1, 1, 1], [1, 1, 0]])


@pytest.mark.parametrize(
    ("variance", "shift_mean", "expected"),
    [
        ("unbiased", True, [[-1.264911, -0.632456, 0], [0.632456, 1.264911, 0]]),
        ("biased", True, [[-1.414214, -0.707107, 0], [0.707107, 1.414214, 0]]),
        ("unbiased", False, [[1.735089, 2.367544, 3], [3.632456, 4.264911, 0]]),
    ],
)
def test_whiten(variance: Variance, shift_mean: bool, expected: Rows) -> None:
    assert_close(whiten(X, X_MASK, variance=variance, shift_mean=shift_mean), expected)


def test_rows_may_weigh_alike() -> None:
    """Row means 2 and 4.5; squared deviations from 3.25 average 2.229167 and 1.8125 a row."""
    by_row = whiten(X, X_MASK, variance="biased", weighted_by="row", eps=0)
    spread = (((1 - 3.25) ** 2 + (2 - 3.25) ** 2 + (3 - 3.25) ** 2) / 3 + 1.8125) / 2
    root = math.sqrt(spread)
    expected: Rows = [[(x - 3.25) / root for x in (1, 2, 3)], [0.75 / root, 1.75 / root, 0]]
    assert_close(by_row, expected)
    unbiased = whiten(X, X_MASK, variance="unbiased", weighted_by="row", eps=0)
    assert_close(unbiased * 2**0.5, expected)
    with pytest.raises(ValueError, match="variance over rows needs at least 2"):
        whiten(X, X_MASK & torch.tensor([[True], [False]]), weighted_by="row")


@given(
    values=st.lists(st.floats(-100, 100), min_size=3, max_size=12).filter(
        lambda values: max(values) - min(values) > 0.1
    ),
    prompt=st.integers(0, 3),
    padding=st.integers(0, 3),
)
def test_whitened_moments(values: list[float], prompt: int, padding: int) -> None:
    mask = widen(torch.ones(1, len(values)).bool(), prompt, padding)
    x = widen(f64([values]), prompt, padding, torch.nan)
    for variance in ("biased", "unbiased"):
        whitened = whiten(x, mask, variance=variance)
        assert masked_mean(whitened, mask).item() == pytest.approx(0, abs=1e-9)
        spread = masked_variance(whitened, mask, variance=variance).item()
        assert spread == pytest.approx(1, abs=1e-4)
        assert not whitened[~mask].any()


@pytest.mark.parametrize("weighted_by", ["token", "row"])
@given(value=st.floats(-100, 100), lengths=st.lists(st.integers(1, 9), min_size=2, max_size=4))
def test_equal_values_are_whitened_to_zero(
    weighted_by: Any, value: float, lengths: list[int]
) -> None:
    """Without an eps: no division by zero, and none by the rounding error of a mean."""
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    for dtype in (torch.float32, torch.float64):
        x = torch.full(mask.shape, value, dtype=dtype)
        kept = functools.partial(whiten, x, mask, eps=0, weighted_by=weighted_by)
        assert not kept().any()
        torch.testing.assert_close(kept(shift_mean=False)[mask], x[mask])


def test_whiten_needs_enough_tokens() -> None:
    with pytest.raises(ValueError, match="unbiased variance of a single masked token"):
        whiten(X, mask_of([[1, 0, 0], [0, 0, 0]]))


def test_whiten_keeps_the_dtype_and_ignores_padded_width_bitwise() -> None:
    x = torch.randn(7, 9, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(7, 9, generator=torch.Generator().manual_seed(1)) > 0.4
    whitened = whiten(x, mask)
    assert whitened.dtype == torch.float32
    assert torch.equal(whiten(widen(x, 0, 5, 3.0), widen(mask, 0, 5))[:, :9], whitened)


# --- GAE ------------------------------------------------------------------------------------------

GAE_MASK = mask_of([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
GAE_REWARD = f64([[-0.005, 0.005, 1.99, 0, 0], [-0.005, 0, 0, 0.005, -1.01]])
GAE_VALUE = f64([[0.5, 0.6, 0.7, 0, 0], [0.1, 0.2, 0.3, 0.4, 0.5]])
GAE_ADVANTAGE: Rows = [
    [1.358975, 1.3305, 1.29, 0, 0],
    [-0.85963, -1.004874, -1.163025, -1.3295, -1.51],
]
GAE_TARGET: Rows = [
    [1.858975, 1.9305, 1.99, 0, 0],
    [-0.75963, -0.804874, -0.863025, -0.9295, -1.01],
]


@pytest.mark.parametrize("masking", ["transparent", "zeroed"])
def test_gae(masking: Masking) -> None:
    """Maskings agree while nothing inside a response is masked."""
    targets = gae(GAE_MASK, reward=GAE_REWARD, value=GAE_VALUE, masking=masking)
    assert_close(targets.advantage, GAE_ADVANTAGE)
    assert_close(targets.value_target, GAE_TARGET)


HOLE_MASK = mask_of([[1, 1, 0, 0, 1]])
HOLE_REWARD = f64([[0, 0, 0, 0, 1]])
HOLE_VALUE = f64([[0.2, 0.4, 9, 9, 0.6]])


def test_gae_is_transparent_to_tool_tokens() -> None:
    targets = gae(HOLE_MASK, reward=HOLE_REWARD, value=HOLE_VALUE, discount=0.9, lam=0.8)
    assert_close(targets.advantage, [[0.46816, 0.428, 0, 0, 0.4]])
    assert_close(targets.value_target, [[0.66816, 0.828, 0, 0, 1]])


def test_gae_zeroed_counts_tool_tokens_as_steps_of_value_zero() -> None:
    """By hand: deltas are -.02, -.4, 0, .54, .4 and each step decays by .9 * .8."""
    targets = gae(
        HOLE_MASK, reward=HOLE_REWARD, value=HOLE_VALUE, discount=0.9, lam=0.8, masking="zeroed"
    )
    at_1 = -0.4 + 0.72 * (0 + 0.72 * (0.54 + 0.72 * 0.4))
    at_0 = (0.9 * 0.4 - 0.2) + 0.72 * at_1
    assert_close(targets.advantage, [[at_0, at_1, 0, 0, 0.4]])


@pytest.mark.parametrize("masking", ["transparent", "zeroed"])
def test_gae_bootstraps_a_row_that_was_cut_off(masking: Masking) -> None:
    targets = gae(
        mask_of([[0, 1, 1, 0]]),
        reward=f64([[0, 0, 1, 0]]),
        value=f64([[7, 0.5, 0.25, 7]]),
        bootstrap_value=f64([2.0]),
        discount=0.5,
        lam=0.5,
        masking=masking,
    )
    at_2 = 1 + 0.5 * 2 - 0.25
    at_1 = 0 + 0.5 * 0.25 - 0.5 + 0.25 * at_2
    assert_close(targets.advantage, [[0, at_1, at_2, 0]])
    assert_close(targets.value_target, [[0, at_1 + 0.5, at_2 + 0.25, 0]])


def random_columns(seed: int, rows: int = 4, width: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=generator) > 0.4
    reward = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    value = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    return mask, reward, value


discounts = st.sampled_from([0.0, 0.5, 0.97, 1.0])


@given(seed=st.integers(0, 2**16), discount=discounts, lam=discounts)
def test_gae_transparent_equals_deleting_the_masked_columns(
    seed: int, discount: float, lam: float
) -> None:
    mask, reward, value = random_columns(seed)
    whole = gae(mask, reward=reward, value=value, discount=discount, lam=lam)
    for row in range(len(mask)):
        kept = mask[row]
        dense = gae(
            torch.ones(1, int(kept.sum())).bool(),
            reward=reward[row, kept][None],
            value=value[row, kept][None],
            discount=discount,
            lam=lam,
        )
        torch.testing.assert_close(whole.advantage[row, kept], dense.advantage[0])
        torch.testing.assert_close(whole.value_target[row, kept], dense.value_target[0])
        assert not whole.advantage[row, ~kept].any()


@given(seed=st.integers(0, 2**16), discount=discounts)
def test_gae_limits_of_lambda(seed: int, discount: float) -> None:
    mask, reward, value = random_columns(seed)
    monte_carlo = gae(mask, reward=reward, value=value, discount=discount, lam=1)
    expected = return_to_go(reward, mask, discount=discount)
    torch.testing.assert_close(monte_carlo.value_target, expected)
    full = torch.ones_like(mask)
    one_step = gae(full, reward=reward, value=value, discount=discount, lam=0).advantage
    value_tp1 = torch.cat([value[:, 1:], torch.zeros(len(value), 1).double()], dim=1)
    torch.testing.assert_close(one_step, reward + discount * value_tp1 - value)


@given(seed=st.integers(0, 2**16), padding=st.integers(0, 4), prompt=st.integers(0, 4))
def test_gae_does_not_see_padding_bitwise(seed: int, padding: int, prompt: int) -> None:
    mask, reward, value = random_columns(seed)
    for masking in ("transparent", "zeroed"):
        narrow = gae(mask, reward=reward, value=value, masking=masking)
        wide: GaeTargets = gae(
            widen(mask, prompt, padding),
            reward=widen(reward, prompt, padding, torch.inf),
            value=widen(value, prompt, padding, torch.nan),
            masking=masking,
        )
        assert torch.equal(wide.advantage[:, prompt : prompt + 7], narrow.advantage)
        assert torch.equal(wide.value_target[:, prompt : prompt + 7], narrow.value_target)


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 1), ()])
def test_gae_refuses_a_bootstrap_value_that_is_not_one_per_row(shape: tuple[int, ...]) -> None:
    column = torch.zeros(2, 3)
    with pytest.raises(
        ValueError,
        match=rf"bootstrap_value must have one entry .* \[2\], got {re.escape(str(list(shape)))}",
    ):
        gae(column.bool(), reward=column, value=column, bootstrap_value=torch.zeros(shape))


def test_gae_in_float32_is_float32() -> None:
    targets = gae(GAE_MASK, reward=GAE_REWARD.float(), value=GAE_VALUE.float())
    assert targets.advantage.dtype == targets.value_target.dtype == torch.float32
    assert_close(targets.advantage, GAE_ADVANTAGE)


def test_return_to_go() -> None:
    reward = f64([[-0.01, -0.02, 1.01], [0, -1.03, 50]])
    mask = mask_of([[1, 1, 1], [1, 1, 0]])
    assert_close(return_to_go(reward, mask), [[0.98, 0.99, 1.01], [-1.03, -1.03, 0]])
    assert_close(
        return_to_go(reward, mask, discount=0.5), [[0.2325, 0.485, 1.01], [-0.515, -1.03, 0]]
    )


def test_return_to_go_across_a_hole() -> None:
    reward, mask = f64([[0, 5, 1]]), mask_of([[1, 0, 1]])
    assert_close(return_to_go(reward, mask, discount=0.5), [[0.5, 0, 1]])


# --- groups ---------------------------------------------------------------------------------------

SCORE = f64([1, 0, 0, 1, 0.5, 0.5, 0.5, 0.5])
PROMPT_ID = torch.tensor([7, 7, 7, 7, 3, 3, 3, 3])


def signs(size: float) -> list[float]:
    return [size, -size, -size, size, 0, 0, 0, 0]


def test_leave_one_out() -> None:
    assert_close(leave_one_out(SCORE, PROMPT_ID), signs(0.666667))


@pytest.mark.parametrize(
    ("divide_by_std", "variance", "eps", "expected"),
    [
        (False, "unbiased", 1e-6, 0.5),
        (True, "unbiased", 1e-6, 0.866024),
        (True, "unbiased", 1e-4, 0.865875),
        (True, "biased", 1e-6, 0.999998),
    ],
)
def test_group_advantage(
    divide_by_std: bool, variance: Variance, eps: float, expected: float
) -> None:
    advantage = group_advantage(
        SCORE, PROMPT_ID, divide_by_std=divide_by_std, variance=variance, eps=eps
    )
    assert_close(advantage, signs(expected))


def test_equal_scores_give_exactly_zero_whatever_eps() -> None:
    """0.1 has no exact mean in binary; without care the error would be divided by itself."""
    score = torch.full((3,), 0.1, dtype=torch.float64)
    same = torch.zeros(3).long()
    for eps in (0.0, 1e-6):
        assert not group_advantage(score, same, eps=eps).any()
    assert not leave_one_out(score, same).any()


@pytest.mark.parametrize("bad", [float("inf"), -float("inf")])
@pytest.mark.parametrize("estimate", [group_advantage, leave_one_out])
def test_an_infinite_score_spoils_its_whole_group_and_no_other(
    estimate: Callable[..., Tensor], bad: float
) -> None:
    prompt_id = torch.tensor([7, 5, 7, 5, 7, 3, 3])
    score = f64([1, bad, 0, 2, 0, bad, bad])
    advantage = estimate(score, prompt_id)
    assert advantage.isfinite().tolist() == [True, False, True, False, True, False, False]


def test_singleton_groups() -> None:
    score, prompt_id = f64([2, 1, 3]), torch.tensor([42, 5, 5])
    with pytest.raises(ValueError, match="group 42 has a single sample, .*Sampling.num_samples"):
        group_advantage(score, prompt_id)
    with pytest.raises(ValueError, match="group 42 has a single sample, .*Sampling.num_samples"):
        leave_one_out(score, prompt_id)
    # One whose other samples have no score is no fault of the step's.
    assert_close(
        leave_one_out(f64([2, torch.nan, 3, 1]), torch.tensor([4, 4, 5, 5])), [0, 0, 2, -2]
    )


@pytest.mark.parametrize("divide_by_std", [True, False])
def test_an_unknown_variance_is_refused(divide_by_std: bool) -> None:
    wrong: Any = "sample"
    message = "variance 'sample' is unknown; choose 'biased' or 'unbiased'"
    with pytest.raises(ValueError, match=message):
        whiten(X, X_MASK, variance=wrong)
    score, prompt_id = f64([1, 2]), torch.tensor([0, 0])
    with pytest.raises(ValueError, match=message):
        group_advantage(score, prompt_id, divide_by_std=divide_by_std, variance=wrong)


def test_a_group_s_bits_do_not_depend_on_the_groups_beside_it() -> None:
    score = torch.randn(40, generator=torch.Generator().manual_seed(0))
    prompt_id = torch.arange(40) % 7
    whole = group_advantage(score, prompt_id)
    for chunk in (prompt_id < 1, prompt_id < 3, prompt_id >= 3):
        assert torch.equal(group_advantage(score[chunk], prompt_id[chunk]), whole[chunk])


scores_in_groups = st.lists(st.integers(2, 5), min_size=1, max_size=4).flatmap(
    lambda sizes: st.tuples(
        st.just([group for group, size in enumerate(sizes) for _ in range(size)]),
        st.lists(st.floats(-5, 5), min_size=sum(sizes), max_size=sum(sizes)),
        st.permutations(range(sum(sizes))),
    )
)


@settings(max_examples=50)
@given(scores_in_groups, st.integers(-8, 8), st.sampled_from([0.25, 2.0, 16.0]))
def test_group_shift_and_scale(
    case: tuple[list[int], list[float], list[int]], shift: int, scale: float
) -> None:
    groups, scores, _ = case
    score, prompt_id = f64([round(value * 64) / 64 for value in scores]), torch.tensor(groups)
    shifted = score + shift * (prompt_id + 1)
    for divide_by_std in (True, False):
        torch.testing.assert_close(
            group_advantage(shifted, prompt_id, divide_by_std=divide_by_std),
            group_advantage(score, prompt_id, divide_by_std=divide_by_std),
        )
    plain = leave_one_out(score, prompt_id)
    torch.testing.assert_close(leave_one_out(shifted, prompt_id), plain)
    torch.testing.assert_close(leave_one_out(score * scale, prompt_id), plain * scale)
    torch.testing.assert_close(
        group_advantage(score * scale, prompt_id, eps=0), group_advantage(score, prompt_id, eps=0)
    )


@given(scores_in_groups)
def test_leave_one_out_is_the_centered_score_times_n_over_n_minus_1(
    case: tuple[list[int], list[float], list[int]],
) -> None:
    groups, scores, _ = case
    score, prompt_id = f64(scores), torch.tensor(groups)
    sizes = torch.bincount(prompt_id)[prompt_id]
    centered = group_advantage(score, prompt_id, divide_by_std=False)
    torch.testing.assert_close(leave_one_out(score, prompt_id), centered * sizes / (sizes - 1))


def test_broadcast_over_tokens() -> None:
    mask = mask_of([[0, 1, 1, 0], [0, 0, 1, 1]])
    assert_close(broadcast_over_tokens(f64([2, -3]), mask), [[0, 2, 2, 0], [0, 0, -3, -3]])
    with pytest.raises(ValueError, match=r"one entry per row of the mask, \[2\], got \[3\]"):
        broadcast_over_tokens(f64([1, 2, 3]), mask)
