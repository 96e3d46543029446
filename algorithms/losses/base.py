"""What losses share: how tokens become a number, as a loss and as a metric, and means of units."""

from __future__ import annotations

from torch import Tensor

from ...dataflow.options import PositiveInt, option_class
from ..ops.reductions import (
    Aggregation,
    aggregate,
    aggregation_denominator,
    aggregation_numerator,
    aggregation_totals,
    zero_where_masked_out,
)


@option_class
class TokenAggregation:
    """How a token loss becomes a number. See `reductions` for the modes."""

    aggregation: Aggregation = "token-mean"
    """How tokens of one row are weighed against tokens of another."""
    aggregation_length: PositiveInt | None = None
    """Tokens per row that mode "constant" divides by; usually `Sampling.max_new_tokens`."""
    count_empty_rows: bool = False
    """Count rows without a sampled token when dividing by rows."""

    def __post_init__(self) -> None:
        if self.aggregation == "constant" and self.aggregation_length is None:
            raise ValueError(
                f"{type(self).__name__}: aggregation 'constant' divides by a fixed length; set "
                "aggregation_length to the longest response in tokens"
            )

    def divisor(self, totals: Tensor) -> Tensor | None:
        """See `Loss.divisor`: the mode's denominator, at least 1."""
        return aggregation_denominator(
            totals,
            self.aggregation,
            length=self.aggregation_length,
            count_empty_rows=self.count_empty_rows,
        ).clamp(min=1)

    def reduce(self, token_loss: Tensor, mask: Tensor, totals: Tensor) -> Tensor:
        """These rows' share of the minibatch's mean: f32 scalar."""
        return aggregate(
            token_loss,
            mask,
            mode=self.aggregation,
            length=self.aggregation_length,
            count_empty_rows=self.count_empty_rows,
            totals=totals,
        )

    def reduced_metric(self, token_loss: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The same mean as a metric: `(sum, weight)` of these rows."""
        weight = aggregation_denominator(
            aggregation_totals(mask),
            self.aggregation,
            length=self.aggregation_length,
            count_empty_rows=self.count_empty_rows,
        )
        return aggregation_numerator(token_loss, mask, self.aggregation).detach(), weight


class CountedMean:
    """A mean over pairs, or responses: whatever the first of the loss's totals counts."""

    def divisor(self, totals: Tensor) -> Tensor:
        """See `Loss.divisor`: how many there are, at least 1."""
        return totals[0].clamp(min=1)


def token_metric(column: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over masked tokens as `(sum, weight)`."""
    return zero_where_masked_out(column.detach(), mask).sum(), mask.sum()
