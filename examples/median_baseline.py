"""An algorithm of your own in one file: GRPO against the median of the group.

The median ignores how far off an outlier is, so one lucky sample moves the others' baseline less
than it moves a mean. Samples are compared in units of the group's mean absolute deviation.

Run it here: `penstock run algorithm=own algorithm.step=median_baseline:median_step`.
"""

from __future__ import annotations

import torch
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.algorithms.ops.advantages import broadcast_over_tokens
from penstock.algorithms.options import PolicyUpdates, check_groups, train_policy
from penstock.algorithms.roles import (
    PerSample,
    Policy,
    PromptId,
    Prompts,
    Reward,
    Sampling,
    TrainMetrics,
)
from penstock.dataflow import op
from penstock.dataflow.options import option_class


@option_class
class Median(PolicyUpdates):
    """Options of the step; each is a key `algorithm.cfg.NAME`."""

    sampling: Sampling = Sampling(num_samples=8, max_new_tokens=5)
    """How responses are sampled; `num_samples` is the size of a group."""
    divide: bool = True
    """Whether to divide by the group's mean absolute deviation from the median."""
    loss: ClippedPolicyLoss = ClippedPolicyLoss(report_entropy=True)
    """Clipping, and how tokens are weighed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_groups(self)


@op(scope="group")
def against_median(score: PerSample, prompt_id: PromptId, *, divide: bool = True) -> PerSample:
    """`(score - median) / mean |score - median|` of each group; 0 where all scores are equal."""
    advantage = torch.zeros_like(score)
    for group in prompt_id.unique():
        rows = prompt_id == group
        centered = score[rows] - score[rows].quantile(0.5)
        deviation = centered.abs().mean()
        advantage[rows] = centered / deviation if divide and deviation > 0 else centered
    return advantage


def median_step(prompts: Prompts, actor: Policy, reward: Reward, cfg: Median) -> TrainMetrics:
    """Sample groups, score them, and train on how each sample compares with the median."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    advantage = against_median(score, roll.prompt_id, divide=cfg.divide)
    return train_policy(actor, roll, broadcast_over_tokens(advantage, roll.mask), cfg.loss, cfg)
