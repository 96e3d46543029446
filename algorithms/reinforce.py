"""REINFORCE: the plain policy gradient, with the batch's mean score as baseline or none.

Williams, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement
Learning", 1992. There is no ratio and no clip, so a step is one optimizer step on fresh rollouts.
"""

from __future__ import annotations

from typing import Literal

from ..dataflow.options import option_class
from .losses.tokens import ReinforceLoss
from .ops.advantages import batch_centered, broadcast_over_tokens
from .options import PolicyUpdates, scored_rows, train_policy
from .roles import Policy, Prompts, Reward, TrainMetrics


@option_class
class Reinforce(PolicyUpdates):
    """Options of REINFORCE."""

    baseline: Literal["batch_mean", "none"] = "batch_mean"
    """Number that is subtracted from every score."""
    loss: ReinforceLoss = ReinforceLoss(aggregation="seq-mean-token-sum", report_entropy=True)
    """Weighing of tokens and rows; the sum over tokens is the response's log-probability."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs > 1 or self.num_minibatches > 1:
            raise ValueError(
                f"epochs is {self.epochs} and num_minibatches {self.num_minibatches}, but the loss "
                "has no ratio, so from the second update on its gradient would be another "
                "policy's; leave both at 1, or use an algorithm with a ratio, such as rloo or grpo"
            )


def reinforce_step(prompts: Prompts, actor: Policy, reward: Reward, cfg: Reinforce) -> TrainMetrics:
    """Sample, score, and make better-scored responses likelier."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    roll = scored_rows(roll, score)
    if cfg.baseline == "batch_mean":
        score = batch_centered(score)
    return train_policy(actor, roll, broadcast_over_tokens(score, roll.mask), cfg.loss, cfg)
