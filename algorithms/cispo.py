"""CISPO: group advantages, and a bounded weight in place of a clip, so that no token is left out.

MiniMax, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention", 2025. Only
the upper bound is meant to act. `loss.weight_cap` is the bound on the ratio itself; code that has
`eps_high` for it means `1 + eps_high`.
"""

from __future__ import annotations

from dataclasses import dataclass

from .grpo import GroupRelative
from .losses import CappedWeightLoss
from .options.policy_updates import train_policy
from .roles import Policy, Prompts, Reward, TrainMetrics

__all__ = ["CISPO", "cispo_step"]


@dataclass(frozen=True, kw_only=True)
class CISPO(GroupRelative):
    """Options of CISPO."""

    loss: CappedWeightLoss = CappedWeightLoss(report_entropy=True)
    """The bounds of the weight; the mean is over tokens."""


def cispo_step(prompts: Prompts, actor: Policy, reward: Reward, cfg: CISPO) -> TrainMetrics:
    """Sample groups of responses, score them, and train on how each compares with its group."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    advantage = cfg.advantage(score, roll)
    return train_policy(actor, roll, advantage, cfg.loss, cfg)
