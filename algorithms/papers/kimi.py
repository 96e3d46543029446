"""Kimi k1.5: policy mirror descent around the policy that sampled, with a reward for brevity.

Kimi Team, "Kimi k1.5: Scaling Reinforcement Learning with LLMs", 2025, section 2.3. The report
starts each iteration with a new optimizer: an option of the optimizer, on in the configuration. The
reward for brevity is for later: the report trains without it first. There is no `correction`: the
loss's pull to the policy that sampled is no multiple of the advantage that weights are put on.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ...dataflow.options import (
    FiniteFloat,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    option_class,
)
from ..losses.sequence import SequenceLoss, of_row, sequence_sum
from ..ops.advantages import broadcast_over_tokens, group_advantage, log_partition_advantage
from ..ops.reductions import unknown
from ..ops.rewards import is_correct, length_reward, response_length, weighted_score
from ..options import check_groups, train_on
from ..roles import Policy, PolicyBatch, Prompts, Reward, Sampling, TrainMetrics
from ..roles.language_tables import PolicyOutput

MirrorForm = Literal["gradient", "squared"]
"""The loss whose gradient is the paper's ("gradient"), or the squared error it is derived from,
whose gradient is `2 * tau` times that."""


def mirror_descent_loss(
    *,
    sequence_logprob: Tensor,
    behavior_sequence_logprob: Tensor,
    advantage: Tensor,
    tau: float,
    form: MirrorForm = "gradient",
) -> Tensor:
    """`-A logprob + (tau / 2) (logprob - behavior_logprob)^2` per response.

    One step of policy mirror descent, with the policy that sampled as the center; there is no clip.
    Kimi Team, "Kimi k1.5", 2025, equation 3. The squared form is `(A - tau log_ratio)^2`.

    Args:
        sequence_logprob: f32[rows], differentiable.
        behavior_sequence_logprob: f32[rows], under the policy the iteration began with.
        advantage: f32[rows], the reward less its group's mean (or its log-partition function).
        tau: Weight of the KL to that policy.
        form: See `MirrorForm`.

    Returns:
        f32[rows], to be minimized.

    Raises:
        ValueError: If `form` is unknown.
    """
    log_ratio = sequence_logprob - behavior_sequence_logprob
    if form == "gradient":
        return -advantage * sequence_logprob + tau / 2 * log_ratio.square()
    if form == "squared":
        return (advantage - tau * log_ratio).square()
    raise unknown("form", form, MirrorForm)


@option_class
class MirrorDescentLoss(SequenceLoss):
    """A step of policy mirror descent around the policy that sampled; see `mirror_descent_loss`."""

    tau: PositiveFloat = 0.1
    """Weight of the KL to the policy that sampled."""
    form: MirrorForm = "gradient"
    """The paper's gradient, or the squared error it comes from; they differ by `2 * tau`."""

    def row_loss(self, output: PolicyOutput, batch: PolicyBatch) -> Tensor:
        return mirror_descent_loss(
            sequence_logprob=sequence_sum(output.logprob, batch.mask),
            behavior_sequence_logprob=sequence_sum(batch.behavior_logprob, batch.mask),
            advantage=of_row(batch.advantage, batch.mask),
            tau=self.tau,
            form=self.form,
        )


@option_class
class Kimi:
    """Options of Kimi k1.5's policy optimization."""

    sampling: Sampling = Sampling(num_samples=8, max_new_tokens=1024)
    """Sampling of the responses; `num_samples` is the size of a group."""
    epochs: PositiveInt = 1
    """Passes over each step's rollouts."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps per pass."""
    baseline: Literal["mean", "log_partition"] = "mean"
    """Baseline of a score: the group's mean, or the exact `tau log mean exp(score / tau)`."""
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
    return train_on(actor, cfg.loss, batch, cfg)
