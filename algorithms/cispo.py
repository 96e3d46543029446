"""CISPO: group advantages, and a bounded weight in place of a clip, so that no token is left out.

MiniMax, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention", 2025. Only
the upper bound is meant to act. `loss.weight_cap` is the bound on the ratio itself; code that has
`eps_high` for it means `1 + eps_high`.
"""

from __future__ import annotations

from ..dataflow.options import NonNegativeFloat, PositiveInt, option_class
from .losses.tokens import CappedWeightLoss
from .ops.advantages import broadcast_over_tokens, group_advantage
from .ops.reductions import Variance
from .ops.rollout_correction import RolloutCorrection
from .options import check_groups, train_policy
from .roles import Policy, Prompts, Reward, Sampling, TrainMetrics


@option_class
class CISPO:
    """Options of CISPO."""

    sampling: Sampling = Sampling(num_samples=64, max_new_tokens=1024)
    """Sampling of the responses; `num_samples` is the size of a group."""
    correction: RolloutCorrection | None = None
    """Importance weights for an engine that samples with other numbers than the trainer's."""
    epochs: PositiveInt = 1
    """Passes over each step's rollouts."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps per pass."""
    divide_by_std: bool = True
    """Divide by the group's standard deviation; False is Dr. GRPO's advantage."""
    std_variance: Variance = "unbiased"
    """Whether that deviation divides by n - 1 ("unbiased") or n ("biased")."""
    std_eps: NonNegativeFloat = 1e-6
    """Added to the standard deviation."""
    loss: CappedWeightLoss = CappedWeightLoss(report_entropy=True)
    """The bounds of the weight; the mean is over tokens."""

    def __post_init__(self) -> None:
        self.sampling.check_explores()
        check_groups(self)


def cispo_step(prompts: Prompts, actor: Policy, reward: Reward, cfg: CISPO) -> TrainMetrics:
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
