"""The clipped policy loss with one ratio per macro action."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...dataflow.graph.role import Loss, LossSum
from ..ops.macro_actions import MacroId, macro_mask, sum_over_macros
from ..ops.reductions import aggregation_totals, zero_where_masked_out
from ..roles.language import PolicyBatch, PolicyOutput
from .base import token_metric
from .policy import ClippedPolicyLoss


@dataclass(frozen=True, kw_only=True)
class MacroPolicyBatch(PolicyBatch):
    """A `PolicyBatch` that says which macro action each token belongs to."""

    macro_id: MacroId


@dataclass(frozen=True, kw_only=True)
class MacroPolicyLoss(Loss[MacroPolicyBatch, PolicyOutput]):
    """`ClippedPolicyLoss` of macro actions: a ratio is the product over a macro action's tokens.

    Its metrics are per macro action, and so is its aggregation. The clip is in effect tighter than
    per token, since the log-ratios of up to n tokens add up.
    """

    policy: ClippedPolicyLoss = ClippedPolicyLoss()
    """Clipping, and how macro actions are weighed."""

    def __post_init__(self) -> None:
        if self.policy.entropy_coef:
            raise ValueError(
                "MacroPolicyLoss has no entropy bonus: the entropy is a token's; set "
                "policy.entropy_coef to 0"
            )

    @property
    def needs_entropy(self) -> bool:
        """Whether the forward pass must also compute entropies."""
        return self.policy.needs_entropy

    def totals(self, batch: MacroPolicyBatch) -> Tensor:
        """f64[3], `aggregation_totals` with macro actions for tokens."""
        return aggregation_totals(macro_mask(batch.macro_id))

    def divisor(self, totals: Tensor) -> Tensor | None:
        """The policy loss's."""
        return self.policy.divisor(totals)

    def __call__(self, output: PolicyOutput, batch: MacroPolicyBatch, totals: Tensor) -> LossSum:
        """These rows' share of the minibatch's loss."""
        inside = (batch.macro_id >= 0).to(batch.advantage)
        size = sum_over_macros(inside, batch.macro_id)
        of_macros = PolicyBatch(
            tokens=batch.tokens,
            mask=macro_mask(batch.macro_id),
            behavior_logprob=sum_over_macros(batch.behavior_logprob, batch.macro_id),
            advantage=sum_over_macros(batch.advantage, batch.macro_id) / size.clamp(min=1),
        )
        logprob = zero_where_masked_out(output.logprob, batch.mask)
        made = PolicyOutput(logprob=sum_over_macros(logprob, batch.macro_id))
        result = self.policy(made, of_macros, totals)
        if output.entropy is None:
            return result
        entropy = {"entropy": token_metric(output.entropy, batch.mask)}
        return LossSum(result.total, {**result.metrics, **entropy})
