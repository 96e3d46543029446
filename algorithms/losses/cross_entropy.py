"""Maximum likelihood: what supervised fine-tuning trains with."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ...dataflow.graph.role import Loss, LossSum
from ...dataflow.options import option_class
from ..ops.reductions import aggregation_totals
from ..roles.language import DemonstrationBatch, PolicyOutput
from .base import TokenAggregation, token_metric
from .token_formulas import cross_entropy


@option_class
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
