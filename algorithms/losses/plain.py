"""Policy-gradient losses of plain tensors, as one number."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from ..ops.groups import floating
from ..ops.kl import KLEstimator
from ..ops.reductions import Aggregation, check_token_columns
from ..roles.language import PolicyBatch, PolicyOutput, ReferencePolicyBatch
from .policy import (
    CappedWeightLoss,
    ClippedPolicyLoss,
    KLGradient,
    ReferenceKLPolicyLoss,
    ReinforceLoss,
    TokenPolicyLoss,
)
from .token_formulas import RatioLevel

Objective = Literal["clip", "capped_weight", "reinforce"]
"""The clipped surrogate, log-probabilities by a bounded weight (CISPO), or by 1 (REINFORCE)."""


def policy_loss(
    *,
    logprob: Tensor,
    behavior_logprob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    objective: Objective = "clip",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
    ratio_level: RatioLevel = "token",
    weight_cap: float = 5.0,
    weight_floor: float = 0.0,
    log_ratio_clamp: float | None = 20.0,
    aggregation: Aggregation = "token-mean",
    aggregation_length: int | None = None,
    ref_logprob: Tensor | None = None,
    kl_coef: float = 0.04,
    kl_estimator: KLEstimator = "k3",
    kl_gradient: KLGradient = "as_is",
) -> Tensor:
    """What `ClippedPolicyLoss` and its relatives come to over some rows.

    Args:
        logprob: f32[rows, T], differentiable.
        behavior_logprob: f32[rows, T], under the policy that sampled the tokens.
        advantage: f32[rows, T], or f32[rows] for all tokens of a row.
        mask: bool[rows, T].
        objective: See `Objective`; the next four are for "clip", the two after for "capped_weight".
        eps_low: How far the ratio may fall below 1.
        eps_high: How far it may rise above 1.
        dual_clip: Bound, in multiples of the advantage, for bad tokens; None for none.
        ratio_level: What the ratio is taken of; see `RatioLevel`. With a ratio of whole responses
            take aggregation "seq-mean-token-mean", the mean over responses.
        weight_cap: Largest weight.
        weight_floor: Smallest weight.
        log_ratio_clamp: Bound on the log of the ratio.
        aggregation: How tokens become a number; see `reductions`.
        aggregation_length: Tokens per row of aggregation "constant".
        ref_logprob: f32[rows, T] under a reference, for "clip" with a KL term; none by default.
        kl_coef: Weight of that term.
        kl_estimator: See `kl`.
        kl_gradient: See `KLGradient`.

    Returns:
        Scalar, to be minimized.

    Raises:
        ValueError: If shapes differ or options do not fit.
    """
    shared = dict(
        aggregation=aggregation,
        aggregation_length=aggregation_length,
        log_ratio_clamp=log_ratio_clamp,
    )
    clip = dict(eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip, ratio_level=ratio_level)
    weight = dict(weight_cap=weight_cap, weight_floor=weight_floor)
    loss = _without_kl(objective, shared, clip, weight)
    batch = _batch(logprob, behavior_logprob, advantage, mask)
    output = PolicyOutput(logprob=logprob)
    if ref_logprob is None or not isinstance(loss, ClippedPolicyLoss):
        return loss(output, batch, loss.totals(batch)).total
    with_kl = ReferenceKLPolicyLoss(
        policy=loss, kl_coef=kl_coef, kl_estimator=kl_estimator, kl_gradient=kl_gradient
    )
    reference = ReferencePolicyBatch(**vars(batch), ref_logprob=ref_logprob)
    return with_kl(output, reference, with_kl.totals(reference)).total


def _without_kl(
    objective: Objective, shared: dict[str, Any], clip: dict[str, Any], weight: dict[str, Any]
) -> TokenPolicyLoss:
    match objective:
        case "clip":
            return ClippedPolicyLoss(**clip, **shared)
        case "capped_weight":
            return CappedWeightLoss(**weight, **shared)
        case "reinforce":
            return ReinforceLoss(**shared)
        case _:
            raise ValueError(
                f"objective {objective!r} is unknown; choose 'clip', 'capped_weight' or 'reinforce'"
            )


def _batch(
    logprob: Tensor, behavior_logprob: Tensor, advantage: Tensor, mask: Tensor
) -> PolicyBatch:
    of_tokens = advantage[:, None].expand(mask.shape) if advantage.ndim == 1 else advantage
    of_tokens = floating(of_tokens)
    check_token_columns(
        mask, logprob=logprob, behavior_logprob=behavior_logprob, advantage=of_tokens
    )
    return PolicyBatch(
        tokens=mask.long(), mask=mask, behavior_logprob=behavior_logprob, advantage=of_tokens
    )
