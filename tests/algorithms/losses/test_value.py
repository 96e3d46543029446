"""The `Loss` classes: printed numbers, metrics, messages."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from penstock.algorithms.losses import (
    BradleyTerryLoss,
    ClippedPolicyLoss,
    ClippedValueLoss,
    CrossEntropyLoss,
    KLGradient,
    ReferenceKLPolicyLoss,
)
from penstock.algorithms.roles import (
    Demonstrations,
    Feedback,
    PolicyBatch,
    PolicyOutput,
    PreferencePairs,
    ReferencePolicyBatch,
    ScoreOutput,
    ValueBatch,
    ValueOutput,
)
from penstock.dataflow.graph.role import Loss, LossSum
from torch import Tensor

from ..tensors import f64


def value_of(metric: tuple[Tensor, Tensor]) -> float:
    total, weight = metric
    return total.item() / weight.item()


def whole(loss: Loss[Any, Any], output: Any, batch: Any) -> LossSum:
    return loss(output, batch, loss.totals(batch))


def policy_batch(behavior_logprob: Tensor, advantage: Tensor, mask: Tensor) -> PolicyBatch:
    return PolicyBatch(
        tokens=torch.zeros_like(mask).long(),
        mask=mask,
        behavior_logprob=behavior_logprob,
        advantage=advantage,
    )


# --- policies -------------------------------------------------------------------------------------

LOG_RATIO = f64([[0.3, -0.3, 0.1], [0.3, -0.5, 1.5]])
ADVANTAGE = f64([[1, 1, 1], [-1, -1, -2]])


def widen(column: Tensor, fill: float) -> Tensor:
    """Two prompt positions in front and one of padding behind."""
    return torch.nn.functional.pad(column, (2, 1), value=fill)


@pytest.mark.parametrize(("dual_clip", "expected"), [(None, 1.344541), (3.0, 0.850645)])
def test_clipped_policy_loss_and_its_metrics(dual_clip: float | None, expected: float) -> None:
    batch = policy_batch(
        widen(torch.full_like(LOG_RATIO, -1), -torch.inf),
        widen(ADVANTAGE, torch.nan),
        widen(torch.ones(2, 3).bool(), 0),
    )
    result = whole(
        ClippedPolicyLoss(dual_clip=dual_clip),
        PolicyOutput(logprob=widen(LOG_RATIO - 1, torch.nan)),
        batch,
    )
    values = {name: value_of(metric) for name, metric in result.metrics.items()}
    assert result.total.item() == pytest.approx(expected, abs=1e-6)
    assert values.pop("policy_loss") == pytest.approx(expected, abs=1e-6)
    assert values.pop("clip_fraction_low") + values.pop("clip_fraction_high") == pytest.approx(
        0.333333, abs=1e-6
    )
    assert values.pop("approx_kl_k1") == pytest.approx(-0.233333, abs=1e-6)
    assert values.pop("approx_kl_k3") == pytest.approx(0.372321, abs=1e-6)
    assert values.pop("ratio_mean") == pytest.approx(LOG_RATIO.exp().mean().item())
    assert values == ({} if dual_clip is None else {"dual_clip_fraction": pytest.approx(1 / 6)})


def test_clip_fractions_tell_low_from_high() -> None:
    ratios = f64([[1.5, 1.5, 0.5, 0.5, 0.5]])
    result = whole(
        ClippedPolicyLoss(),
        PolicyOutput(logprob=ratios.log()),
        policy_batch(torch.zeros_like(ratios), f64([[1, -1, -1, 1, -1]]), ratios > 0),
    )
    assert value_of(result.metrics["clip_fraction_high"]) == pytest.approx(1 / 5)
    assert value_of(result.metrics["clip_fraction_low"]) == pytest.approx(2 / 5)


GRPO_BEHAVIOR = f64([[-1, -1.2], [-0.7, -0.3]])
GRPO_LOGPROB = GRPO_BEHAVIOR + f64([[0.1, -0.1], [0.25, 0]])
GRPO_BATCH = ReferencePolicyBatch(
    tokens=torch.zeros(2, 2).long(),
    mask=torch.ones(2, 2).bool(),
    behavior_logprob=GRPO_BEHAVIOR,
    advantage=f64([[1, 1], [-1, -1]]),
    ref_logprob=f64([[-1.1, -1.0], [-0.7, -0.5]]),
)


@pytest.mark.parametrize(
    ("kl_gradient", "expected"),
    [("as_is", 0.069665), ("is_corrected", 0.06972), ("straight_through_k2", 0.069665)],
)
def test_grpo_loss(kl_gradient: KLGradient, expected: float) -> None:
    loss = ReferenceKLPolicyLoss(
        policy=ClippedPolicyLoss(aggregation="seq-mean-token-mean"),
        kl_coef=0.04,
        kl_gradient=kl_gradient,
    )
    result = whole(loss, PolicyOutput(logprob=GRPO_LOGPROB), GRPO_BATCH)
    assert result.total.item() == pytest.approx(expected, abs=1e-6)
    k3 = f64([0.018731, 0.049859, 0.028801, 0.018731]).mean().item()
    assert value_of(result.metrics["ref_kl_k3_per_token"]) == pytest.approx(k3, abs=1e-6)
    k1 = (GRPO_LOGPROB - GRPO_BATCH.ref_logprob).sum().item() / 2
    assert value_of(result.metrics["ref_kl_k1_per_sequence"]) == pytest.approx(k1, abs=1e-6)


def kl_only_gradient(loss: ReferenceKLPolicyLoss) -> Tensor:
    """d loss / d logprob with zero advantage, so that the KL term alone is left."""
    logprob = GRPO_LOGPROB.clone().requires_grad_()
    batch = dataclasses.replace(GRPO_BATCH, advantage=torch.zeros(2, 2).double())
    total = whole(loss, PolicyOutput(logprob=logprob), batch).total
    return torch.autograd.grad(total, logprob)[0] * 4 / loss.kl_coef


def test_kl_gradients() -> None:
    """Token-mean over 4 tokens; d k3 = 1 - exp(-d), d k2 = d, d (ratio k3) = ratio (k3 + d k3)."""
    d = GRPO_LOGPROB - GRPO_BATCH.ref_logprob
    k3, d_k3 = torch.exp(-d) - 1 + d, 1 - torch.exp(-d)
    ratio = (GRPO_LOGPROB - GRPO_BEHAVIOR).exp()
    by_kind: dict[KLGradient, Tensor] = {
        "as_is": d_k3,
        "is_corrected": ratio * (k3 + d_k3),
        "straight_through_k2": d,
    }
    for kl_gradient, expected in by_kind.items():
        gradient = kl_only_gradient(ReferenceKLPolicyLoss(kl_gradient=kl_gradient))
        torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(kl_only_gradient(ReferenceKLPolicyLoss(kl_estimator="k2")), d)


def test_a_clamped_value_keeps_the_straight_through_gradient() -> None:
    """The clamp is on the value, here 0.01 for each token; k2's gradient is its own."""
    clamped = ReferenceKLPolicyLoss(kl_gradient="straight_through_k2", kl_value_clamp=0.01)
    torch.testing.assert_close(
        kl_only_gradient(clamped), kl_only_gradient(ReferenceKLPolicyLoss(kl_estimator="k2"))
    )
    batch = dataclasses.replace(GRPO_BATCH, advantage=torch.zeros(2, 2).double())
    total = whole(clamped, PolicyOutput(logprob=GRPO_LOGPROB), batch).total
    assert total.item() == clamped.kl_coef * 0.01


def test_entropy_bonus_and_entropy_metric() -> None:
    entropy = f64([[0.5, 1.0, 1.5], [2.0, 0.0, 1.0]])
    batch = policy_batch(LOG_RATIO, ADVANTAGE, torch.ones(2, 3).bool())
    plain = whole(ClippedPolicyLoss(), PolicyOutput(logprob=LOG_RATIO), batch)
    loss = ClippedPolicyLoss(entropy_coef=0.1)
    result = whole(loss, PolicyOutput(logprob=LOG_RATIO, entropy=entropy), batch)
    assert result.total.item() == pytest.approx(plain.total.item() - 0.1)
    assert value_of(result.metrics["entropy"]) == pytest.approx(1.0)
    assert loss.needs_entropy
    assert ClippedPolicyLoss(report_entropy=True).needs_entropy
    assert not ClippedPolicyLoss().needs_entropy
    assert ReferenceKLPolicyLoss(policy=loss).needs_entropy
    with pytest.raises(ValueError, match="entropy bonus but the forward pass gave no entropy"):
        whole(loss, PolicyOutput(logprob=LOG_RATIO), batch)


# --- critics, demonstrations, preferences ---------------------------------------------------------


def value_batch(old_value: Tensor, value_target: Tensor) -> ValueBatch:
    return ValueBatch(
        tokens=torch.zeros_like(old_value).long(),
        mask=torch.ones_like(old_value).bool(),
        old_value=old_value,
        value_target=value_target,
    )


def test_clipped_value_loss() -> None:
    batch = value_batch(f64([[0.5, 0.5, 0.5]]), f64([[1, 0.6, -0.5]]))
    output = ValueOutput(value=f64([[0.9, 0.2, 0]]))
    result = whole(ClippedValueLoss(eps=0.2), output, batch)
    assert result.total.item() == pytest.approx(0.148333, abs=1e-6)
    assert value_of(result.metrics["value_loss"]) == pytest.approx(0.148333, abs=1e-6)
    assert value_of(result.metrics["value_clip_fraction"]) == pytest.approx(0.666667, abs=1e-6)
    assert value_of(result.metrics["explained_variance"]) == pytest.approx(0, abs=1e-12)
    halved = whole(ClippedValueLoss(eps=0.2, coef=0.5), output, batch)
    assert halved.total.item() == pytest.approx(0.148333 / 2, abs=1e-6)


def test_explained_variance() -> None:
    target = f64([[1, 2, 4, 9]])
    error = f64([[0.5, -0.5, 1, 0]])
    result = whole(
        ClippedValueLoss(), ValueOutput(value=target), value_batch(target - error, target)
    )
    expected = 1 - error.var(correction=0) / target.var(correction=0)
    assert value_of(result.metrics["explained_variance"]) == pytest.approx(expected.item())


def test_constant_targets_have_no_explained_variance() -> None:
    target = torch.full((2, 3), 0.1).double()
    result = whole(ClippedValueLoss(), ValueOutput(value=target), value_batch(target * 0, target))
    total, weight = result.metrics["explained_variance"]
    assert (total.item(), weight.item()) == (0, 0)


def test_cross_entropy_loss() -> None:
    batch = Demonstrations(
        tokens=torch.zeros(2, 3).long(),
        mask=torch.tensor([[False, True, True], [False, False, True]]),
    )
    output = PolicyOutput(logprob=f64([[-9, -1, -2], [-torch.inf, -9, -4.5]]))
    result = whole(CrossEntropyLoss(), output, batch)
    assert result.total.item() == pytest.approx(2.5)
    assert value_of(result.metrics["cross_entropy"]) == pytest.approx(2.5)
    per_row = whole(CrossEntropyLoss(aggregation="seq-mean-token-mean"), output, batch)
    assert per_row.total.item() == pytest.approx(3)


def pair_batch(pair_id: list[int], chosen: list[int]) -> PreferencePairs:
    rows = len(pair_id)
    return PreferencePairs(
        pair_id=torch.tensor(pair_id),
        tokens=torch.zeros(rows, 1).long(),
        mask=torch.ones(rows, 1).bool(),
        chosen=torch.tensor(chosen).bool(),
    )


@pytest.mark.parametrize(("centering_coef", "expected"), [(0.0, 0.724077), (0.01, 0.748177)])
def test_bradley_terry_loss_pairs_rows_by_id(centering_coef: float, expected: float) -> None:
    """Pair 7: 1.2 against 0.7; pair 2: 0.3 against 0.8; rows shuffled."""
    batch = pair_batch([2, 7, 7, 2], [0, 1, 0, 1])
    output = ScoreOutput(score=f64([0.8, 1.2, 0.7, 0.3]))
    result = whole(BradleyTerryLoss(centering_coef=centering_coef), output, batch)
    assert result.total.item() == pytest.approx(expected, abs=1e-6)
    assert value_of(result.metrics["accuracy"]) == 0.5
    assert value_of(result.metrics["margin"]) == pytest.approx(0)
    assert value_of(result.metrics["score_mean"]) == pytest.approx(0.75)


def test_single_responses_are_compared_with_a_score_of_0() -> None:
    """The cross-entropy of their labels, however they are cut into micro-batches."""
    pairs = pair_batch([3, 8, 5], [1, 0, 1])
    batch = Feedback(**vars(pairs))
    score = f64([1.2, 0.7, -0.4])
    result = whole(BradleyTerryLoss(), ScoreOutput(score=score), batch)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(score, batch.chosen.double())
    assert result.total.item() == pytest.approx(expected.item())
    assert value_of(result.metrics["accuracy"]) == pytest.approx(1 / 3)
    assert value_of(result.metrics["score_mean"]) == pytest.approx(0.5)
    two = Feedback(**vars(pair_batch([4, 4], [1, 0])))  # the responses of a pair stay one
    result = whole(BradleyTerryLoss(), ScoreOutput(score=f64([1.0, 0.5])), two)
    assert result.total.item() == pytest.approx(math.log1p(math.exp(-0.5)))


def test_bradley_terry_margin() -> None:
    batch = pair_batch([0, 0], [1, 0])
    result = whole(BradleyTerryLoss(margin=0.5), ScoreOutput(score=f64([1.0, 0.5])), batch)
    assert result.total.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ("pair_id", "chosen", "message"),
    [
        ([4, 4], [1, 1], "pair 4 has 2 chosen and 0 rejected rows; .* exactly one of each"),
        ([4, 4, 9], [1, 0, 0], "pair 9 has 0 chosen and 1 rejected rows"),
    ],
)
def test_bradley_terry_refuses_broken_pairs(
    pair_id: list[int], chosen: list[int], message: str
) -> None:
    batch = pair_batch(pair_id, chosen)
    with pytest.raises(ValueError, match=message):
        whole(BradleyTerryLoss(), ScoreOutput(score=torch.zeros(len(pair_id))), batch)


def test_units_and_lag() -> None:
    assert BradleyTerryLoss.unit == "group"
    assert {loss.unit for loss in (ClippedPolicyLoss, ClippedValueLoss, CrossEntropyLoss)} == {
        "row"
    }
    assert not ClippedPolicyLoss.tolerates_lag
    assert not ReferenceKLPolicyLoss.tolerates_lag
    assert ClippedValueLoss.tolerates_lag
    assert CrossEntropyLoss.tolerates_lag
    assert BradleyTerryLoss.tolerates_lag


@pytest.mark.parametrize(
    ("loss", "name", "value"),
    [
        (CrossEntropyLoss, "aggregation_length", 0),
        (ClippedPolicyLoss, "aggregation_length", -1),
        (ClippedPolicyLoss, "eps_high", float("nan")),
        (ClippedPolicyLoss, "entropy_coef", float("inf")),
        (ClippedPolicyLoss, "log_ratio_clamp", 0.0),
        (ReferenceKLPolicyLoss, "kl_coef", float("nan")),
        (ReferenceKLPolicyLoss, "kl_log_ratio_clamp", -1.0),
        (ReferenceKLPolicyLoss, "kl_value_clamp", 0.0),
        (ClippedValueLoss, "aggregation_length", 0),
        (ClippedValueLoss, "eps", -0.1),
        (ClippedValueLoss, "coef", -1.0),
        (BradleyTerryLoss, "margin", float("nan")),
        (BradleyTerryLoss, "centering_coef", -0.01),
    ],
)
def test_options_out_of_range(loss: type, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name} is {value}; expected "):
        loss(**{name: value})


def test_messages() -> None:
    with pytest.raises(ValueError, match="ClippedPolicyLoss: aggregation 'constant' divides by a"):
        ClippedPolicyLoss(aggregation="constant")
    with pytest.raises(ValueError, match="CrossEntropyLoss: aggregation 'constant' divides by a"):
        CrossEntropyLoss(aggregation="constant")
    with pytest.raises(
        ValueError, match=r"eps_low must lie in \[0, 1\] .* got 1.5 and 0.2; 0.2 is"
    ):
        ClippedPolicyLoss(eps_low=1.5)
    with pytest.raises(ValueError, match="dual_clip must be above 1, got 0.5; 3 is usual, None"):
        ClippedPolicyLoss(dual_clip=0.5)
    with pytest.raises(ValueError, match="kl_coef must be positive, got 0.0; without a KL"):
        ReferenceKLPolicyLoss(kl_coef=0)
    with pytest.raises(ValueError, match="kl_estimator 'k1' has gradient 0 in expectation"):
        ReferenceKLPolicyLoss(kl_estimator="k1")
