"""Kimi k1.5: policy mirror descent around the policy that sampled, with a reward for brevity.

Kimi Team, "Kimi k1.5: Scaling Reinforcement Learning with LLMs", 2025, section 2.3. The report
starts each iteration with a new optimizer: an option of the optimizer, on in the configuration. The
reward for brevity is for later: the report trains without it first. There is no `correction`: the
loss's pull to the policy that sampled is no multiple of the advantage that weights are put on.
"""

from __future__ import annotations

from typing import Literal

from ..dataflow.options import FiniteFloat, NonNegativeFloat, PositiveInt, option_class
from .losses import MirrorDescentLoss
from .ops.advantages import broadcast_over_tokens, group_advantage, log_partition_advantage
from .ops.rewards import is_correct, length_reward, response_length, weighted_score
from .options.policy_updates import check_groups
from .roles import Policy, PolicyBatch, Prompts, Reward, Sampling, TrainMetrics


@option_class
class Kimi:
    """Options of Kimi k1.5's policy optimization."""

    sampling: Sampling = Sampling(num_samples=8, max_new_tokens=1024)
    """How responses are sampled; `num_samples` is the size of a group."""
    epochs: PositiveInt = 1
    """Passes over each step's rollouts."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps per pass."""
    baseline: Literal["mean", "log_partition"] = "mean"
    """What is taken off a score: the group's mean, or the exact `tau log mean exp(score / tau)`."""
    length_weight: NonNegativeFloat = 0.0
    """Weight of the reward for brevity; 0 while warming up."""
    correct_score: FiniteFloat = 1.0
    """From which score on a response counts as correct; wrong ones gain nothing by brevity."""
    loss: MirrorDescentLoss = MirrorDescentLoss(report_entropy=True)
    """Mirror descent: `tau` is the weight of the KL to the policy that sampled."""

    def __post_init__(self) -> None:
        self.sampling.check_explores()
        check_groups(self)


def kimi_step(prompts: Prompts, actor: Policy, reward: Reward, cfg: Kimi) -> TrainMetrics:
    """Sample groups of responses, score them, and take a mirror descent step."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    if cfg.length_weight:
        correct = is_correct(score, threshold=cfg.correct_score)
        brevity = length_reward(response_length(roll.mask), roll.prompt_id, correct=correct)
        score = weighted_score(score, other=brevity, other_weight=cfg.length_weight)
    if cfg.baseline == "mean":
        advantage = group_advantage(score, roll.prompt_id, divide_by_std=False)
    else:
        advantage = log_partition_advantage(score, roll.prompt_id, tau=cfg.loss.tau)
    batch = PolicyBatch(
        tokens=roll.tokens,
        mask=roll.mask,
        behavior_logprob=roll.behavior_logprob,
        advantage=broadcast_over_tokens(advantage, roll.mask),
    )
    return actor.train(
        cfg.loss,
        batch,
        epochs=cfg.epochs,
        num_minibatches=cfg.num_minibatches,
        temperature=cfg.sampling.temperature,
    )
