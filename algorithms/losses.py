"""Losses: what a worker trains with, built from the formulas of `loss_terms`.

A loss names the batch it reads, hides what is masked out, and reduces by one of the modes of
`reductions`. It can be computed in any number of micro-batches: their results add up to the
minibatch's loss. The ratio of a policy loss is against `behavior_logprob`, the policy that sampled
the tokens.

Metrics are weighted means, per token unless it says otherwise:

- `policy_loss`, `value_loss`: the loss without entropy and KL terms, as aggregated.
- `ratio_mean`: new over behaviour probability; 1 when both are the same policy.
- `clip_fraction_low`, `clip_fraction_high`, `dual_clip_fraction`: share of tokens whose update that
  bound stopped.
- `approx_kl_k1`, `approx_kl_k3`: KL(behaviour || policy) by two estimators, in nats.
- `entropy`: of the next-token distribution, in nats; if the forward pass computed it.
- `ref_kl_k1_per_sequence`, `ref_kl_k3_per_token`: KL(policy || reference), in nats.
- `value_clip_fraction`: share of tokens where the value clip decided the loss.
- `explained_variance`: 1 - Var(target - old value) / Var(target), over the minibatch.
- `cross_entropy`: in nats.
- `accuracy`, `margin`: per pair, how often and by how much the chosen response scores higher;
  `score_mean`: per response.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..dataflow.ranges import check_range
from ..dataflow.role import Loss, LossSum
from .kl import KLEstimator, kl_estimate
from .loss_terms import (
    bradley_terry_loss,
    clipped_policy_loss,
    clipped_value_loss,
    cross_entropy,
    probability_ratio,
)
from .reductions import (
    Aggregation,
    aggregate,
    aggregation_denominator,
    aggregation_numerator,
    aggregation_totals,
    zero_where_masked_out,
)
from .roles import (
    DemonstrationBatch,
    PairBatch,
    PolicyBatch,
    PolicyOutput,
    ReferencePolicyBatch,
    ScoreOutput,
    ValueBatch,
    ValueOutput,
)

__all__ = [
    "BradleyTerryLoss",
    "ClippedPolicyLoss",
    "ClippedValueLoss",
    "CrossEntropyLoss",
    "KLGradient",
    "ReferenceKLPolicyLoss",
    "TokenAggregation",
]

KLGradient = Literal["as_is", "is_corrected", "straight_through_k2"]
"""How a KL estimate inside a loss is differentiated.

`as_is`: as written; right for k2, but k3 then follows the KL from reference to policy.
`is_corrected`: the estimate times the probability ratio, whose gradient for k3 is that of
KL(policy || reference). `straight_through_k2`: the estimator's value with k2's gradient.
"""

_Metrics = Mapping[str, tuple[Tensor, Tensor]]


# --- what the classes share -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TokenAggregation:
    """How a token loss becomes a number. See `reductions` for the modes."""

    aggregation: Aggregation = "token-mean"
    """How tokens of one row are weighed against tokens of another."""
    aggregation_length: int | None = None
    """Tokens per row that mode "constant" divides by; usually `Sampling.max_new_tokens`."""
    count_empty_rows: bool = False
    """Count rows without a sampled token when dividing by rows."""

    def __post_init__(self) -> None:
        check_range(self, "aggregation_length", at_least=1)
        if self.aggregation == "constant" and self.aggregation_length is None:
            raise ValueError(
                f"{type(self).__name__}: aggregation 'constant' divides by a fixed length; set "
                "aggregation_length to the longest response in tokens"
            )

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


def _token_metric(column: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over masked tokens as `(sum, weight)`."""
    return zero_where_masked_out(column.detach(), mask).sum(), mask.sum()


# --- policies -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ClippedPolicyLoss(TokenAggregation, Loss[PolicyBatch, PolicyOutput]):
    """The clipped policy-gradient loss, minus an entropy bonus; see `clipped_policy_loss`."""

    eps_low: float = 0.2
    """How far the probability ratio may fall below 1 before the update stops."""
    eps_high: float = 0.2
    """How far the probability ratio may rise above 1 before the update stops."""
    dual_clip: float | None = None
    """Bound, in multiples of the advantage, on the loss of a bad token that became likelier."""
    log_ratio_clamp: float | None = 20.0
    """Bound on the log of the ratio."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    report_entropy: bool = False
    """Compute and log the entropy even without a bonus."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "eps_low", "eps_high", "dual_clip", "entropy_coef")
        check_range(self, "log_ratio_clamp", above=0)
        if not 0 <= self.eps_low <= 1 or self.eps_high < 0:
            raise ValueError(
                "eps_low must lie in [0, 1] and eps_high must not be negative, "
                f"got {self.eps_low} and {self.eps_high}; 0.2 is usual for both"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(
                f"dual_clip must be above 1, got {self.dual_clip}; 3 is usual, None turns it off"
            )

    @property
    def needs_entropy(self) -> bool:
        """Whether the forward pass must also compute entropies."""
        return self.report_entropy or self.entropy_coef != 0

    def totals(self, batch: PolicyBatch) -> Tensor:
        """f64[3], see `aggregation_totals`."""
        return aggregation_totals(batch.mask)

    def __call__(self, output: PolicyOutput, batch: PolicyBatch, totals: Tensor) -> LossSum:
        """These rows' share of the minibatch's loss."""
        mask = batch.mask
        logprob = zero_where_masked_out(output.logprob, mask)
        behavior_logprob = zero_where_masked_out(batch.behavior_logprob, mask)
        advantage = zero_where_masked_out(batch.advantage, mask)
        token_loss = clipped_policy_loss(
            logprob=logprob,
            behavior_logprob=behavior_logprob,
            advantage=advantage,
            eps_low=self.eps_low,
            eps_high=self.eps_high,
            dual_clip=self.dual_clip,
            log_ratio_clamp=self.log_ratio_clamp,
        )
        total = self.reduce(token_loss, mask, totals)
        metrics = {"policy_loss": self.reduced_metric(token_loss, mask)}
        metrics |= self._ratio_metrics(logprob.detach(), behavior_logprob, advantage, mask)
        if self.entropy_coef:
            total = total - self.entropy_coef * self.reduce(_entropy_of(output), mask, totals)
        if output.entropy is not None:
            metrics["entropy"] = _token_metric(output.entropy, mask)
        return LossSum(total, metrics)

    def ratio(self, output: PolicyOutput, batch: PolicyBatch) -> Tensor:
        """f32[rows, T], differentiable: new over behaviour probability, 1 where masked out."""
        return probability_ratio(
            logprob=zero_where_masked_out(output.logprob, batch.mask),
            behavior_logprob=zero_where_masked_out(batch.behavior_logprob, batch.mask),
            log_ratio_clamp=self.log_ratio_clamp,
        )

    def _ratio_metrics(
        self, logprob: Tensor, behavior_logprob: Tensor, advantage: Tensor, mask: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        ratio = probability_ratio(
            logprob=logprob,
            behavior_logprob=behavior_logprob,
            log_ratio_clamp=self.log_ratio_clamp,
        )
        clipped = ratio.clamp(1 - self.eps_low, 1 + self.eps_high)
        bites = -advantage * clipped > -advantage * ratio
        metrics = {
            "ratio_mean": ratio,
            "clip_fraction_low": (bites & (advantage < 0)).to(ratio),
            "clip_fraction_high": (bites & (advantage > 0)).to(ratio),
            "approx_kl_k1": behavior_logprob - logprob,
            "approx_kl_k3": kl_estimate(
                mask, logprob=behavior_logprob, ref_logprob=logprob, estimator="k3"
            ),
        }
        if self.dual_clip is not None:
            bounded = (advantage < 0) & (torch.maximum(ratio, clipped) > self.dual_clip)
            metrics["dual_clip_fraction"] = bounded.to(ratio)
        return {name: _token_metric(column, mask) for name, column in metrics.items()}


def _entropy_of(output: PolicyOutput) -> Tensor:
    if output.entropy is None:
        raise ValueError(
            "the loss has an entropy bonus but the forward pass gave no entropy; a worker must "
            "compute PolicyOutput.entropy when Loss.needs_entropy is True"
        )
    return output.entropy


@dataclass(frozen=True, kw_only=True)
class ReferenceKLPolicyLoss(Loss[ReferencePolicyBatch, PolicyOutput]):
    """A policy loss plus `kl_coef` times the KL to a reference, aggregated alike."""

    policy: ClippedPolicyLoss = ClippedPolicyLoss()
    """The policy-gradient term, and how tokens are aggregated."""
    kl_coef: float = 0.04
    """Weight of the KL term. Without one, use the plain policy loss: it needs no reference."""
    kl_estimator: KLEstimator = "k3"
    """Which estimator; see `kl`."""
    kl_gradient: KLGradient = "as_is"
    """Which gradient; see `KLGradient`."""
    kl_log_ratio_clamp: float | None = 20.0
    """Bound on the log of policy over reference."""
    kl_value_clamp: float | None = None
    """Bound on the estimate of each token."""

    def __post_init__(self) -> None:
        check_range(self, "kl_coef")
        check_range(self, "kl_log_ratio_clamp", "kl_value_clamp", above=0)
        if self.kl_coef <= 0:
            raise ValueError(
                f"kl_coef must be positive, got {self.kl_coef}; without a KL term use "
                "ClippedPolicyLoss, which needs no reference model"
            )
        if self.kl_estimator == "k1" and self.kl_gradient == "as_is":
            raise ValueError(
                "kl_estimator 'k1' has gradient 0 in expectation, so this loss would only add "
                "noise; use 'k2' or 'k3', or kl_gradient 'is_corrected' or 'straight_through_k2'"
            )

    @property
    def needs_entropy(self) -> bool:
        """Whether the forward pass must also compute entropies."""
        return self.policy.needs_entropy

    def totals(self, batch: ReferencePolicyBatch) -> Tensor:
        """f64[3], see `aggregation_totals`."""
        return aggregation_totals(batch.mask)

    def __call__(
        self, output: PolicyOutput, batch: ReferencePolicyBatch, totals: Tensor
    ) -> LossSum:
        """These rows' share of the minibatch's loss."""
        policy = self.policy(output, batch, totals)
        token_kl = self._differentiated_kl(output, batch)
        total = policy.total + self.kl_coef * self.policy.reduce(token_kl, batch.mask, totals)
        return LossSum(total, {**policy.metrics, **self._kl_metrics(output, batch)})

    def _kl(
        self, output: PolicyOutput, batch: ReferencePolicyBatch, estimator: KLEstimator
    ) -> Tensor:
        return kl_estimate(
            batch.mask,
            logprob=output.logprob,
            ref_logprob=batch.ref_logprob,
            estimator=estimator,
            log_ratio_clamp=self.kl_log_ratio_clamp,
            value_clamp=self.kl_value_clamp,
        )

    def _differentiated_kl(self, output: PolicyOutput, batch: ReferencePolicyBatch) -> Tensor:
        kl = self._kl(output, batch, self.kl_estimator)
        match self.kl_gradient:
            case "as_is":
                return kl
            case "is_corrected":
                return self.policy.ratio(output, batch) * kl
            case "straight_through_k2":
                k2 = self._kl(output, batch, "k2")
                return kl.detach() + k2 - k2.detach()
            case _:
                raise ValueError(
                    f"kl_gradient {self.kl_gradient!r} is unknown; choose 'as_is', 'is_corrected' "
                    "or 'straight_through_k2'"
                )

    def _kl_metrics(self, output: PolicyOutput, batch: ReferencePolicyBatch) -> _Metrics:
        detached = PolicyOutput(logprob=output.logprob.detach())
        k1, k3 = self._kl(detached, batch, "k1"), self._kl(detached, batch, "k3")
        rows = aggregation_totals(batch.mask)[1]
        return {
            "ref_kl_k1_per_sequence": (k1.sum(), rows),
            "ref_kl_k3_per_token": _token_metric(k3, batch.mask),
        }


# --- critics, demonstrations, preferences ---------------------------------------------------------


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

    def totals(self, batch: ValueBatch) -> Tensor:
        """f64[7]: `aggregation_totals`, then first and second moments of target and old error."""
        target = zero_where_masked_out(batch.value_target, batch.mask).double()
        error = target - zero_where_masked_out(batch.old_value, batch.mask).double()
        moments = [target.sum(), target.square().sum(), error.sum(), error.square().sum()]
        return torch.cat([aggregation_totals(batch.mask), torch.stack(moments)])

    def __call__(self, output: ValueOutput, batch: ValueBatch, totals: Tensor) -> LossSum:
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
            "value_clip_fraction": _token_metric((token_loss.detach() > plain).to(value), mask),
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
        metrics = {"cross_entropy": _token_metric(token_loss, batch.mask)}
        return LossSum(self.reduce(token_loss, batch.mask, totals), metrics)


@dataclass(frozen=True, kw_only=True)
class BradleyTerryLoss(Loss[PairBatch, ScoreOutput]):
    """Logistic loss on pairs of scores, averaged over pairs; see `bradley_terry_loss`."""

    unit: ClassVar[Literal["row", "group"]] = "group"
    tolerates_lag: ClassVar[bool] = True

    margin: float = 0.0
    """By how much the chosen response should win."""
    centering_coef: float = 0.0
    """Weight of the term that keeps scores around 0; 0.01 is usual."""

    def __post_init__(self) -> None:
        check_range(self, "margin")
        check_range(self, "centering_coef", at_least=0)

    def totals(self, batch: PairBatch) -> Tensor:
        """f64[1]: pairs."""
        return batch.chosen.sum().double()[None]

    def __call__(self, output: ScoreOutput, batch: PairBatch, totals: Tensor) -> LossSum:
        """These pairs' share of the minibatch's loss.

        Raises:
            ValueError: If a pair does not have exactly one chosen and one rejected row here.
        """
        chosen_row, rejected_row = _pair_rows(batch.pair_id, batch.chosen)
        chosen_score, rejected_score = output.score[chosen_row], output.score[rejected_row]
        loss = bradley_terry_loss(
            chosen_score=chosen_score,
            rejected_score=rejected_score,
            margin=self.margin,
            centering_coef=self.centering_coef,
        ).sum()
        pairs = totals.new_tensor(float(len(chosen_row)))
        gap = (chosen_score - rejected_score).detach()
        metrics = {
            "accuracy": ((gap > 0).sum(), pairs),
            "margin": (gap.sum(), pairs),
            "score_mean": (output.score.detach().sum(), 2 * pairs),
        }
        return LossSum(loss / totals[0].clamp(min=1).to(loss), metrics)


def _pair_rows(pair_id: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Row numbers of the chosen and the rejected side, in the same order of pairs."""
    pairs, index = torch.unique(pair_id, return_inverse=True)
    wins = torch.bincount(index[chosen], minlength=len(pairs))
    losses = torch.bincount(index[~chosen], minlength=len(pairs))
    wrong = ((wins != 1) | (losses != 1)).nonzero().flatten()
    if len(wrong):
        first = wrong[0]
        raise ValueError(
            f"pair {int(pairs[first])} has {int(wins[first])} chosen and {int(losses[first])} "
            "rejected rows; a pair needs exactly one of each, both in the same micro-batch"
        )
    order = torch.argsort(index)
    return order[chosen[order]], order[~chosen[order]]
