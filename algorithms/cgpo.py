"""CGPO: a policy gradient on a calibrated reward, which is 0 for responses with a violation.

Xu et al., "The Perfect Blend: Redefining RLHF with Mixture of Judges", 2024: the optimizer CRPG.
Judges say whether a response keeps all constraints; the reward is how likely it beats the
reference's own response, less the farther it is from the reference. `codpo` and `crraft` are the
paper's two other optimizers. Its several tasks, each with judges and an optimizer of its own, are
several runs of these steps.
"""

from __future__ import annotations

from ..dataflow.options import option_class
from .losses import ReinforceLoss
from .ops.advantages import broadcast_over_tokens
from .ops.constrained import MeanOver, constrained_reward, kl_allowance, less_mean
from .ops.rollout_correction import RolloutCorrection
from .options.constrained_updates import Constrained, sample_and_judge
from .options.policy_updates import train_policy
from .roles import PerSample, Policy, Prompts, Reward, TrainMetrics


@option_class
class CGPO(Constrained):
    """Options of CGPO."""

    correction: RolloutCorrection | None = None
    """Importance weights for an engine that samples with other numbers than the trainer's."""
    mean_over: MeanOver = "batch"
    """Whose mean reward is the baseline: all responses' of the batch, those that pass, or all of
    the same prompt."""
    loss: ReinforceLoss = ReinforceLoss(aggregation="seq-mean-token-sum", report_entropy=True)
    """The policy gradient of whole responses."""


def cgpo_step(
    prompts: Prompts, actor: Policy, ref: Policy, reward: Reward, judges: Reward, cfg: CGPO
) -> tuple[TrainMetrics, PerSample, PerSample]:
    """Sample, judge, and train on the rewards that remain; reports who passed, and the KL."""
    compared = sample_and_judge(prompts, actor, ref, reward, judges, cfg)
    roll = compared.roll
    rewarded = constrained_reward(
        compared.score,
        passed=compared.passed,
        allowance=kl_allowance(compared.kl, kl_max=cfg.kl_max),
    )
    advantage = less_mean(rewarded, roll.prompt_id, passed=compared.passed, mean_over=cfg.mean_over)
    per_token = broadcast_over_tokens(advantage, roll.mask)
    return train_policy(actor, roll, per_token, cfg.loss, cfg), compared.passed, compared.kl
