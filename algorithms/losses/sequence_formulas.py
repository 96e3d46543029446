"""The formulas of losses that take a whole response as one action, per response or per pair.

`sequence_logprob` is the log-probability of a whole response, the sum over its tokens; see
`sequence_sum`. As with `token_formulas`, `losses` exports what a worker trains with.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..ops.reductions import check_token_columns, zero_where_masked_out

MirrorForm = Literal["gradient", "squared"]
"""The loss whose gradient is the paper's ("gradient"), or the squared error it is derived from,
whose gradient is `2 * tau` times that."""

PairClip = Literal["separate", "joint"]
"""Clip the ratio of each response of a pair, or the ratio of their ratios."""

EtaForm = Literal["paper", "scaled"]
"""`(difference / eta - reward difference)^2`, or that times `eta^2`, as in the authors' code."""

ALoLRatio = Literal["sequence", "token", "none"]
"""Importance weights of whole responses, of tokens, or none (the reference-free variant)."""

_LOG_RATIO_CLAMP = 20.0


def sequence_sum(column: Tensor, mask: Tensor) -> Tensor:
    """Sum over the sampled tokens of each response: f32[rows] from f32[rows, T]."""
    check_token_columns(mask, column=column)
    return zero_where_masked_out(column, mask).sum(dim=1)


def mirror_descent_loss(
    *,
    sequence_logprob: Tensor,
    behavior_sequence_logprob: Tensor,
    advantage: Tensor,
    tau: float,
    form: MirrorForm = "gradient",
) -> Tensor:
    """`-A logprob + (tau / 2) (logprob - behavior_logprob)^2` per response.

    One step of policy mirror descent, with the policy that sampled as the center; there is no clip.
    Kimi Team, "Kimi k1.5", 2025, equation 3. The squared form is `(A - tau log_ratio)^2`.

    Args:
        sequence_logprob: f32[rows], differentiable.
        behavior_sequence_logprob: f32[rows], under the policy the iteration began with.
        advantage: f32[rows], the reward less its group's mean (or its log-partition function).
        tau: Weight of the KL to that policy.
        form: See `MirrorForm`.

    Returns:
        f32[rows], to be minimized.

    Raises:
        ValueError: If `form` is unknown.
    """
    log_ratio = sequence_logprob - behavior_sequence_logprob
    if form == "gradient":
        return -advantage * sequence_logprob + tau / 2 * log_ratio.square()
    if form == "squared":
        return (advantage - tau * log_ratio).square()
    raise ValueError(f"form {form!r} is unknown; choose 'gradient' or 'squared'")


def p3o_loss(
    *,
    sequence_logprob: Tensor,
    behavior_sequence_logprob: Tensor,
    score: Tensor,
    eps: float = 0.2,
    clip: PairClip = "separate",
) -> Tensor:
    """Pairwise proximal policy gradient, per pair of responses to one prompt.

    "separate": `-1/2 sum_i min(a_i rho_i, a_i clip(rho_i, 1 - eps, 1 + eps))`, where
    `a_i = (score_i - score_j) rho_j` has no gradient and j is the other response. "joint":
    `-1/2 min(a u, a clip(u, u0 - eps, u0 + eps))`, where `a = (score_1 - score_2) rho_1 rho_2` has
    none either, u is the difference of the log-probabilities and u0 the same before the update. Wu
    et al., "Pairwise Proximal Policy Optimization", 2023. At the policy that sampled both have the
    gradient `(score_1 - score_2) / 2` on the difference of the log-probabilities.

    Args:
        sequence_logprob: f32[pairs, 2], differentiable.
        behavior_sequence_logprob: f32[pairs, 2].
        score: f32[pairs, 2]; only differences within a pair matter.
        eps: Width of the clip.
        clip: See `PairClip`.

    Returns:
        f32[pairs], to be minimized.

    Raises:
        ValueError: If `clip` is unknown.
    """
    log_ratio = sequence_logprob - behavior_sequence_logprob
    ratio = log_ratio.clamp(-_LOG_RATIO_CLAMP, _LOG_RATIO_CLAMP).exp()
    if clip == "separate":
        weight = (score - score.flip(-1)) * ratio.detach().flip(-1)
        clipped = ratio.clamp(1 - eps, 1 + eps)
        return -0.5 * torch.minimum(weight * ratio, weight * clipped).sum(dim=-1)
    if clip != "joint":
        raise ValueError(f"clip {clip!r} is unknown; choose 'separate' or 'joint'")
    weight = (score[..., 0] - score[..., 1]) * ratio.detach().prod(dim=-1)
    difference = sequence_logprob[..., 0] - sequence_logprob[..., 1]
    before = behavior_sequence_logprob[..., 0] - behavior_sequence_logprob[..., 1]
    clipped = difference.clamp(before - eps, before + eps)
    return -0.5 * torch.minimum(weight * difference, weight * clipped)


def rebel_loss(
    *,
    sequence_logprob: Tensor,
    behavior_sequence_logprob: Tensor,
    score: Tensor,
    eta: float = 1.0,
    form: EtaForm = "paper",
) -> Tensor:
    """`((log_ratio_1 - log_ratio_2) / eta - (score_1 - score_2))^2` per pair of responses.

    Relative rewards as a regression on log-probabilities. Gao et al., "REBEL: Reinforcement
    Learning via Regressing Relative Rewards", 2024, algorithm 1.

    Args:
        sequence_logprob: f32[pairs, 2], differentiable.
        behavior_sequence_logprob: f32[pairs, 2], under the policy the iteration began with.
        score: f32[pairs, 2]; only differences within a pair matter.
        eta: Step size; larger moves the policy further.
        form: See `EtaForm`.

    Returns:
        f32[pairs], to be minimized.

    Raises:
        ValueError: If `form` is unknown.
    """
    log_ratio = sequence_logprob - behavior_sequence_logprob
    predicted = log_ratio[..., 0] - log_ratio[..., 1]
    wanted = score[..., 0] - score[..., 1]
    if form == "paper":
        return (predicted / eta - wanted).square()
    if form == "scaled":
        return (predicted - eta * wanted).square()
    raise ValueError(f"form {form!r} is unknown; choose 'paper' or 'scaled'")


def a_lol_loss(
    *, logprob: Tensor, ref_logprob: Tensor, advantage: Tensor, ratio_clip: float | None = 0.9
) -> Tensor:
    """`-A weight logprob`, the weight being policy over reference within `1 +- ratio_clip`.

    The weight has no gradient. Columns may be per response (the paper's main form, with
    log-probabilities of whole responses) or per token. Baheti et al., "Leftover Lunch:
    Advantage-based Offline Reinforcement Learning for Language Models", 2023, equation 4.

    Args:
        logprob: f32[...], differentiable.
        ref_logprob: f32[...], of the same shape, under the reference.
        advantage: f32[...]; responses worse than expected must have been dropped or have 0.
        ratio_clip: Weights lie in `1 - ratio_clip` to `1 + ratio_clip`; None goes without weights
            (the reference-free variant).

    Returns:
        f32[...], to be minimized.
    """
    if ratio_clip is None:
        return -advantage * logprob
    log_ratio = (logprob - ref_logprob).detach().clamp(-_LOG_RATIO_CLAMP, _LOG_RATIO_CLAMP)
    weight = log_ratio.exp().clamp(1 - ratio_clip, 1 + ratio_clip)
    return -advantage * weight * logprob


def a_lol_kl_loss(
    *,
    sequence_logprob: Tensor,
    ref_sequence_logprob: Tensor,
    advantage: Tensor,
    kl_coef: float = 0.1,
) -> Tensor:
    """`-A logprob + kl_coef (logprob - ref_logprob)` per response: A-LoL's KL variant, unweighted.

    Args:
        sequence_logprob: f32[rows], differentiable.
        ref_sequence_logprob: f32[rows].
        advantage: f32[rows].
        kl_coef: Weight of the penalty.

    Returns:
        f32[rows], to be minimized.
    """
    penalty = sequence_logprob - ref_sequence_logprob
    return -advantage * sequence_logprob + kl_coef * penalty
