"""KL estimators, the KL-shaped reward and the adaptive coefficient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock.algorithms.ops.kl import (
    KLEstimator,
    NoEos,
    ScoreSlot,
    adaptive_kl_coef,
    kl_estimate,
    kl_shaped_reward,
)
from torch import Tensor

from ..tensors import Rows, assert_close, f64, mask_of

ESTIMATORS: tuple[KLEstimator, ...] = ("k1", "k2", "k3", "abs")


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [0.2, 0, -1]),
        ("k2", [0.02, 0, 0.5]),
        ("k3", [0.018731, 0, 0.718282]),
        ("abs", [0.2, 0, 1]),
    ],
)
def test_estimators(estimator: KLEstimator, expected: list[float]) -> None:
    logprob, ref_logprob = f64([[-1.0, -0.5, -2.0]]), f64([[-1.2, -0.5, -1.0]])
    mask = torch.ones(1, 3).bool()
    estimate = kl_estimate(mask, logprob=logprob, ref_logprob=ref_logprob, estimator=estimator)
    assert_close(estimate, [expected])


def test_estimators_gradients_in_expectation() -> None:
    z = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.tensor([0.0, 0.4, -0.4], dtype=torch.float64), 0)
    logp = torch.log_softmax(z, 0)
    p, q = logp.exp().detach(), ref.exp()
    mask = torch.ones(1, 3).bool()

    def gradient(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, z, retain_graph=True)[0]

    def expected_gradient(estimator: KLEstimator) -> Tensor:
        estimate = kl_estimate(mask, logprob=logp[None], ref_logprob=ref[None], estimator=estimator)
        return gradient((p * estimate[0]).sum())

    reverse = (logp.exp() * (logp - ref)).sum()
    assert_close(reverse.detach(), 0.107748)  # pyright: ignore[reportArgumentType] - a scalar
    assert_close(gradient(reverse), [0.064967, -0.185675, 0.120708])
    assert_close(gradient((q * (ref - logp)).sum()), [0.096086, -0.221687, 0.125602])
    assert_close(expected_gradient("k1"), [0, 0, 0])
    torch.testing.assert_close(expected_gradient("k2"), gradient(reverse))
    torch.testing.assert_close(expected_gradient("k3"), gradient((q * (ref - logp)).sum()))
    k3 = kl_estimate(mask, logprob=logp[None], ref_logprob=ref[None], estimator="k3")[0]
    ratio = (logp - logp.detach()).exp()
    torch.testing.assert_close(gradient((p * ratio * k3).sum()), gradient(reverse))


def test_clamps() -> None:
    logprob, ref_logprob = f64([[0.0, -30.0, 0.0]]), f64([[-30.0, 0.0, -1.0]])
    mask = torch.tensor([[True, True, False]])

    def k(estimator: KLEstimator, **clamps: float | None) -> Tensor:
        return kl_estimate(
            mask, logprob=logprob, ref_logprob=ref_logprob, estimator=estimator, **clamps
        )

    assert_close(k("k1"), [[20, -20, 0]])
    assert_close(k("k1", log_ratio_clamp=None), [[30, -30, 0]])
    assert_close(k("k1", log_ratio_clamp=None, value_clamp=10), [[10, -10, 0]])
    assert_close(k("k3", value_clamp=10), [[10, 10, 0]])
    assert_close(k("k2"), [[200, 200, 0]])


def test_no_gradient_through_a_clamp_and_none_behind_the_mask() -> None:
    logprob = f64([[0.0, -1.0, -torch.inf]]).requires_grad_()
    estimate = kl_estimate(
        torch.tensor([[True, True, False]]),
        logprob=logprob,
        ref_logprob=f64([[-30.0, -1.5, torch.nan]]),
        estimator="k2",
    )
    (gradient,) = torch.autograd.grad(estimate.sum(), logprob)
    assert_close(gradient, [[0, 0.5, 0]])


@given(st.lists(st.floats(-15, 15), min_size=1, max_size=8))
def test_k3_is_never_negative(log_ratios: list[float]) -> None:
    logprob = f64([log_ratios])
    mask = torch.ones_like(logprob).bool()
    estimate = kl_estimate(
        mask, logprob=logprob, ref_logprob=torch.zeros_like(logprob), estimator="k3"
    )
    assert (estimate >= -1e-12).all()


MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
LOG_RATIO = f64([[0.1, -0.1, 0.2, 0, 0], [0.1, 0, 0, -0.1, 0.2]])
ZEROS = torch.zeros_like(LOG_RATIO)
SCORE = f64([2, -1])
LAST_TOKEN: Rows = [[-0.005, 0.005, 1.99, 0, 0], [-0.005, 0, 0, 0.005, -1.01]]
AFTER_LAST: Rows = [[-0.005, 0.005, -0.01, 2, 0], [-0.005, 0, 0, 0.005, -1.01]]


def shaped(score: Tensor = SCORE, mask: Tensor = MASK, **options: Any) -> Tensor:
    """Without a KL unless `logprob` says otherwise."""
    given: dict[str, Any] = {"logprob": ZEROS, "ref_logprob": ZEROS, "kl_coef": 0.05, **options}
    return kl_shaped_reward(score, mask, **given)


@pytest.mark.parametrize(
    ("score_slot", "expected"), [("last_token", LAST_TOKEN), ("after_last", AFTER_LAST)]
)
def test_shaped_reward(score_slot: ScoreSlot, expected: Rows) -> None:
    logprob = LOG_RATIO.clone().requires_grad_()
    reward = shaped(logprob=logprob - 1, ref_logprob=ZEROS - 1, score_slot=score_slot)
    assert_close(reward, expected)
    assert not reward.requires_grad
    none_sampled = MASK & torch.tensor([[True], [False]])
    reward = shaped(SCORE, none_sampled, score_slot=score_slot)
    assert_close(reward.sum(1), [2, 0])


def test_shaped_reward_with_prompt_in_front_and_tool_tokens_inside() -> None:
    reward = shaped(
        torch.tensor([3.0]),
        mask_of([[0, 0, 1, 0, 1, 0]]),
        logprob=torch.tensor([[9.0, 9.0, -1.0, 9.0, -2.0, 9.0]]),
        ref_logprob=torch.tensor([[0.0, torch.nan, -2.0, torch.inf, -1.0, 0.0]]),
        kl_coef=0.5,
    )
    assert_close(reward, [[0, 0, -0.5, 0, 3.5, 0]])


@pytest.mark.parametrize(
    ("no_eos", "expected"), [("none", 2), ("replace", -1), ("subtract", 1), ("zero", 0)]
)
def test_missing_end_of_sequence(no_eos: NoEos, expected: float) -> None:
    reward = shaped(finished=torch.tensor([False, True]), no_eos=no_eos)
    assert_close(reward, [[0, 0, expected, 0, 0], [0, 0, 0, 0, -1]])


def test_score_is_clipped_before_the_missing_end_is_judged() -> None:
    reward = shaped(
        f64([50, -50]),
        score_clip=5,
        finished=torch.tensor([True, False]),
        no_eos="subtract",
        no_eos_penalty=2,
    )
    assert_close(reward.sum(1), [5, -7])


@given(padding=st.integers(0, 4), prompt=st.integers(0, 4))
def test_shaped_reward_does_not_see_padding_or_prompt(padding: int, prompt: int) -> None:
    def widen(column: Tensor, fill: float) -> Tensor:
        return torch.nn.functional.pad(column, (prompt, padding), value=fill)

    reward = shaped(
        SCORE, widen(MASK, 0), logprob=widen(LOG_RATIO, -7.0), ref_logprob=widen(ZEROS, 3.0)
    )
    assert_close(reward[:, prompt : prompt + 5], LAST_TOKEN)
    assert reward.abs().sum().item() == pytest.approx(f64(LAST_TOKEN).abs().sum().item(), abs=1e-6)


@pytest.mark.parametrize(("observed", "expected"), [(9, 0.150768), (5.4, 0.149616)])
def test_adaptive_coefficient(observed: float, expected: float) -> None:
    kl_coef = adaptive_kl_coef(
        0.15, observed_kl=observed, target_kl=6, num_sequences=256, horizon=10_000
    )
    assert kl_coef == pytest.approx(expected, abs=1e-6)


@given(
    observed=st.floats(-1e6, 1e6),
    num_sequences=st.integers(0, 10**7),
    max_change=st.floats(0.01, 0.99),
)
def test_an_adaptive_coefficient_stays_positive(
    observed: float, num_sequences: int, max_change: float
) -> None:
    """And within `max_change` of what it was, however many rows a step has."""
    kl_coef = adaptive_kl_coef(
        0.1, observed_kl=observed, num_sequences=num_sequences, max_change=max_change
    )
    assert kl_coef > 0
    assert abs(kl_coef / 0.1 - 1) <= max_change + 1e-12


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: shaped(no_eos="zero"), "no_eos='zero' must know .* pass finished=bool"),
        (lambda: shaped(SCORE[:1]), r"score must have one entry per row .* \[2\], got \[1\]"),
        (lambda: shaped(score_slot="eos"), "score_slot 'eos' is unknown; choose 'last_token'"),
        (
            lambda: kl_estimate(
                MASK, logprob=ZEROS, ref_logprob=ZEROS, estimator=cast("Any", "k4")
            ),
            "KL estimator 'k4' is unknown; choose 'k1', 'k2'",
        ),
        (
            lambda: adaptive_kl_coef(0.1, observed_kl=1, target_kl=0, num_sequences=1),
            "target_kl and horizon must be positive, got 0 and 10000",
        ),
        (
            lambda: adaptive_kl_coef(0.1, observed_kl=1, num_sequences=1, max_change=1),
            "max_change must be at least 0 and below 1, got 1;",
        ),
    ],
)
def test_messages(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
