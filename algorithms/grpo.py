"""Group relative policy optimization: a sample is as good as it beats its group; no critic.

Shao et al., "DeepSeekMath", 2024, section 4, without the KL term: `reference_grpo` adds it, and the
reference model it needs. Dr. GRPO is `divide_by_std=False` with the aggregation "constant".
"""

from __future__ import annotations

from dataclasses import dataclass

from ..dataflow.option_checks import check_range
from .losses import ClippedPolicyLoss
from .ops.advantages import broadcast_over_tokens, group_advantage
from .ops.reductions import Variance
from .options.policy_updates import Updates, train_policy
from .roles import PerSample, PerToken, Policy, Prompts, Reward, Rollout, Sampling, TrainMetrics

__all__ = ["GRPO", "GroupRelative", "grpo_step"]


@dataclass(frozen=True, kw_only=True)
class GroupRelative(Updates):
    """Options of steps that compare a sample with its group as GRPO does."""

    sampling: Sampling = Sampling(num_samples=64, max_new_tokens=1024)
    """How responses are drawn; `num_samples` is the size of a group."""
    divide_by_std: bool = True
    """Divide by the group's standard deviation; False is Dr. GRPO's advantage."""
    std_variance: Variance = "unbiased"
    """Whether that deviation divides by n - 1 ("unbiased") or n ("biased")."""
    std_eps: float = 1e-6
    """Added to the standard deviation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "std_eps", at_least=0)
        self.check_groups()

    def advantage(self, score: PerSample, roll: Rollout) -> PerToken:
        """How each sample compares with its group, for each of its tokens."""
        advantage = group_advantage(
            score,
            roll.prompt_id,
            divide_by_std=self.divide_by_std,
            variance=self.std_variance,
            eps=self.std_eps,
        )
        return broadcast_over_tokens(advantage, roll.mask)


@dataclass(frozen=True, kw_only=True)
class GRPO(GroupRelative):
    """Options of GRPO."""

    loss: ClippedPolicyLoss = ClippedPolicyLoss(
        aggregation="seq-mean-token-mean", report_entropy=True
    )
    """Clipping, and how tokens and rows are weighed."""


def grpo_step(prompts: Prompts, actor: Policy, reward: Reward, cfg: GRPO) -> TrainMetrics:
    """Sample groups of responses, score them, and train on how each compares with its group."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    advantage = cfg.advantage(score, roll)
    return train_policy(actor, roll, advantage, cfg.loss, cfg)
