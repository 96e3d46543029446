"""Rewards for being different from policies found before: reward switching.

Zhou et al., "Continuously Discovering Novel Strategies via Reward-Switching Policy Optimization"
(RSPO), 2022.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .reward_shaping import check_known


@dataclass(frozen=True, kw_only=True)
class RewardSwitch:
    """Which rewards a trajectory gets, f32 of 0 and 1."""

    extrinsic: Tensor
    """f32[rows]: the environment's own, where the trajectory is new to all earlier policies."""
    behavior: Tensor
    """f32[rows, policies]: for unlikely actions, where it is not new to that policy."""
    prediction: Tensor
    """f32[rows, policies]: for rewards that policy's predictor misses, where it is new to it."""


def novelty_thresholds(negative_logprob: Tensor, *, coef: float = 1.0) -> Tensor:
    """How unlikely a trajectory must be to count as new: `coef` times the mean, f32[policies].

    Args:
        negative_logprob: f32[rows, policies], of trajectories under each earlier policy.
        coef: alpha; the authors lower it during training.
    """
    return coef * negative_logprob.mean(dim=0)


def switch_rewards(negative_logprob: Tensor, threshold: Tensor) -> RewardSwitch:
    """Compare trajectories with the policies found before.

    Args:
        negative_logprob: f32[rows, policies]: `-log p` of each trajectory under each policy, of
            whole trajectories or per step.
        threshold: f32[policies], in the same unit.

    Raises:
        ValueError: If there is not one threshold per policy.
        FloatingPointError: If a threshold or a trajectory's log-probability is nan.
    """
    if threshold.shape != negative_logprob.shape[-1:]:
        raise ValueError(
            f"threshold must have one entry per policy, {list(negative_logprob.shape[-1:])}, "
            f"got {list(threshold.shape)}"
        )
    check_known("log-probability", negative_logprob)
    check_known("threshold", threshold)
    new = (negative_logprob >= threshold).to(negative_logprob)
    extrinsic = new.prod(dim=-1) if new.shape[-1] else torch.ones_like(new.sum(dim=-1))
    return RewardSwitch(extrinsic=extrinsic, behavior=1 - new, prediction=new)
