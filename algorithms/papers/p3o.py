"""P3O: a policy gradient on the difference of two responses' rewards; no critic, no baseline.

Wu et al., "Pairwise Proximal Policy Optimization: Harnessing Relative Feedback for LLM Alignment",
2023. The KL to the reference is in the score. What both responses of a prompt have in common, such
as a reward model's offset, cancels.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ...dataflow.options import PositiveFloat, option_class
from ..losses.sequence import LOG_RATIO_CLAMP, PairLoss
from ..ops.reductions import unknown
from ..options import PairUpdates, score_less_kl, train_on_pairs
from ..roles import Policy, Prompts, Reward, TrainMetrics

PairClip = Literal["separate", "joint"]
"""Clip the ratio of each response of a pair, or the ratio of their ratios."""


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
    ratio = log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    if clip == "separate":
        weight = (score - score.flip(-1)) * ratio.detach().flip(-1)
        clipped = ratio.clamp(1 - eps, 1 + eps)
        return -0.5 * torch.minimum(weight * ratio, weight * clipped).sum(dim=-1)
    if clip != "joint":
        raise unknown("clip", clip, PairClip)
    weight = (score[..., 0] - score[..., 1]) * ratio.detach().prod(dim=-1)
    difference = sequence_logprob[..., 0] - sequence_logprob[..., 1]
    before = behavior_sequence_logprob[..., 0] - behavior_sequence_logprob[..., 1]
    clipped = difference.clamp(before - eps, before + eps)
    return -0.5 * torch.minimum(weight * difference, weight * clipped)


@option_class
class P3OLoss(PairLoss):
    """The pairwise policy gradient with a clip; see `p3o_loss`."""

    eps: PositiveFloat = 0.2
    """Width of the clip."""
    clip: PairClip = "separate"
    """Clip each response's ratio, or the ratio of the two."""

    def pair_loss(self, logprob: Tensor, behavior_logprob: Tensor, score: Tensor) -> Tensor:
        return p3o_loss(
            sequence_logprob=logprob,
            behavior_sequence_logprob=behavior_logprob,
            score=score,
            eps=self.eps,
            clip=self.clip,
        )


@option_class
class P3O(PairUpdates):
    """Options of P3O."""

    loss: P3OLoss = P3OLoss(report_entropy=True)
    """The ratio that is clipped, and the width of the clip."""


def p3o_step(
    prompts: Prompts, actor: Policy, ref: Policy, reward: Reward, cfg: P3O
) -> TrainMetrics:
    """Sample two responses per prompt, score them, and train on the difference."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    score = score_less_kl(score, roll, ref, cfg.kl_coef, cfg.sampling.temperature)
    return train_on_pairs(actor, roll, score, cfg.loss, cfg)
