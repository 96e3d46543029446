"""The clipped value loss: a critic learns value targets without leaving its old values too far."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ...dataflow.graph.role import Loss, LossSum
from ...dataflow.options import NonNegativeFloat, option_class
from ..ops.reductions import aggregation_totals, zero_where_masked_out
from ..roles.language import ValueBatch, ValueColumns, ValueOutput
from .base import TokenAggregation, token_metric
from .token_formulas import clipped_value_loss


@option_class
class ClippedValueLoss(TokenAggregation, Loss[ValueBatch, ValueOutput]):
    """A critic's clipped squared error; see `clipped_value_loss`."""

    tolerates_lag: ClassVar[bool] = True

    eps: NonNegativeFloat | None = 0.2
    """How far one update may move a prediction from the old one; None for the plain error."""
    coef: NonNegativeFloat = 1.0
    """Factor on the whole loss."""

    def totals(self, batch: ValueColumns) -> Tensor:
        """f64[7]: `aggregation_totals`, then first and second moments of target and old error."""
        target = zero_where_masked_out(batch.value_target, batch.mask).double()
        error = target - zero_where_masked_out(batch.old_value, batch.mask).double()
        moments = [target.sum(), target.square().sum(), error.sum(), error.square().sum()]
        return torch.cat([aggregation_totals(batch.mask), torch.stack(moments)])

    def divisor(self, totals: Tensor) -> None:
        """None: the explained variance is of the whole minibatch's moments."""

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
