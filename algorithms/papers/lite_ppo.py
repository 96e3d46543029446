"""Lite PPO: the group's mean as baseline, the batch's deviation as scale, and a mean over tokens.

Liu et al., "Part I: Tricks or Traps? A Deep Dive into RL for LLM Reasoning", 2025: of all tricks,
these two suffice. It has no critic, no KL and no filter.
"""

from __future__ import annotations

from ...dataflow.options import NonNegativeFloat, option_class
from ..losses.tokens import ClippedPolicyLoss
from ..ops.advantages import StdScores, batch_std_advantage, broadcast_over_tokens
from ..ops.reductions import Variance
from ..options import PolicyUpdates, check_groups, train_policy
from ..roles import Policy, Prompts, Reward, Sampling, TrainMetrics


@option_class
class LitePPO(PolicyUpdates):
    """Options of Lite PPO."""

    sampling: Sampling = Sampling(num_samples=8, max_new_tokens=1024)
    """Sampling of the responses; `num_samples` is the size of a group."""
    std_of: StdScores = "raw"
    """The scores whose deviation divides: as they came, or less their group's mean ("centered")."""
    std_variance: Variance = "unbiased"
    """Whether that deviation divides by n - 1 ("unbiased") or n ("biased")."""
    std_eps: NonNegativeFloat = 1e-4
    """Added to the standard deviation."""
    loss: ClippedPolicyLoss = ClippedPolicyLoss(report_entropy=True)
    """Clipping; the mean is over tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_groups(self)


def lite_ppo_step(prompts: Prompts, actor: Policy, reward: Reward, cfg: LitePPO) -> TrainMetrics:
    """Sample groups of responses, score them, and train on how each compares with its group."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    advantage = batch_std_advantage(
        score,
        roll.prompt_id,
        std_of=cfg.std_of,
        variance=cfg.std_variance,
        eps=cfg.std_eps,
    )
    return train_policy(actor, roll, broadcast_over_tokens(advantage, roll.mask), cfg.loss, cfg)
