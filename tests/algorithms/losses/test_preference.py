"""Formulas on pairs and single responses, against worked examples and what must hold of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock.algorithms.losses import DPOLoss, KTOLoss
from penstock.algorithms.losses.preference import BradleyTerryLoss, dpo_loss, kto_kl, kto_loss
from penstock.algorithms.papers.margin_modelling import MarginLoss
from penstock.algorithms.papers.safe_rlhf import CostModelLoss
from penstock.algorithms.roles import (
    FeedbackBatch,
    PolicyOutput,
    PreferencePairs,
    ReferencePairBatch,
    ScoredPairs,
    ScoreOutput,
)
from torch import Tensor

EXAMPLE = [torch.tensor([x], dtype=torch.float64) for x in (-12.0, -15.0, -13.0, -14.0)]
LENGTHS: dict[str, Any] = {
    "chosen_length": torch.tensor([4]),
    "rejected_length": torch.tensor([10]),
}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0.598139),
        ({"label_smoothing": 0.1}, 0.618139),
        ({"loss_type": "sigmoid_norm", "beta": 5.0, **LENGTHS}, 0.160224),
        ({"loss_type": "ipo"}, 9.0),
        ({"loss_type": "ipo", "ipo_length": "average", **LENGTHS}, 21.6225),
        ({"loss_type": "hinge"}, 0.8),
        ({"loss_type": "robust", "label_smoothing": 0.1}, (0.9 * 0.598139 - 0.1 * 0.798139) / 0.8),
    ],
)
def test_dpo_and_its_kin(options: dict[str, Any], expected: float) -> None:
    assert float(dpo_loss(*EXAMPLE, **options)) == pytest.approx(expected, abs=1e-6)


def test_kto() -> None:
    losses = kto_loss(torch.tensor([2.0, 1.0]).double(), torch.tensor([True, False]), kl=0.5)
    assert losses.tolist() == pytest.approx([0.46257, 0.512497], abs=1e-6)
    assert losses.mean().item() == pytest.approx(0.487534, abs=1e-6)
    assert float(kto_kl(torch.tensor([0.25, 0.75]))) == 0.5
    assert float(kto_kl(torch.tensor([-3.0, 1.0]))) == 0
    weighed = kto_loss(
        torch.tensor([2.0, 1.0]),
        torch.tensor([True, False]),
        kl=0.5,
        desirable_weight=2.0,
        undesirable_weight=0.5,
    )
    assert weighed.tolist() == pytest.approx([0.92514, 0.2562485], abs=1e-6)


@given(
    st.lists(st.floats(-30, 30), min_size=2, max_size=2),
    st.sampled_from(["sigmoid", "robust"]),
    st.floats(0.01, 2),
)
def test_equal_log_ratios_cost_ln_2(logprobs: list[float], loss_type: Any, beta: float) -> None:
    chosen, rejected = (torch.tensor([x]).double() for x in logprobs)
    loss = dpo_loss(chosen, rejected, chosen - 1, rejected - 1, loss_type=loss_type, beta=beta)
    assert float(loss) == pytest.approx(math.log(2), abs=1e-6)


@given(st.floats(-20, 20), st.floats(0.01, 2))
def test_only_differences_count(shift: float, beta: float) -> None:
    """What is common to both responses of a pair changes nothing."""
    moved = [column + shift for column in EXAMPLE[:2]] + EXAMPLE[2:]
    torch.testing.assert_close(dpo_loss(*moved, beta=beta), dpo_loss(*EXAMPLE, beta=beta))


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"one shape \[pairs\], got \[1\], \[1\], \[1\], \[2\]"):
        dpo_loss(EXAMPLE[0], EXAMPLE[1], EXAMPLE[2], torch.zeros(2))
    with pytest.raises(ValueError, match="pass chosen_length and rejected_length"):
        dpo_loss(*EXAMPLE, loss_type="sigmoid_norm")
    with pytest.raises(ValueError, match="'plain' is unknown; choose 'sigmoid'"):
        dpo_loss(*EXAMPLE, loss_type="plain")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"desirable must be bool\[2\] like log_ratio, got float"):
        kto_loss(torch.zeros(2), torch.zeros(2), kl=0.0)


# --- as losses over batches -----------------------------------------------------------------------


def tokens_like(mask: Tensor) -> Tensor:
    return torch.where(mask, 1, -1)


MASK = (torch.arange(10) < torch.tensor([[4], [10], [3], [3]])).bool()
PAIRS = {
    "pair_id": torch.tensor([7, 7, 5, 5]),
    "chosen": torch.tensor([True, False, False, True]),
    "mask": MASK,
    "tokens": tokens_like(MASK),
}


def spread(sums: list[float]) -> Tensor:
    """Log-probabilities with these sums over the masked tokens."""
    return torch.where(MASK, torch.tensor(sums).double()[:, None] / MASK.sum(1, keepdim=True), 9.0)


def dpo_batch(mask: Tensor = MASK) -> ReferencePairBatch:
    columns = {**PAIRS, "mask": mask}
    return ReferencePairBatch(**columns, ref_logprob=spread([-13, -14, -3, -3]))


def test_dpo_loss_sums_over_tokens_and_averages_over_pairs() -> None:
    """The second pair has equal log-ratios: ln 2."""
    loss, batch = DPOLoss(), dpo_batch()
    result = loss(PolicyOutput(spread([-12, -15, -2, -2])), batch, loss.totals(batch))
    assert float(result.total) == pytest.approx((0.598139 + math.log(2)) / 2, abs=1e-6)
    means = {name: float(s) / float(w) for name, (s, w) in result.metrics.items()}
    assert means["chosen_reward"] == pytest.approx(0.1)  # of both pairs, 0.1 each
    assert means["rejected_reward"] == pytest.approx(0.0)  # -0.1 and 0.1
    assert means["accuracy"] == 0.5
    assert means["used_fraction"] == 1


def test_a_pair_without_tokens_counts_for_nothing() -> None:
    mask = MASK.clone()
    mask[2:] = False
    loss, batch = DPOLoss(sft_coef=0.5), dpo_batch(mask)
    logprob = spread([-12, -15, -2, -2]).requires_grad_()
    result = loss(PolicyOutput(logprob), batch, loss.totals(batch))
    assert result.total.item() == pytest.approx(0.598139 + 0.5 * 12 / 4, abs=1e-6)
    (gradient,) = torch.autograd.grad(result.total, logprob)
    assert not gradient[2:].any()
    nothing = dpo_batch(torch.zeros_like(MASK))
    assert float(loss(PolicyOutput(spread([1, 2, 3, 4])), nothing, loss.totals(nothing)).total) == 0


def test_kto_loss_averages_over_responses() -> None:
    batch = FeedbackBatch(
        tokens=tokens_like(MASK[:2]),
        mask=MASK[:2],
        desirable=torch.tensor([True, False]),
        ref_logprob=spread([-4, -4, 0, 0])[:2],
        kl=torch.tensor([0.5, 0.5]),
    )
    loss = KTOLoss()
    output = PolicyOutput(spread([-2, -3, 0, 0])[:2])
    assert float(loss(output, batch, loss.totals(batch)).total) == pytest.approx(0.487534, abs=1e-6)


SCORES = ScoreOutput(torch.tensor([1.2, 0.7, 0.8, 0.3]).double())
RATED = torch.tensor([1.0, 1.0, 0.5, 1.0])


def test_margins_come_from_the_data() -> None:
    """Chosen 1.2 and 0.3, rejected 0.7 and 0.8; the data says 0 and 0.5 better."""
    scored = ScoredPairs(**PAIRS, score=RATED)
    loss = MarginLoss()
    assert float(loss(SCORES, scored, loss.totals(scored)).total) == pytest.approx(0.893669, 1e-6)
    plain, batch = BradleyTerryLoss(), PreferencePairs(**PAIRS)
    expected = float(plain(SCORES, batch, plain.totals(batch)).total)
    assert expected == pytest.approx(0.724077, abs=1e-6)
    none = MarginLoss(margin_coef=0.0)
    assert float(none(SCORES, scored, none.totals(scored)).total) == pytest.approx(expected)
    centered = MarginLoss(margin_coef=0.0, centering_coef=0.01)
    total = float(centered(SCORES, scored, centered.totals(scored)).total)
    assert total == pytest.approx(0.748177, abs=1e-6)


def test_cost_model_loss_reads_labels_off_the_scores() -> None:
    """Pair 7: unsafe 1, safe -0.5; pair 5: both unsafe, 0.2 the worse and 0.6 the better."""
    batch = ScoredPairs(**PAIRS, score=torch.tensor([1.0, 0.0, 0.0, 0.0]))
    loss = CostModelLoss()
    output = ScoreOutput(torch.tensor([-0.5, 1.0, 0.2, 0.6]).double())
    result = loss(output, batch, loss.totals(batch))
    assert float(result.total) == pytest.approx(1.468697, abs=1e-6)
    assert [float(x) for x in result.metrics["unsafe_accuracy"]] == [4, 4]
    assert [float(x) for x in result.metrics["accuracy"]] == [1, 2]
