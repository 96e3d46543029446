"""Deep Q-learning: values of actions, from steps of a replay, towards those of a slower copy.

Mnih et al., "Human-level Control through Deep Reinforcement Learning", 2015. Van Hasselt et al.,
"Deep Reinforcement Learning with Double Q-learning", 2015, is `double`. Defaults are CleanRL's for
classic control, whose updates are spread over the steps of an environment: here `num_updates` of
them follow `horizon` steps of all environments.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from ..dataflow.graph.role import Loss, LossSum
from ..dataflow.graph.tracer import op
from ..dataflow.options import Fraction, PositiveFraction, PositiveInt, option_class
from .losses.tokens import TokenAggregation, clipped_value_loss, token_metric
from .ops.reductions import aggregation_totals, zero_where_masked_out
from .roles import PerStep, StepMask, TrainMetrics, ValueOutput
from .roles.environment import Env, EnvRows, QBatch, QNetwork, Replay

ErrorNorm = Literal["squared", "huber"]
"""Norm of an error: half its square, or that up to 1 and linear beyond."""


@option_class
class TemporalDifferenceLoss(TokenAggregation, Loss[QBatch, ValueOutput]):
    """The error of a Q-network against fixed targets.

    Metrics, per sampled step:

    - `value_loss`: the error, as aggregated.
    - `q_mean`: the value of the action that was taken.
    """

    tolerates_lag: ClassVar[bool] = True

    norm: ErrorNorm = "squared"
    """Norm of the temporal-difference error."""

    def totals(self, batch: QBatch) -> Tensor:
        return aggregation_totals(batch.mask)

    def __call__(self, output: ValueOutput, batch: QBatch, totals: Tensor) -> LossSum:
        value = zero_where_masked_out(output.value, batch.mask)
        target = zero_where_masked_out(batch.value_target, batch.mask)
        if self.norm == "huber":
            loss = F.huber_loss(value, target, reduction="none")
        else:
            loss = clipped_value_loss(value=value, old_value=value, value_target=target, eps=None)
        metrics = {
            "value_loss": self.reduced_metric(loss, batch.mask),
            "q_mean": token_metric(value, batch.mask),
        }
        return LossSum(self.reduce(loss, batch.mask, totals), metrics)


@op(scope="row")
def bellman_target(
    reward: PerStep, *, next_value: PerStep, terminated: StepMask, discount: float
) -> PerStep:
    """`reward + discount * next_value`, and the reward alone where nothing comes after.

    Args:
        reward: f32[rows, T].
        next_value: f32[rows, T], of the state after each step.
        terminated: bool[rows, T].
        discount: gamma, per step.

    Returns:
        f32[rows, T].
    """
    return reward + discount * zero_where_masked_out(next_value, ~terminated)


@option_class
class DQN:
    """Options of DQN."""

    horizon: PositiveInt = 10
    """Steps of every environment from one training to the next."""
    discount: Fraction = 0.99
    """gamma, per step."""
    double: bool = False
    """Let the network being trained choose the next action, whose value the slower copy says."""
    batch_size: PositiveInt = 128
    """Sampled steps per optimizer step."""
    num_updates: PositiveInt = 1
    """Optimizer steps per step."""
    min_stored: PositiveInt = 1000
    """Train only once the replay holds so many steps."""
    target_share: PositiveFraction = 1.0
    """Step of the slower copy: 1 copies the network, 0.005 follows it slowly."""
    target_every: PositiveInt = 1
    """Steps from one such move to the next."""
    loss: TemporalDifferenceLoss = TemporalDifferenceLoss()
    """The network's loss."""


def dqn_step(
    rows: EnvRows, env: Env, q: QNetwork, target: QNetwork, replay: Replay, cfg: DQN
) -> tuple[TrainMetrics, TrainMetrics]:
    """Act, store the steps, sample some, and train towards the slower copy's values."""
    steps = env.rollout(rows.env, rows.group, q, horizon=cfg.horizon)
    stored = replay.add(steps)
    num_steps = cfg.batch_size * cfg.num_updates
    sampled = replay.sample(stored, num_steps=num_steps, at_least=cfg.min_stored)
    chooser = q if cfg.double else target
    next_value = target.value(sampled.next_obs, chooser.best(sampled.next_obs))
    batch = QBatch(
        obs=sampled.obs,
        action=sampled.action,
        mask=sampled.mask,
        value_target=bellman_target(
            sampled.reward,
            next_value=next_value,
            terminated=sampled.terminated,
            discount=cfg.discount,
        ),
    )
    return (
        q.train(cfg.loss, batch, num_minibatches=cfg.num_updates),
        target.follow(q, share=cfg.target_share, every=cfg.target_every),
    )
