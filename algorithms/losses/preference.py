"""Losses on preferences: what a policy or a scoring model trains with on labeled responses.

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

from ...dataflow.graph.role import Loss, LossSum
from ...dataflow.options import FiniteFloat, NonNegativeFloat, PositiveFloat, option_class
from ..ops.pairs import pair_rows
from ..ops.reductions import zero_where_masked_out
from ..roles.language import (
    FeedbackBatch,
    PairBatch,
    PolicyOutput,
    ReferencePairBatch,
    ScoreOutput,
)
from .base import CountedMean
from .preference_formulas import DPOLossType, IPOLength, dpo_loss, kto_loss
from .token_formulas import bradley_terry_loss

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
    """How hard the policy is pulled to the reference; IPO's tau."""
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
        """These pairs' share of the minibatch's loss.

        Raises:
            ValueError: If a pair does not have exactly one chosen and one rejected row here.
        """
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
    """How hard the policy is pulled to the reference."""
    desirable_weight: NonNegativeFloat = 1.0
    """Weight of desirable responses."""
    undesirable_weight: NonNegativeFloat = 1.0
    """Weight of the others."""

    def totals(self, batch: FeedbackBatch) -> Tensor:
        """f64[1]: responses."""
        return torch.full((1,), len(batch.mask), dtype=torch.float64, device=batch.mask.device)

    def __call__(self, output: PolicyOutput, batch: FeedbackBatch, totals: Tensor) -> LossSum:
        """These responses' share of the minibatch's loss."""
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


@option_class
class BradleyTerryLoss(CountedMean, Loss[PairBatch, ScoreOutput]):
    """Logistic loss on pairs of scores, averaged over pairs; see `bradley_terry_loss`."""

    unit: ClassVar[Literal["row", "group"]] = "group"
    tolerates_lag: ClassVar[bool] = True

    margin: FiniteFloat = 0.0
    """How much better the chosen response should score."""
    centering_coef: NonNegativeFloat = 0.0
    """Weight of the term that keeps scores around 0; 0.01 is usual."""

    def totals(self, batch: PairBatch) -> Tensor:
        """f64[1]: pairs."""
        return batch.chosen.sum().double()[None]

    def __call__(self, output: ScoreOutput, batch: PairBatch, totals: Tensor) -> LossSum:
        """These pairs' share of the minibatch's loss.

        Raises:
            ValueError: If a pair does not have exactly one chosen and one rejected row here.
        """
        return of_scores(output, batch, self.divisor(totals), self.margin, self.centering_coef)


def of_scores(
    output: ScoreOutput,
    batch: PairBatch,
    divisor: Tensor,
    margin: Tensor | float,
    centering_coef: float,
) -> LossSum:
    """Bradley and Terry's loss of pairs; `margin` in the order of `pair_rows`."""
    chosen_row, rejected_row = pair_rows(batch.pair_id, batch.chosen)
    chosen_score, rejected_score = output.score[chosen_row], output.score[rejected_row]
    loss = bradley_terry_loss(
        chosen_score=chosen_score,
        rejected_score=rejected_score,
        margin=margin,
        centering_coef=centering_coef,
    ).sum()
    pairs = divisor.new_tensor(float(len(chosen_row)))
    gap = (chosen_score - rejected_score).detach()
    metrics = {
        "accuracy": ((gap > 0).sum(), pairs),
        "margin": (gap.sum(), pairs),
        "score_mean": (output.score.detach().sum(), 2 * pairs),
    }
    return LossSum(loss / divisor.to(loss), metrics)
