"""Rewards: from verdicts, judges' scores and process scores to what an algorithm is given.

Pure functions of columns. Nothing here scores a text: workers do (`Reward.score`); these functions
combine, bound and place what they say. Scores of a process reward model stand in a column over
tokens (or over steps), and a boolean column of the same shape says where a step ends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...dataflow.graph.tracer import op
from ..roles.language import PerSample, PerToken, SampleFlag, TokenMask
from .combined_score import constrained_score, weighted_sum
from .groups import floating
from .kl import finished_score, kl_shaped_reward
from .reductions import check_token_columns, zero_where_masked_out
from .reward_shaping import (
    OverlongForm,
    combine_rewards,
    is_correct,
    kl_penalized_score,
    length_reward,
    overlong_penalty,
    prompt_priority,
    response_length,
    signed_score,
)

__all__ = [
    "OverlongForm",
    "blended_with_model",
    "calibrated_score",
    "clipped_step_reward",
    "combine_rewards",
    "constrained_score",
    "constraint_reward",
    "delta_step_reward",
    "finished_score",
    "known_throughout",
    "is_correct",
    "kl_penalized_score",
    "kl_shaped_reward",
    "length_reward",
    "overlong_penalty",
    "process_reward",
    "process_shaped_reward",
    "prompt_priority",
    "response_length",
    "signed_score",
    "verifiable_reward",
    "weighted_score",
    "weighted_sum",
]


@op(scope="row")
def clipped_step_reward(
    step_score: PerToken, step_end: TokenMask, *, threshold: float = 0.5
) -> PerToken:
    """Clip: `min(score - threshold, 0)` at every step's end, so that no step adds reward.

    Without a bound, more steps mean more reward, and a policy learns to repeat itself. Gao et al.,
    "On Designing Effective RL Reward at Training Time for LLM Reasoning", 2024.

    Args:
        step_score: f32[rows, T], a process reward model's scores.
        step_end: bool[rows, T], True where a step ends.
        threshold: What a step must score to lose nothing; near the model's mean score.

    Returns:
        f32[rows, T]; 0 where no step ends.

    Raises:
        ValueError: If shapes differ.
    """
    check_token_columns(step_end, step_score=step_score)
    return zero_where_masked_out((step_score - threshold).clamp(max=0), step_end)


@op(scope="row")
def delta_step_reward(step_score: PerToken, step_end: TokenMask) -> PerToken:
    """Delta: a step's score minus the next step's, the last but one as it is, and the last 0.

    The sum from a step on telescopes to that step's own score, so what a response can collect does
    not grow with its number of steps. Gao et al., 2024 (see `clipped_step_reward`).

    Args:
        step_score: f32[rows, K].
        step_end: bool[rows, K]; positions between step ends are skipped over.

    Returns:
        f32[rows, K]; 0 where no step ends, and for a row of a single step.

    Raises:
        ValueError: If shapes differ.
    """
    check_token_columns(step_end, step_score=step_score)
    score = zero_where_masked_out(step_score, step_end)
    place = torch.arange(step_end.shape[1], device=score.device).expand(step_end.shape)
    later = torch.where(step_end, place, step_end.shape[1])
    # At each position, the first step end at or after it; shifted by one, strictly after it.
    first = later.flip(1).cummin(dim=1).values.flip(1) if step_end.shape[1] else later
    beyond = torch.full_like(first[:, :1], step_end.shape[1])
    following = torch.cat([first[:, 1:], beyond], dim=1)[:, : step_end.shape[1]]
    exists = following < step_end.shape[1]
    following = following.clamp(max=max(step_end.shape[1] - 1, 0))
    follows_last = ~exists.gather(1, following)
    step_after = torch.where(follows_last, 0.0, score.gather(1, following))
    return torch.where(step_end & exists, score - step_after, torch.zeros_like(score))


@op(scope="row")
def process_reward(
    step_score: PerToken,
    step_end: TokenMask,
    *,
    clip: float | None = 0.5,
    delta: bool = True,
) -> PerToken:
    """Step rewards by Clip, by Delta, by both (Clip first), or as the model scored them.

    Args:
        step_score: f32[rows, T].
        step_end: bool[rows, T], True where a step ends.
        clip: Clip's threshold; None goes without Clip.
        delta: Whether to take differences of adjacent steps.

    Returns:
        f32[rows, T]; 0 where no step ends.

    Raises:
        ValueError: If shapes differ.
    """
    check_token_columns(step_end, step_score=step_score)
    reward = zero_where_masked_out(step_score, step_end)
    if clip is not None:
        reward = clipped_step_reward(reward, step_end, threshold=clip)
    return delta_step_reward(reward, step_end) if delta else reward


@op(scope="row")
def process_shaped_reward(
    token_reward: PerToken,
    mask: TokenMask,
    *,
    step_score: PerToken,
    step_end: TokenMask,
    coef: float = 0.02,
    clip: float | None = 0.5,
    delta: bool = True,
) -> PerToken:
    """Token rewards with `coef` times the step rewards added where steps end.

    Args:
        token_reward: f32[rows, T], such as `kl_shaped_reward` of a verifier's score.
        mask: bool[rows, T].
        step_score: f32[rows, T].
        step_end: bool[rows, T]; only sampled tokens count.
        coef: Weight of the step rewards (alpha); 0.02 is the paper's order.
        clip: See `process_reward`.
        delta: See `process_reward`.

    Returns:
        f32[rows, T].

    Raises:
        ValueError: If shapes differ.
    """
    check_token_columns(mask, token_reward=token_reward, step_score=step_score)
    ends = step_end & mask
    shaped = process_reward(step_score, ends, clip=clip, delta=delta)
    return zero_where_masked_out(token_reward + coef * shaped, mask)


@op(scope="row")
def known_throughout(score: PerSample, step_score: PerToken, step_end: TokenMask) -> PerSample:
    """Return the score of a response, nan also where one of its steps has no score: f32[rows]."""
    return torch.where((step_score.isnan() & step_end).any(dim=1), torch.nan, floating(score))


@op(scope="row")
def verifiable_reward(
    verified: PerSample,
    finished: SampleFlag | None = None,
    *,
    scale: float = 10.0,
    no_eos_reward: float | None = -10.0,
) -> PerSample:
    """RLVR's reward: `scale` for a verified response, 0 for any other, `no_eos_reward` if cut off.

    Lambert et al., "Tulu 3: Pushing Frontiers in Open Language Model Post-Training", 2024.

    Args:
        verified: f32[rows]; above 0 means verified; nan means that there is no verdict.
        finished: bool[rows], True where the end of sequence was reached; None: all were.
        scale: alpha.
        no_eos_reward: Replaces the reward of a response that was cut off; None leaves it.

    Returns:
        f32[rows]; nan without a verdict, unless the response was cut off.
    """
    verified = floating(verified)
    reward = torch.where(verified > 0, scale, torch.zeros_like(verified))
    reward = torch.where(verified.isnan(), torch.nan, reward)
    if finished is None or no_eos_reward is None:
        return reward
    return torch.where(finished.bool(), reward, torch.full_like(reward, no_eos_reward))


def constraint_reward(
    verified: Tensor,
    *,
    multiplier: Tensor | float = 1.0,
    weight: Tensor | float = 1.0,
) -> Tensor:
    """Reward of several constraints: the sum of `verified * multiplier * weight` over them.

    Pyatkin et al., "Generalizing Verifiable Instruction Following", 2025.

    Args:
        verified: f32 or bool[..., constraints], 1 where the constraint holds.
        multiplier: One number, or one per constraint.
        weight: One number, or one per constraint.

    Returns:
        f32[...].
    """
    return (
        verified.to(torch.promote_types(verified.dtype, torch.float32)) * multiplier * weight
    ).sum(-1)


@op(scope="row")
def blended_with_model(
    verified: PerSample,
    model_score: PerSample,
    *,
    threshold: float = 75.0,
    bonus: float = 1.0,
    penalty: float = 0.5,
) -> PerSample:
    """A verifier's reward, corrected by a reward model where anything was verified at all.

    `V + bonus` where V > 0 and the model's score is above `threshold`, `V - penalty` where V > 0
    and it is not, and V otherwise (Pyatkin et al., 2025): the model can neither replace the
    verifier nor be ignored.

    Args:
        verified: f32[rows], the verifier's reward V.
        model_score: f32[rows].
        threshold: alpha, on the model's scale.
        bonus: Added above the threshold.
        penalty: Taken below it.

    Returns:
        f32[rows]; nan where V is, and where V > 0 and the model has no score.
    """
    verified = floating(verified)
    change = torch.where(model_score > threshold, bonus, -penalty).to(verified)
    change = torch.where(model_score.isnan(), torch.nan, change)
    return torch.where(verified > 0, verified + change, verified)


@op(scope="row")
def weighted_score(
    score: PerSample, *, other: PerSample, weight: float = 1.0, other_weight: float = 1.0
) -> PerSample:
    """`weight * score + other_weight * other`: f32[rows]; for two `Reward` roles of one step.

    A single role that combines any number of rewards is the worker `mixture`.
    """
    return weight * score + other_weight * other


@op(scope="row")
def calibrated_score(score: PerSample, *, baseline_score: PerSample) -> PerSample:
    """`sigmoid(score - baseline_score)`: how likely a response beats the baseline's.

    It puts reward models of different scales into (0, 1). Xu et al., "The Perfect Blend: Redefining
    RLHF with Mixture of Judges", 2024.

    Args:
        score: f32[rows].
        baseline_score: f32[rows], of the baseline response to the same prompt.

    Returns:
        f32[rows].
    """
    return torch.sigmoid(score - baseline_score)
