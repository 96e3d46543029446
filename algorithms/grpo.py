"""Group relative policy optimization: a sample is as good as it beats its group; no critic.

Shao et al., "DeepSeekMath", 2024, section 4, without the KL term: `reference_grpo` adds it, and the
reference model it needs. What is clipped, and by which formula, says `ClippedPolicyLoss`. Dr. GRPO
is `divide_by_std=False` with the aggregation "constant".
"""

from __future__ import annotations

from ..dataflow.options import NonNegativeFloat, option_class
from .losses.tokens import ClippedPolicyLoss
from .ops.advantages import broadcast_over_tokens, group_advantage
from .ops.reductions import Variance
from .options import PolicyUpdates, check_groups, train_policy
from .roles import Policy, Prompts, Reward, Sampling, TrainMetrics


@option_class
class GRPO(PolicyUpdates):
    """Options of GRPO."""

    sampling: Sampling = Sampling(num_samples=64, max_new_tokens=1024)
    """Sampling of the responses; `num_samples` is the size of a group."""
    divide_by_std: bool = True
    """Divide by the group's standard deviation; False is Dr. GRPO's advantage."""
    std_variance: Variance = "unbiased"
    """Whether that deviation divides by n - 1 ("unbiased") or n ("biased")."""
    std_eps: NonNegativeFloat = 1e-6
    """Added to the standard deviation."""
    loss: ClippedPolicyLoss = ClippedPolicyLoss(
        aggregation="seq-mean-token-mean", report_entropy=True
    )
    """Clipping of the probability ratio, and how tokens and rows are weighed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_groups(self)


def grpo_step(prompts: Prompts, actor: Policy, reward: Reward, cfg: GRPO) -> TrainMetrics:
    """Sample groups of responses, score them, and train on how each compares with its group."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    advantage = group_advantage(
        score,
        roll.prompt_id,
        divide_by_std=cfg.divide_by_std,
        variance=cfg.std_variance,
        eps=cfg.std_eps,
    )
    per_token = broadcast_over_tokens(advantage, roll.mask)
    return train_policy(actor, roll, per_token, cfg.loss, cfg)
