"""Losses: what a worker trains with, built from the formulas of `loss_terms`.

A loss names the batch it reads, hides what is masked out, and reduces by one of the modes of
`reductions`. It can be computed in any number of micro-batches: their results add up to the
minibatch's loss. The ratio of a policy loss is against `behavior_logprob`, the policy that sampled
the tokens. Every loss, and every formula of one, can be imported from here. `policy_loss` is for
tensors without any of this.

Metrics are weighted means, per token unless it says otherwise:

- `policy_loss`, `value_loss`: the loss without entropy and KL terms, as aggregated.
- `ratio_mean`: new over behaviour probability; 1 when both are the same policy.
- `clip_fraction_low`, `clip_fraction_high`, `dual_clip_fraction`: share of tokens whose update that
  bound stopped.
- `capped_fraction`: share of tokens whose weight the cap held.
- `sequence_log_ratio`: log of new over behaviour probability of a whole response, in nats.
- `score_gap`: per pair, how far apart the two responses' scores are.
- `approx_kl_k1`, `approx_kl_k3`: KL(behaviour || policy) by two estimators, in nats.
- `entropy`: of the next-token distribution, in nats; if the forward pass computed it.
- `ref_kl_k1_per_sequence`, `ref_kl_k3_per_token`: KL(policy || reference), in nats.
- `value_clip_fraction`: share of tokens where the value clip decided the loss.
- `explained_variance`: 1 - Var(target - old value) / Var(target), over the minibatch.
- `cross_entropy`: in nats.

Those of preferences and scoring models are in `pair_losses`, with their metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..dataflow.ranges import check_range
from ..dataflow.role import Loss, LossSum
from .column_losses import policy_loss
from .loss_terms import (
    RatioLevel,
    bradley_terry_loss,
    capped_weight_loss,
    clipped_policy_loss,
    clipped_value_loss,
    cross_entropy,
    probability_ratio,
    reinforce_loss,
)
from .pair_losses import BradleyTerryLoss, CostModelLoss, DPOLoss, KTOLoss, MarginLoss
from .policy_losses import (
    CappedWeightLoss,
    ClippedPolicyLoss,
    KLGradient,
    ReferenceKLPolicyLoss,
    ReinforceLoss,
)
from .preference_losses import cost_model_loss, dpo_loss, kto_kl, kto_loss
from .reductions import aggregation_totals, zero_where_masked_out
from .roles import (
    DemonstrationBatch,
    PolicyOutput,
    ValueBatch,
    ValueColumns,
    ValueOutput,
)
from .sequence_losses import ALoLLoss, MirrorDescentLoss, P3OLoss, RebelLoss
from .sequence_terms import (
    a_lol_kl_loss,
    a_lol_loss,
    mirror_descent_loss,
    p3o_loss,
    rebel_loss,
    sequence_sum,
)
from .token_losses import TokenAggregation, token_metric

__all__ = [
    "ALoLLoss",
    "BradleyTerryLoss",
    "CappedWeightLoss",
    "ClippedPolicyLoss",
    "ClippedValueLoss",
    "CostModelLoss",
    "CrossEntropyLoss",
    "DPOLoss",
    "KLGradient",
    "KTOLoss",
    "MarginLoss",
    "MirrorDescentLoss",
    "P3OLoss",
    "RatioLevel",
    "RebelLoss",
    "ReferenceKLPolicyLoss",
    "ReinforceLoss",
    "TokenAggregation",
    "a_lol_kl_loss",
    "a_lol_loss",
    "bradley_terry_loss",
    "capped_weight_loss",
    "clipped_policy_loss",
    "clipped_value_loss",
    "cost_model_loss",
    "cross_entropy",
    "dpo_loss",
    "kto_kl",
    "kto_loss",
    "mirror_descent_loss",
    "p3o_loss",
    "policy_loss",
    "probability_ratio",
    "rebel_loss",
    "reinforce_loss",
    "sequence_sum",
]


@dataclass(frozen=True, kw_only=True)
class ClippedValueLoss(TokenAggregation, Loss[ValueBatch, ValueOutput]):
    """A critic's clipped squared error; see `clipped_value_loss`."""

    tolerates_lag: ClassVar[bool] = True

    eps: float | None = 0.2
    """How far one update may move a prediction from the old one; None for the plain error."""
    coef: float = 1.0
    """Factor on the whole loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "eps", "coef", at_least=0)

    def totals(self, batch: ValueColumns) -> Tensor:
        """f64[7]: `aggregation_totals`, then first and second moments of target and old error."""
        target = zero_where_masked_out(batch.value_target, batch.mask).double()
        error = target - zero_where_masked_out(batch.old_value, batch.mask).double()
        moments = [target.sum(), target.square().sum(), error.sum(), error.square().sum()]
        return torch.cat([aggregation_totals(batch.mask), torch.stack(moments)])

    def __call__(self, output: ValueOutput, batch: ValueColumns, totals: Tensor) -> LossSum:
        """These rows' share of the minibatch's loss."""
        mask = batch.mask
        value = zero_where_masked_out(output.value, mask)
        old_value = zero_where_masked_out(batch.old_value, mask)
        value_target = zero_where_masked_out(batch.value_target, mask)
        token_loss = clipped_value_loss(
            value=value, old_value=old_value, value_target=value_target, eps=self.eps
        )
        plain = clipped_value_loss(
            value=value.detach(), old_value=old_value, value_target=value_target, eps=None
        )
        metrics = {
            "value_loss": self.reduced_metric(token_loss, mask),
            "value_clip_fraction": token_metric((token_loss.detach() > plain).to(value), mask),
            "explained_variance": _explained_variance(totals, mask),
        }
        return LossSum(self.coef * self.reduce(token_loss, mask, totals), metrics)


def _explained_variance(totals: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The minibatch's explained variance, weighted by these rows' tokens.

    A share of it cannot be computed from these rows alone, so the global moments travel in the
    totals and every micro-batch reports the same number. Constant targets have none: weight 0.
    """
    tokens, moments = totals[0].clamp(min=1), totals[3:]
    target_variance = moments[1] / tokens - (moments[0] / tokens).square()
    error_variance = moments[3] / tokens - (moments[2] / tokens).square()
    # Moments of equal numbers differ by rounding; a variance below that is none.
    exists = target_variance > 1e-12 * (moments[1] / tokens)
    explained = 1 - error_variance / torch.where(exists, target_variance, 1.0)
    weight = torch.where(exists, mask.sum().to(totals), 0.0)
    return explained * weight, weight


@dataclass(frozen=True, kw_only=True)
class CrossEntropyLoss(TokenAggregation, Loss[DemonstrationBatch, PolicyOutput]):
    """Maximum likelihood of the demonstrated tokens."""

    tolerates_lag: ClassVar[bool] = True

    def totals(self, batch: DemonstrationBatch) -> Tensor:
        """f64[3], see `aggregation_totals`."""
        return aggregation_totals(batch.mask)

    def __call__(self, output: PolicyOutput, batch: DemonstrationBatch, totals: Tensor) -> LossSum:
        """These rows' share of the minibatch's loss."""
        token_loss = cross_entropy(output.logprob)
        metrics = {"cross_entropy": token_metric(token_loss, batch.mask)}
        return LossSum(self.reduce(token_loss, batch.mask, totals), metrics)
