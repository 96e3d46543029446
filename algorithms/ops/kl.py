"""Kullback-Leibler terms: estimators, the KL-shaped reward, and the adaptive coefficient.

All estimators look at one sampled token each. With p the sampling policy and q the reference, and
d = log p - log q of the sampled token, their mean over tokens sampled from p estimates KL(p || q)
(J. Schulman, "Approximating KL Divergence", 2020):

| estimator | formula         | as a value                      | its gradient, in expectation |
|-----------|-----------------|---------------------------------|------------------------------|
| `k1`      | d               | unbiased, noisy, may be below 0 | 0: useless as a loss         |
| `k2`      | d^2 / 2         | biased, little noise            | that of KL(p || q)           |
| `k3`      | exp(-d) - 1 + d | unbiased, never below 0         | that of KL(q || p)           |
| `abs`     | |d|             | a distance, not a KL            | -                            |

As a reward, a KL term enters advantages and carries no gradient (`kl_shaped_reward`). As a loss,
its gradient is what counts; `losses.ReferenceKLPolicyLoss` offers the three gradients in use.
"""

from __future__ import annotations

from typing import Literal

import torch

from ...dataflow.graph.tracer import op
from ..roles.language_tables import PerSample, PerToken, SampleFlag, TokenMask
from .groups import floating
from .reductions import check_token_columns, unknown, zero_where_masked_out

KLEstimator = Literal["k1", "k2", "k3", "abs"]
"""Function of the log-ratio that estimates the KL; see the table at the top of this module."""

ScoreSlot = Literal["last_token", "after_last"]
"""Slot where a row's score is added: its last sampled token, or one slot later if there is one."""

NoEos = Literal["none", "replace", "subtract", "zero"]
"""Treatment of the score of a response that was cut off before its end of sequence.

"zero" takes the score away, for a step that bootstraps such rows: `gae(..., bootstrap_value=...)`.
"""


@op(scope="row")
def kl_estimate(
    mask: TokenMask,
    *,
    logprob: PerToken,
    ref_logprob: PerToken,
    estimator: KLEstimator = "k1",
    log_ratio_clamp: float | None = 20.0,
    value_clamp: float | None = None,
) -> PerToken:
    """Per-token estimate of KL(policy || reference); differentiable in `logprob`.

    Args:
        mask: bool[rows, T].
        logprob: f32[rows, T], log-probabilities of the sampled tokens under the sampling policy.
        ref_logprob: f32[rows, T], the same tokens under the reference.
        estimator: See the table at the top of this module.
        log_ratio_clamp: The log-ratio is clamped to plus and minus this before anything else; None
            leaves it. No gradient passes where it bites.
        value_clamp: The estimate itself is clamped to plus and minus this; None leaves it.

    Returns:
        f32[rows, T], in nats; 0 where the mask is False.

    Raises:
        ValueError: If shapes differ or the estimator is unknown.
    """
    check_token_columns(mask, logprob=logprob, ref_logprob=ref_logprob)
    log_ratio = zero_where_masked_out(logprob, mask) - zero_where_masked_out(ref_logprob, mask)
    if log_ratio_clamp is not None:
        log_ratio = log_ratio.clamp(-log_ratio_clamp, log_ratio_clamp)
    match estimator:
        case "k1":
            estimate = log_ratio
        case "k2":
            estimate = log_ratio.square() / 2
        case "k3":
            # expm1 keeps the digits that exp(-d) - 1 loses for the small d of a young policy.
            estimate = torch.expm1(-log_ratio) + log_ratio
        case "abs":
            estimate = log_ratio.abs()
        case _:
            raise unknown("KL estimator", estimator, KLEstimator)
    if value_clamp is not None:
        estimate = estimate.clamp(-value_clamp, value_clamp)
    return estimate


@op(scope="row")
def kl_penalized_reward(
    reward: PerToken,
    mask: TokenMask,
    *,
    logprob: PerToken,
    ref_logprob: PerToken,
    kl_coef: PerSample,
    kl_estimator: KLEstimator = "k1",
) -> PerToken:
    """Rewards less the KL of each token, by a coefficient per row; see `kl_shaped_reward`.

    Args:
        reward: f32[rows, T].
        mask: bool[rows, T].
        logprob: f32[rows, T], under the policy that sampled the tokens.
        ref_logprob: f32[rows, T], under the reference.
        kl_coef: f32[rows], reward taken per nat.
        kl_estimator: See `kl_estimate`.

    Returns:
        f32[rows, T], without gradient.

    Raises:
        ValueError: If shapes differ.
    """
    check_token_columns(mask, reward=reward)
    kl = kl_estimate(mask, logprob=logprob, ref_logprob=ref_logprob, estimator=kl_estimator)
    return zero_where_masked_out(reward - kl_coef[:, None] * kl, mask).detach()


@op(scope="row")
def response_kl(mask: TokenMask, *, logprob: PerToken, ref_logprob: PerToken) -> PerSample:
    """The k1 estimate summed over each response: f32[rows], in nats; for a log or a controller.

    Arguments and errors are those of `kl_estimate`.
    """
    return kl_estimate(mask, logprob=logprob, ref_logprob=ref_logprob).sum(1)


@op(scope="row")
def kl_shaped_reward(
    score: PerSample,
    mask: TokenMask,
    *,
    logprob: PerToken,
    ref_logprob: PerToken,
    kl_coef: float,
    finished: SampleFlag | None = None,
    kl_estimator: KLEstimator = "k1",
    score_slot: ScoreSlot = "last_token",
    score_clip: float | None = None,
    no_eos: NoEos = "none",
    no_eos_score: float = -1.0,
    no_eos_penalty: float = 1.0,
) -> PerToken:
    """Token rewards: `-kl_coef * KL` on every sampled token, and the score once per row.

    The score is clipped first, then the rule for missing ends of sequence is applied, then it is
    added. Ziegler et al., "Fine-Tuning Language Models from Human Preferences", 2019, section 2;
    slots and rules as in Huang et al., "The N+ Implementation Details of RLHF with PPO", 2024.

    Args:
        score: f32[rows], one score per response.
        mask: bool[rows, T].
        logprob: f32[rows, T], under the policy that sampled the tokens.
        ref_logprob: f32[rows, T], under the reference.
        kl_coef: Reward taken per nat of KL; 0 leaves only the score.
        finished: bool[rows], True where the response reached its end of sequence. Needed unless
            `no_eos` is "none".
        kl_estimator: See the table at the top of this module.
        score_slot: "last_token" adds the score on the last sampled token; "after_last" one slot
            later where the row leaves room, which is a padding position: then reward, critic and
            `gae` must be given a mask that has that slot too; `with_final_state` adds it.
        score_clip: The score is clamped to plus and minus this; None leaves it.
        no_eos: For rows that are not finished: "replace" the score by `no_eos_score`, "subtract"
            `no_eos_penalty`, set it to "zero" (and give `gae` a bootstrap value), or "none".
        no_eos_score: What "replace" writes.
        no_eos_penalty: What "subtract" takes away.

    Returns:
        f32[rows, T], without gradient; a row without sampled tokens gets no reward at all.

    Raises:
        ValueError: If shapes differ, a choice is unknown, or `finished` is needed and missing.
    """
    check_token_columns(mask, logprob=logprob, ref_logprob=ref_logprob)
    if score.shape != mask.shape[:1]:
        raise ValueError(
            f"score must have one entry per row of the mask, [{len(mask)}], got {list(score.shape)}"
        )
    kl = torch.zeros_like(logprob)
    if kl_coef:  # 0 * nan is nan, and both may be -inf
        kl = kl_estimate(mask, logprob=logprob, ref_logprob=ref_logprob, estimator=kl_estimator)
    reward = (-kl_coef * kl).detach()
    score = floating(score)
    if score_clip is not None:
        score = score.clamp(-score_clip, score_clip)
    score = finished_score(
        score,
        finished,
        no_eos=no_eos,
        no_eos_score=no_eos_score,
        no_eos_penalty=no_eos_penalty,
    )
    if score_slot not in ("last_token", "after_last"):
        raise unknown("score_slot", score_slot, ScoreSlot)
    width = mask.shape[1]
    if not width:
        return reward
    positions = torch.arange(width, device=mask.device)
    last = torch.where(mask, positions, -1).amax(dim=1)
    slot = last if score_slot == "last_token" else (last + 1).clamp(max=width - 1)
    added = torch.where(last >= 0, score.detach().to(reward), 0.0)
    return reward.scatter_add(1, slot.clamp(min=0)[:, None], added[:, None])


@op(scope="row")
def finished_score(
    score: PerSample,
    finished: SampleFlag | None,
    *,
    no_eos: NoEos,
    no_eos_score: float = -1.0,
    no_eos_penalty: float = 1.0,
) -> PerSample:
    """Scores after the rule for responses that were cut off; arguments as in `kl_shaped_reward`."""
    score = floating(score)
    if no_eos == "none":
        return score
    if finished is None:
        raise ValueError(
            f"no_eos={no_eos!r} must know which rows reached their end of sequence; "
            "pass finished=bool[rows], such as Rollout.finished"
        )
    match no_eos:
        case "replace":
            return torch.where(finished, score, torch.full_like(score, no_eos_score))
        case "subtract":
            return torch.where(finished, score, score - no_eos_penalty)
        case "zero":
            return torch.where(finished, score, torch.zeros_like(score))
        case _:
            raise unknown("no_eos", no_eos, NoEos)


def adaptive_kl_coef(
    kl_coef: float,
    *,
    observed_kl: float,
    target_kl: float = 6.0,
    num_sequences: int,
    horizon: int = 10_000,
    max_change: float = 0.2,
) -> float:
    """The next coefficient of an adaptive KL penalty.

    `kl_coef * (1 + clip(observed / target - 1, -max_change, max_change) * num_sequences / horizon)`
    (Ziegler et al., "Fine-Tuning Language Models from Human Preferences", 2019, section 2.2). A
    step of more rows than `horizon` makes one full correction, so a coefficient stays positive.

    Args:
        kl_coef: The coefficient of this step; 0.1 to 0.15 are usual to begin with.
        observed_kl: Batch mean of the k1 estimate *summed* over each row, in nats per sequence.
        target_kl: Where it should settle, in the same unit. A mean per token needs another target.
        num_sequences: Rows in the step.
        horizon: Rows over which a full correction is spread.
        max_change: Bound on the relative error that is corrected for; below 1.

    Raises:
        ValueError: If `target_kl` or `horizon` is not positive, or `max_change` not in [0, 1).
    """
    if target_kl <= 0 or horizon <= 0:
        raise ValueError(
            f"target_kl and horizon must be positive, got {target_kl} and {horizon}; "
            "for a fixed coefficient do not adapt it"
        )
    if not 0 <= max_change < 1:
        raise ValueError(
            f"max_change must be at least 0 and below 1, got {max_change}; from 1 on a coefficient "
            "could become 0, where it would stay"
        )
    error = min(max(observed_kl / target_kl - 1, -max_change), max_change)
    return kl_coef * (1 + error * min(num_sequences, horizon) / horizon)
