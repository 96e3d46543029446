"""Losses on preferences: what a policy or a scoring model trains with on labeled responses.

The formulas are pure functions of one number per pair or per response. A policy's log-ratio of a
response is `log p(response) - log ref(response)`, summed over its tokens.

Metrics are weighted means, per pair unless it says otherwise:

- `preference_loss`: the loss without the likelihood term; `kto_loss`: per response.
- `accuracy`, `margin`: how often, and by how much, the chosen response has the higher score; of a
  policy, the higher implicit reward: `beta` times its log-ratio to the reference.
- `chosen_reward`, `rejected_reward`: the implicit rewards.
- `chosen_cross_entropy`: of the chosen response, in nats per token.
- `used_fraction`: share of pairs that have tokens to train on.
- `reference_point`: KTO's, in nats, per response; `desirable_reward`, `undesirable_reward`: mean
  implicit rewards of such responses.
- `score_mean`: per response.
- `unsafe_accuracy`: how often the sign of a cost agrees with its response's label, per response.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Lt
from torch import Tensor
from torch.nn import functional as F

from ...dataflow.graph.role import Loss, LossSum
from ...dataflow.options import FiniteFloat, NonNegativeFloat, PositiveFloat, option_class
from ..ops.pairs import pair_rows
from ..ops.reductions import unknown, zero_where_masked_out
from ..roles.language_tables import (
    Feedback,
    FeedbackBatch,
    PolicyOutput,
    PreferencePairs,
    ReferencePairBatch,
    ScoreOutput,
)
from .tokens import CountedMean, bradley_terry_loss

DPOLossType = Literal["sigmoid", "sigmoid_norm", "ipo", "hinge", "robust"]
"""A pair's loss as a function of h, chosen less rejected log-ratio; see `dpo_loss`."""

IPOLength = Literal["sum", "average"]
"""Whether IPO compares log-ratios of whole responses ("sum") or their means per token."""


def dpo_loss(
    chosen_logprob: Tensor,
    rejected_logprob: Tensor,
    ref_chosen_logprob: Tensor,
    ref_rejected_logprob: Tensor,
    *,
    beta: float = 0.1,
    loss_type: DPOLossType = "sigmoid",
    label_smoothing: float = 0.0,
    ipo_length: IPOLength = "sum",
    chosen_length: Tensor | None = None,
    rejected_length: Tensor | None = None,
) -> Tensor:
    """Loss of pairs of responses under a policy and a reference.

    With h the chosen response's log-ratio less the rejected one's:

    | loss_type      | value                                                                   |
    |----------------|-------------------------------------------------------------------------|
    | `sigmoid`      | `-(1 - e) log s(beta h) - e log s(-beta h)`, e the label smoothing       |
    | `sigmoid_norm` | the same, log-ratios divided by their responses' lengths                |
    | `ipo`          | `(h - 1 / (2 beta))^2`                                                  |
    | `hinge`        | `relu(1 - beta h)`                                                      |
    | `robust`       | `(-(1 - e) log s(beta h) + e log s(-beta h)) / (1 - 2 e)`               |

    Rafailov et al., "Direct Preference Optimization", 2023; `sigmoid_norm`: Lambert et al., "Tulu
    3", 2024; `ipo`: Azar et al., "A General Theoretical Paradigm to Understand Learning from Human
    Preferences", 2023; `robust`: Chowdhury et al., "Provably Robust DPO", 2024.

    Args:
        chosen_logprob: f32[pairs], summed over the chosen response's tokens, differentiable.
        rejected_logprob: f32[pairs], of the rejected response, differentiable.
        ref_chosen_logprob: f32[pairs], of the chosen response under the reference.
        ref_rejected_logprob: f32[pairs], of the rejected response under the reference.
        beta: How hard the policy is pulled to the reference; IPO's tau.
        loss_type: See the table.
        label_smoothing: Share of pairs that are the wrong way round, below one half; read by the
            two sigmoids and `robust`.
        ipo_length: Whether `ipo` sums log-ratios (the paper) or averages them over tokens.
        chosen_length: Tokens of the chosen response, [pairs], where log-ratios are averaged.
        rejected_length: Tokens of the rejected response.

    Returns:
        f32[pairs], to be minimized.

    Raises:
        ValueError: If shapes differ, a choice is unknown, lengths are needed and missing, or the
            label smoothing does not lie in [0, 0.5).
    """
    columns = (chosen_logprob, rejected_logprob, ref_chosen_logprob, ref_rejected_logprob)
    if len({column.shape for column in columns}) != 1:
        shapes = ", ".join(str(list(column.shape)) for column in columns)
        raise ValueError(f"the four log-probabilities must have one shape [pairs], got {shapes}")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}; expected 0 or more, below 0.5")
    if ipo_length not in ("sum", "average"):
        raise unknown("ipo_length", ipo_length, IPOLength)
    chosen = chosen_logprob - ref_chosen_logprob
    rejected = rejected_logprob - ref_rejected_logprob
    if loss_type == "sigmoid_norm" or (loss_type == "ipo" and ipo_length == "average"):
        if chosen_length is None or rejected_length is None:
            said = "averages over tokens here; pass chosen_length and rejected_length"
            raise ValueError(f"loss_type {loss_type!r} {said}")
        chosen = chosen / chosen_length.clamp(min=1)
        rejected = rejected / rejected_length.clamp(min=1)
    h = chosen - rejected
    right, wrong = -F.logsigmoid(beta * h), -F.logsigmoid(-beta * h)
    match loss_type:
        case "sigmoid" | "sigmoid_norm":
            return (1 - label_smoothing) * right + label_smoothing * wrong
        case "ipo":
            return (h - 1 / (2 * beta)).square()
        case "hinge":
            return torch.relu(1 - beta * h)
        case "robust":
            mixed = (1 - label_smoothing) * right - label_smoothing * wrong
            return mixed / (1 - 2 * label_smoothing)
        case _:
            raise unknown("loss_type", loss_type, DPOLossType)


def kto_kl(log_ratio: Tensor) -> Tensor:
    """KTO's reference point: `max(0, mean)` of log-ratios of prompts with other prompts' responses.

    Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization", 2024, section 4.2.

    Args:
        log_ratio: f32[rows], `log p - log ref` of each mismatched response, without beta.

    Returns:
        f32 scalar, not differentiable; 0 for no rows.
    """
    if not len(log_ratio):
        return log_ratio.new_zeros(())
    return log_ratio.detach().double().mean().clamp(min=0).to(log_ratio)


def kto_loss(
    log_ratio: Tensor,
    desirable: Tensor,
    *,
    kl: Tensor | float,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """KTO's loss of single responses that people liked or did not.

    `w_D (1 - s(beta (r - kl)))` where desirable, `w_U (1 - s(beta (kl - r)))` elsewhere. Ethayarajh
    et al., "KTO", 2024, equation 8.

    Args:
        log_ratio: f32[rows], `log p - log ref` of each response, differentiable.
        desirable: bool[rows].
        kl: The reference point, see `kto_kl`: one number or f32[rows].
        beta: How hard the policy is pulled to the reference.
        desirable_weight: Weight of desirable responses.
        undesirable_weight: Weight of the others. Choose both so that `desirable_weight * number of
            desirable / (undesirable_weight * number of others)` lies in [1, 4/3].

    Returns:
        f32[rows], to be minimized.

    Raises:
        ValueError: If shapes differ or `desirable` is not boolean.
    """
    if desirable.dtype != torch.bool or desirable.shape != log_ratio.shape:
        raise ValueError(
            f"desirable must be bool{list(log_ratio.shape)} like log_ratio, got "
            f"{str(desirable.dtype).removeprefix('torch.')}{list(desirable.shape)}"
        )
    signed = torch.where(desirable, log_ratio - kl, kl - log_ratio)
    loss = 1 - torch.sigmoid(beta * signed)
    return torch.where(desirable, desirable_weight * loss, undesirable_weight * loss)


_ROUNDING = 4e-6
"""Nats per token by which log-probabilities of the same weights differ between calls in float32: a
smaller gap is a tie, and no pair told apart."""


@option_class
class DPOLoss(CountedMean, Loss[ReferencePairBatch, PolicyOutput]):
    """Direct preference optimization and its kin, averaged over pairs; see `dpo_loss`.

    By default `-log sigmoid(beta h)`, where h is the chosen response's log-ratio of policy to
    reference less the rejected one's (Rafailov et al. 2023, equation 7).
    A pair without trained tokens counts for nothing.
    """

    unit: ClassVar[Literal["row", "group"]] = "group"
    tolerates_lag: ClassVar[bool] = True

    beta: PositiveFloat = 0.1
    """Strength of the pull to the reference; IPO's tau."""
    loss_type: DPOLossType = "sigmoid"
    """"sigmoid" is DPO, "sigmoid_norm" divides log-ratios by lengths, "ipo", "hinge", "robust"."""
    label_smoothing: Annotated[FiniteFloat, Ge(0), Lt(0.5)] = 0.0
    """Share of pairs taken to be the wrong way round."""
    ipo_length: IPOLength = "sum"
    """Whether IPO sums log-ratios over tokens, as its paper does, or averages them ("average")."""
    sft_coef: NonNegativeFloat = 0.0
    """Weight of the chosen response's cross-entropy, per token of it."""

    def totals(self, batch: ReferencePairBatch) -> Tensor:
        """f64[1]: pairs with trained tokens."""
        return (batch.chosen & batch.mask.any(dim=1)).sum().double()[None]

    def __call__(self, output: PolicyOutput, batch: ReferencePairBatch, totals: Tensor) -> LossSum:
        chosen, rejected = pair_rows(batch.pair_id, batch.chosen)
        logprob = zero_where_masked_out(output.logprob, batch.mask).sum(dim=1)
        reference = zero_where_masked_out(batch.ref_logprob, batch.mask).sum(dim=1)
        length = batch.mask.sum(dim=1)
        used = length[chosen] > 0
        per_pair = dpo_loss(
            logprob[chosen],
            logprob[rejected],
            reference[chosen],
            reference[rejected],
            beta=self.beta,
            loss_type=self.loss_type,
            label_smoothing=self.label_smoothing,
            ipo_length=self.ipo_length,
            chosen_length=length[chosen],
            rejected_length=length[rejected],
        )
        entropy = -logprob[chosen] / length[chosen].clamp(min=1)
        loss = torch.where(used, per_pair + self.sft_coef * entropy, 0.0).sum()
        reward = self.beta * (logprob - reference).detach()
        gap = reward[chosen] - reward[rejected]
        rounding = self.beta * _ROUNDING * (length[chosen] + length[rejected])
        columns = {
            "preference_loss": per_pair.detach(),
            "accuracy": (gap > rounding).to(gap),
            "margin": gap,
            "chosen_reward": reward[chosen],
            "rejected_reward": reward[rejected],
            "chosen_cross_entropy": entropy.detach(),
        }
        count = used.sum()
        metrics = {name: (torch.where(used, c, 0.0).sum(), count) for name, c in columns.items()}
        metrics["used_fraction"] = (count, torch.full_like(count, len(used)))
        return LossSum(loss / self.divisor(totals).to(loss), metrics)


@option_class
class KTOLoss(CountedMean, Loss[FeedbackBatch, PolicyOutput]):
    """Loss of responses that people liked or did not, averaged over responses; see `kto_loss`."""

    tolerates_lag: ClassVar[bool] = True

    beta: PositiveFloat = 0.1
    """Strength of the pull to the reference."""
    desirable_weight: NonNegativeFloat = 1.0
    """Weight of desirable responses."""
    undesirable_weight: NonNegativeFloat = 1.0
    """Weight of the others."""

    def totals(self, batch: FeedbackBatch) -> Tensor:
        return torch.full((1,), len(batch.mask), dtype=torch.float64, device=batch.mask.device)

    def __call__(self, output: PolicyOutput, batch: FeedbackBatch, totals: Tensor) -> LossSum:
        logprob = zero_where_masked_out(output.logprob, batch.mask).sum(dim=1)
        log_ratio = logprob - zero_where_masked_out(batch.ref_logprob, batch.mask).sum(dim=1)
        per_row = kto_loss(
            log_ratio,
            batch.desirable,
            kl=batch.kl,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )
        reward, rows = self.beta * log_ratio.detach(), totals.new_tensor(float(len(log_ratio)))
        liked, disliked = batch.desirable, ~batch.desirable
        metrics = {
            "kto_loss": (per_row.detach().sum(), rows),
            "reference_point": (batch.kl.sum(), rows),
            "desirable_reward": (torch.where(liked, reward, 0.0).sum(), liked.sum()),
            "undesirable_reward": (torch.where(disliked, reward, 0.0).sum(), disliked.sum()),
        }
        return LossSum(per_row.sum() / self.divisor(totals).to(per_row), metrics)


class PairMean(CountedMean):
    """A mean over pairs of a scoring model's loss."""

    unit: ClassVar[Literal["row", "group"]] = "group"
    tolerates_lag: ClassVar[bool] = True

    def totals(self, batch: PreferencePairs) -> Tensor:
        pairs = len(batch.pair_id) if are_alone(batch) else batch.chosen.sum()
        return torch.as_tensor(pairs, device=batch.chosen.device).double()[None]


def are_alone(batch: PreferencePairs) -> bool:
    """Return whether rows are single responses that have a label, and no pairs."""
    return isinstance(batch, Feedback) and len(batch.pair_id.unique()) == len(batch.pair_id)


@option_class
class BradleyTerryLoss(PairMean, Loss[PreferencePairs, ScoreOutput]):
    """Logistic loss on pairs of scores, averaged over pairs; see `bradley_terry_loss`.

    A single response that is good or bad is compared with one of score 0: the sigmoid of its score
    is the probability that it is good, and the loss the cross-entropy of its label (Cobbe et al.,
    "Training Verifiers to Solve Math Word Problems", 2021).
    """

    margin: FiniteFloat = 0.0
    """Least difference between the scores of the chosen and the rejected response."""
    centering_coef: NonNegativeFloat = 0.0
    """Weight of the term that keeps scores around 0; 0.01 is usual."""

    def __call__(self, output: ScoreOutput, batch: PreferencePairs, totals: Tensor) -> LossSum:
        return of_scores(output, batch, self.divisor(totals), self.margin, self.centering_coef)


def of_scores(
    output: ScoreOutput,
    batch: PreferencePairs,
    divisor: Tensor,
    margin: Tensor | float,
    centering_coef: float,
) -> LossSum:
    """Bradley and Terry's loss of pairs; `margin` in the order of `pair_rows`."""
    if are_alone(batch):
        score, rows = output.score, 1
        chosen_score = torch.where(batch.chosen, score, 0.0)
        rejected_score = torch.where(batch.chosen, 0.0, score)
    else:
        chosen_row, rejected_row = pair_rows(batch.pair_id, batch.chosen)
        chosen_score, rejected_score = output.score[chosen_row], output.score[rejected_row]
        rows = 2
    loss = bradley_terry_loss(
        chosen_score=chosen_score,
        rejected_score=rejected_score,
        margin=margin,
        centering_coef=centering_coef,
    ).sum()
    pairs = divisor.new_tensor(float(len(chosen_score)))
    gap = (chosen_score - rejected_score).detach()
    metrics = {
        "accuracy": ((gap > 0).sum(), pairs),
        "margin": (gap.sum(), pairs),
        "score_mean": (output.score.detach().sum(), rows * pairs),
    }
    return LossSum(loss / divisor.to(loss), metrics)
