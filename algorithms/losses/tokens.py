"""Losses of token columns: the clipped surrogate with or without a KL, values, maximum likelihood.

What their metrics mean is said in `losses`.
"""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from ...dataflow.graph.role import Loss, LossSum
from ...dataflow.options import (
    FiniteFloat,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    option_class,
)
from ..ops.kl import KLEstimator, kl_estimate
from ..ops.reductions import (
    Aggregation,
    aggregate,
    aggregation_denominator,
    aggregation_numerator,
    aggregation_totals,
    unknown,
    zero_where_masked_out,
)
from ..roles.language_tables import (
    Demonstrations,
    PolicyBatch,
    PolicyColumns,
    PolicyOutput,
    ReferencePolicyBatch,
    ValueBatch,
    ValueColumns,
    ValueOutput,
)

RatioLevel = Literal["token", "sequence_mean", "sequence_product", "sequence_mean_token"]
"""Level at which the probability ratio is taken.

`token`: of each token. `sequence_mean`: of the whole response, the geometric mean over its tokens
(GSPO). `sequence_product`: of the whole response, the product over its tokens (RLOO).
`sequence_mean_token`: the value of `sequence_mean`, with each token's own gradient (GSPO-token).
"""


def probability_ratio(
    *,
    logprob: Tensor,
    behavior_logprob: Tensor,
    log_ratio_clamp: float | None = 20.0,
    level: RatioLevel = "token",
    mask: Tensor | None = None,
) -> Tensor:
    """`exp(logprob - behavior_logprob)`, the difference clamped to keep the exponential finite.

    Args:
        logprob: f32[...], differentiable; f32[rows, T] unless the level is "token".
        behavior_logprob: f32[...], of the same shape.
        log_ratio_clamp: Bound on the difference; no gradient passes where it bites. None: no bound.
        level: What the ratio is taken of; see `RatioLevel`. A row's tokens get the row's ratio.
        mask: bool[rows, T], needed unless the level is "token"; both columns must be 0 where it is
            False.

    Returns:
        f32[...], of the shape of `logprob`.

    Raises:
        ValueError: If the level is unknown, or needs a mask and gets none.
    """
    log_ratio = logprob - behavior_logprob
    if level not in get_args(RatioLevel):
        raise unknown("ratio level", level, RatioLevel)
    if level != "token":
        if mask is None:
            raise ValueError(
                f"ratio level {level!r} is about whole responses; pass mask=bool[rows, T]"
            )
        whole = torch.where(mask, log_ratio, 0.0).sum(dim=1, keepdim=True)
        if level != "sequence_product":
            whole = whole / mask.sum(dim=1, keepdim=True).clamp(min=1)
        if level == "sequence_mean_token":
            # Plus a zero, so that the value is exact.
            log_ratio = whole.detach() + (logprob - logprob.detach())
        else:
            log_ratio = whole.expand_as(log_ratio)
    if log_ratio_clamp is not None:
        log_ratio = log_ratio.clamp(-log_ratio_clamp, log_ratio_clamp)
    return log_ratio.exp()


def clipped_policy_loss(
    *,
    logprob: Tensor,
    behavior_logprob: Tensor,
    advantage: Tensor,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
    log_ratio_clamp: float | None = 20.0,
    ratio_level: RatioLevel = "token",
    mask: Tensor | None = None,
) -> Tensor:
    """Clipped surrogate per token: `max(-A ratio, -A clip(ratio, 1 - eps_low, 1 + eps_high))`.

    Schulman et al., "Proximal Policy Optimization Algorithms", 2017, equation 7. With `dual_clip`,
    tokens of negative advantage are bounded by `-dual_clip * A` (Ye et al., "Mastering Complex
    Control in MOBA Games with Deep Reinforcement Learning", 2020, equation 5). The ratio of whole
    responses: Zheng et al., "Group Sequence Policy Optimization", 2025, equations 5 and 7.

    Args:
        logprob: f32[...], differentiable.
        behavior_logprob: f32[...], of the same shape: under the policy that sampled the tokens.
        advantage: f32[...], of the same shape.
        eps_low: How far the ratio may fall below 1.
        eps_high: How far it may rise above 1.
        dual_clip: Above 1, or None for no such bound.
        log_ratio_clamp: See `probability_ratio`.
        ratio_level: See `RatioLevel`.
        mask: See `probability_ratio`.

    Returns:
        f32[...], to be minimized. With a ratio of whole responses each token has its row's loss, so
        that "seq-mean-token-mean" is the mean over responses.
    """
    ratio = probability_ratio(
        logprob=logprob,
        behavior_logprob=behavior_logprob,
        log_ratio_clamp=log_ratio_clamp,
        level=ratio_level,
        mask=mask,
    )
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - eps_low, 1 + eps_high))
    if dual_clip is not None:
        bounded = torch.minimum(loss, -dual_clip * advantage)
        loss = torch.where(advantage < 0, bounded, loss)
    return loss


def capped_weight_loss(
    *,
    logprob: Tensor,
    behavior_logprob: Tensor,
    advantage: Tensor,
    weight_cap: float = 5.0,
    weight_floor: float = 0.0,
    log_ratio_clamp: float | None = 20.0,
) -> Tensor:
    """`-weight A logprob` per token; the weight is the ratio between bounds, without gradient.

    Unlike a clipped surrogate it gives every token a gradient. MiniMax, "MiniMax-M1", 2025,
    equation 4 (CISPO).

    Args:
        logprob: f32[...], differentiable.
        behavior_logprob: f32[...], of the same shape: under the policy that sampled the tokens.
        advantage: f32[...], of the same shape.
        weight_cap: Largest weight, as a ratio: code that speaks of `eps_high` means
            `1 + eps_high`, other code the cap itself.
        weight_floor: Smallest weight.
        log_ratio_clamp: See `probability_ratio`.

    Returns:
        f32[...], to be minimized.
    """
    ratio = probability_ratio(
        logprob=logprob.detach(), behavior_logprob=behavior_logprob, log_ratio_clamp=log_ratio_clamp
    )
    return -ratio.clamp(weight_floor, weight_cap) * advantage * logprob


def reinforce_loss(*, logprob: Tensor, advantage: Tensor) -> Tensor:
    """`-A logprob` per token, of tokens that the present policy sampled.

    Williams, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement
    Learning", 1992.

    Args:
        logprob: f32[...], differentiable.
        advantage: f32[...], of the same shape; taken as it is, no gradient passes.

    Returns:
        f32[...], to be minimized.
    """
    return -advantage.detach() * logprob


def clipped_value_loss(
    *, value: Tensor, old_value: Tensor, value_target: Tensor, eps: float | None = 0.2
) -> Tensor:
    """Half the squared error per token, the larger of plain and clipped: `0.5 max(., .)`.

    The clipped prediction stays within `eps` of `old_value`. Form as in Huang et al., "The N+
    Implementation Details of RLHF with PPO", 2024.

    Args:
        value: f32[...], differentiable.
        old_value: f32[...], the critic's prediction before the update.
        value_target: f32[...].
        eps: None for the plain squared error.

    Returns:
        f32[...], to be minimized.
    """
    error = (value - value_target).square()
    if eps is not None:
        clipped = old_value + (value - old_value).clamp(-eps, eps)
        error = torch.maximum(error, (clipped - value_target).square())
    return 0.5 * error


def bradley_terry_loss(
    *,
    chosen_score: Tensor,
    rejected_score: Tensor,
    margin: Tensor | float = 0.0,
    centering_coef: float = 0.0,
) -> Tensor:
    """`-log sigmoid(chosen - rejected - margin) + centering_coef * (chosen + rejected)^2` per pair.

    Bradley and Terry, 1952, as used by Ouyang et al., "Training Language Models to Follow
    Instructions with Human Feedback", 2022, equation 1; the centering term keeps scores around 0
    (Eisenstein et al., "Helping or Herding?", 2023).

    Args:
        chosen_score: f32[pairs], differentiable.
        rejected_score: f32[pairs], differentiable.
        margin: By how much the chosen one should win, one number or f32[pairs].
        centering_coef: 0.01 is usual; 0 leaves the level of scores free.

    Returns:
        f32[pairs], to be minimized.
    """
    loss = -F.logsigmoid(chosen_score - rejected_score - margin)
    if centering_coef:
        loss = loss + centering_coef * (chosen_score + rejected_score).square()
    return loss


def cross_entropy(logprob: Tensor) -> Tensor:
    """Negative log-likelihood per token of the tokens to imitate: `-logprob`.

    Args:
        logprob: f32[...], differentiable.
    """
    return -logprob


@option_class
class TokenAggregation:
    """Reduction of a token loss to a number. See `reductions` for the modes."""

    aggregation: Aggregation = "token-mean"
    """Weighing of tokens of one row against tokens of another."""
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


KLGradient = Literal["as_is", "is_corrected", "straight_through_k2"]
"""Gradient of a KL estimate inside a loss.

`as_is`: as written; right for k2, but k3 then follows the KL from reference to policy.
`is_corrected`: the estimate times the probability ratio, whose gradient for k3 is that of
KL(policy || reference). `straight_through_k2`: the estimator's value with k2's gradient.
"""


@option_class
class TokenPolicyLoss(TokenAggregation, Loss[PolicyBatch, PolicyOutput]):
    """Base of policy-gradient losses: masking, aggregation, an entropy bonus and metrics."""

    log_ratio_clamp: PositiveFloat | None = 20.0
    """Bound on the log of the ratio."""
    entropy_coef: FiniteFloat = 0.0
    """Weight of the entropy bonus."""
    report_entropy: bool = False
    """Compute and log the entropy even without a bonus."""

    @property
    def needs_entropy(self) -> bool:
        return self.report_entropy or self.entropy_coef != 0

    def totals(self, batch: PolicyColumns) -> Tensor:
        return aggregation_totals(batch.mask)

    def __call__(self, output: PolicyOutput, batch: PolicyColumns, totals: Tensor) -> LossSum:
        mask = batch.mask
        logprob = zero_where_masked_out(output.logprob, mask)
        behavior_logprob = zero_where_masked_out(batch.behavior_logprob, mask)
        advantage = zero_where_masked_out(batch.advantage, mask)
        token_loss = self.token_loss(logprob, behavior_logprob, advantage, mask)
        total = self.reduce(token_loss, mask, totals)
        metrics = {"policy_loss": self.reduced_metric(token_loss, mask)}
        with torch.no_grad():
            columns = self.ratio_columns(logprob, behavior_logprob, advantage, mask)
        metrics |= {name: token_metric(column, mask) for name, column in columns.items()}
        if self.entropy_coef:
            if output.entropy is None:
                raise ValueError(
                    "the loss has an entropy bonus but the forward pass gave no entropy; a worker "
                    "must compute PolicyOutput.entropy when Loss.needs_entropy is True"
                )
            total = total - self.entropy_coef * self.reduce(output.entropy, mask, totals)
        if output.entropy is not None:
            metrics["entropy"] = token_metric(output.entropy, mask)
        return LossSum(total, metrics)

    def token_loss(
        self, logprob: Tensor, behavior_logprob: Tensor, advantage: Tensor, mask: Tensor
    ) -> Tensor:
        """f32[rows, T] from columns that are 0 where `mask` is False."""
        raise NotImplementedError

    def ratio_columns(
        self, logprob: Tensor, behavior_logprob: Tensor, advantage: Tensor, mask: Tensor
    ) -> dict[str, Tensor]:
        """f32[rows, T] by name of metric, without gradients."""
        return {
            "ratio_mean": self._ratio(logprob, behavior_logprob, mask),
            "approx_kl_k1": behavior_logprob - logprob,
            "approx_kl_k3": kl_estimate(
                mask, logprob=behavior_logprob, ref_logprob=logprob, estimator="k3"
            ),
        }

    def ratio(self, output: PolicyOutput, batch: PolicyColumns) -> Tensor:
        """f32[rows, T], differentiable: new over behavior probability, 1 where masked out."""
        return self._ratio(
            zero_where_masked_out(output.logprob, batch.mask),
            zero_where_masked_out(batch.behavior_logprob, batch.mask),
            batch.mask,
        )

    def _ratio(self, logprob: Tensor, behavior_logprob: Tensor, mask: Tensor) -> Tensor:
        return probability_ratio(
            logprob=logprob,
            behavior_logprob=behavior_logprob,
            log_ratio_clamp=self.log_ratio_clamp,
        )


@option_class
class ClippedPolicyLoss(TokenPolicyLoss):
    """The clipped policy-gradient loss, minus an entropy bonus; see `clipped_policy_loss`.

    Per token `max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high))`, where r is the probability ratio
    of the policy to what sampled the token (Schulman et al. 2017, equation 7).
    """

    eps_low: FiniteFloat = 0.2
    """Distance below 1 at which the probability ratio is clipped and the update stops."""
    eps_high: FiniteFloat = 0.2
    """Distance above 1 at which the probability ratio is clipped and the update stops."""
    dual_clip: FiniteFloat | None = None
    """Bound, in multiples of the advantage, on the loss of a bad token that became likelier."""
    ratio_level: RatioLevel = "token"
    """Level of the probability ratio; see `RatioLevel`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.eps_low <= 1 or self.eps_high < 0:
            raise ValueError(
                "eps_low must lie in [0, 1] and eps_high must not be negative, "
                f"got {self.eps_low} and {self.eps_high}; 0.2 is usual for both"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(
                f"dual_clip must be above 1, got {self.dual_clip}; 3 is usual, None turns it off"
            )

    def token_loss(
        self, logprob: Tensor, behavior_logprob: Tensor, advantage: Tensor, mask: Tensor
    ) -> Tensor:
        return clipped_policy_loss(
            logprob=logprob,
            behavior_logprob=behavior_logprob,
            advantage=advantage,
            eps_low=self.eps_low,
            eps_high=self.eps_high,
            dual_clip=self.dual_clip,
            log_ratio_clamp=self.log_ratio_clamp,
            ratio_level=self.ratio_level,
            mask=mask,
        )

    def ratio_columns(
        self, logprob: Tensor, behavior_logprob: Tensor, advantage: Tensor, mask: Tensor
    ) -> dict[str, Tensor]:
        """Also how often each bound stopped an update."""
        columns = super().ratio_columns(logprob, behavior_logprob, advantage, mask)
        ratio = columns["ratio_mean"]
        clipped = ratio.clamp(1 - self.eps_low, 1 + self.eps_high)
        bites = -advantage * clipped > -advantage * ratio
        columns["clip_fraction_low"] = (bites & (advantage < 0)).to(ratio)
        columns["clip_fraction_high"] = (bites & (advantage > 0)).to(ratio)
        if self.dual_clip is not None:
            bounded = (advantage < 0) & (torch.maximum(ratio, clipped) > self.dual_clip)
            columns["dual_clip_fraction"] = bounded.to(ratio)
        return columns

    def _ratio(self, logprob: Tensor, behavior_logprob: Tensor, mask: Tensor) -> Tensor:
        return probability_ratio(
            logprob=logprob,
            behavior_logprob=behavior_logprob,
            log_ratio_clamp=self.log_ratio_clamp,
            level=self.ratio_level,
            mask=mask,
        )


@option_class
class CappedWeightLoss(TokenPolicyLoss):
    """Every token's log-probability, by advantage and a bounded ratio; see `capped_weight_loss`."""

    weight_cap: FiniteFloat = 5.0
    """Largest weight, as a ratio; where code has `eps_high` for it, this is `1 + eps_high`."""
    weight_floor: NonNegativeFloat = 0.0
    """Smallest weight."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_cap <= self.weight_floor:
            raise ValueError(
                f"weight_cap is {self.weight_cap}; expected above {self.weight_floor:g}"
            )

    def token_loss(
        self, logprob: Tensor, behavior_logprob: Tensor, advantage: Tensor, mask: Tensor
    ) -> Tensor:
        return capped_weight_loss(
            logprob=logprob,
            behavior_logprob=behavior_logprob,
            advantage=advantage,
            weight_cap=self.weight_cap,
            weight_floor=self.weight_floor,
            log_ratio_clamp=self.log_ratio_clamp,
        )

    def ratio_columns(
        self, logprob: Tensor, behavior_logprob: Tensor, advantage: Tensor, mask: Tensor
    ) -> dict[str, Tensor]:
        """Also how often the cap held a weight."""
        columns = super().ratio_columns(logprob, behavior_logprob, advantage, mask)
        columns["capped_fraction"] = (columns["ratio_mean"] > self.weight_cap).to(logprob)
        return columns


@option_class
class ReinforceLoss(TokenPolicyLoss):
    """The plain policy gradient, for one update on fresh rollouts; see `reinforce_loss`."""

    def token_loss(
        self, logprob: Tensor, behavior_logprob: Tensor, advantage: Tensor, mask: Tensor
    ) -> Tensor:
        return reinforce_loss(logprob=logprob, advantage=advantage)


@option_class
class RegularizedLoss(Loss[ReferencePolicyBatch, PolicyOutput]):
    """Any policy loss of tokens plus `kl_coef` times the KL to a reference, aggregated alike."""

    policy: TokenPolicyLoss = ClippedPolicyLoss()
    """The policy-gradient term, and how tokens are aggregated."""
    kl_coef: FiniteFloat = 0.04
    """Weight of the KL term. Without one, use the plain policy loss: it needs no reference."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of the KL; see `kl`."""
    kl_gradient: KLGradient = "as_is"
    """Gradient of the estimate; see `KLGradient`."""
    kl_log_ratio_clamp: PositiveFloat | None = 20.0
    """Bound on the log of policy over reference."""
    kl_value_clamp: PositiveFloat | None = None
    """Bound on the estimate of each token; the gradient of "straight_through_k2" has none."""

    def __post_init__(self) -> None:
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
        return self.policy.needs_entropy

    def totals(self, batch: ReferencePolicyBatch) -> Tensor:
        return aggregation_totals(batch.mask)

    def divisor(self, totals: Tensor) -> Tensor | None:
        """The policy loss's: the KL is aggregated alike."""
        return self.policy.divisor(totals)

    def __call__(
        self, output: PolicyOutput, batch: ReferencePolicyBatch, totals: Tensor
    ) -> LossSum:
        policy = self.policy(output, batch, totals)
        token_kl = self._differentiated_kl(output, batch)
        total = policy.total + self.kl_coef * self.policy.reduce(token_kl, batch.mask, totals)
        detached = PolicyOutput(logprob=output.logprob.detach())
        k1, k3 = self._kl(detached, batch, "k1"), self._kl(detached, batch, "k3")
        metrics = {
            "ref_kl_k1_per_sequence": (k1.sum(), aggregation_totals(batch.mask)[1]),
            "ref_kl_k3_per_token": token_metric(k3, batch.mask),
        }
        return LossSum(total, {**policy.metrics, **metrics})

    def _kl(
        self,
        output: PolicyOutput,
        batch: ReferencePolicyBatch,
        estimator: KLEstimator,
        *,
        clamped: bool = True,
    ) -> Tensor:
        return kl_estimate(
            batch.mask,
            logprob=output.logprob,
            ref_logprob=batch.ref_logprob,
            estimator=estimator,
            log_ratio_clamp=self.kl_log_ratio_clamp,
            value_clamp=self.kl_value_clamp if clamped else None,
        )

    def _differentiated_kl(self, output: PolicyOutput, batch: ReferencePolicyBatch) -> Tensor:
        kl = self._kl(output, batch, self.kl_estimator)
        match self.kl_gradient:
            case "as_is":
                return kl
            case "is_corrected":
                return self.policy.ratio(output, batch) * kl
            case "straight_through_k2":
                k2 = self._kl(output, batch, "k2", clamped=False)
                return kl.detach() + (k2 - k2.detach())  # a zero, so that the value is exact
            case _:
                raise unknown("kl_gradient", self.kl_gradient, KLGradient)


@option_class
class ReferenceKLPolicyLoss(RegularizedLoss):
    """The clipped policy loss plus `kl_coef` times the KL to a reference, aggregated alike."""

    policy: ClippedPolicyLoss = ClippedPolicyLoss()
    """The policy-gradient term, and how tokens are aggregated."""


@option_class
class ClippedValueLoss(TokenAggregation, Loss[ValueBatch, ValueOutput]):
    """A critic's clipped squared error; see `clipped_value_loss`."""

    tolerates_lag: ClassVar[bool] = True

    eps: NonNegativeFloat | None = 0.2
    """Largest change of a prediction in one update; None for the plain error."""
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


@option_class
class CrossEntropyLoss(TokenAggregation, Loss[Demonstrations, PolicyOutput]):
    """Maximum likelihood of the demonstrated tokens."""

    tolerates_lag: ClassVar[bool] = True

    def totals(self, batch: Demonstrations) -> Tensor:
        return aggregation_totals(batch.mask)

    def __call__(self, output: PolicyOutput, batch: Demonstrations, totals: Tensor) -> LossSum:
        token_loss = cross_entropy(output.logprob)
        metrics = {"cross_entropy": token_metric(token_loss, batch.mask)}
        return LossSum(self.reduce(token_loss, batch.mask, totals), metrics)
