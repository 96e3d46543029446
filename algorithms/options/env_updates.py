"""What steps in environments share: advantages of trajectories, and training on them."""

from __future__ import annotations

from typing import Any

from ...dataflow.graph.role import Loss
from ..ops.returns import GaeTargets, gae
from ..roles.environment import (
    ActorCritic,
    ActorCriticBatch,
    ActorCriticOutput,
    Trajectories,
    Values,
)
from ..roles.language import TrainMetrics


def gae_of(traj: Trajectories, values: Values, *, discount: float, gae_lambda: float) -> GaeTargets:
    """Advantages of trajectories, across the ends of their episodes; see `gae`.

    Args:
        traj: What the actor did.
        values: The critic's values of the states.
        discount: gamma, per step.
        gae_lambda: lambda.
    """
    return gae(
        traj.mask,
        reward=traj.reward,
        value=values.value,
        bootstrap_value=values.bootstrap_value,
        terminated=traj.terminated,
        truncated=traj.truncated,
        discount=discount,
        lam=gae_lambda,
    )


def actor_critic_batch(traj: Trajectories, values: Values, target: GaeTargets) -> ActorCriticBatch:
    """What the losses of an actor and a critic read.

    Args:
        traj: What the actor did.
        values: The critic's values of the states, before the update.
        target: Advantages of the actions, and the critic's targets.
    """
    return ActorCriticBatch(
        obs=traj.obs,
        action=traj.action,
        action_mask=traj.action_mask,
        mask=traj.mask,
        recurrent_state=traj.recurrent_state,
        behavior_logprob=traj.behavior_logprob,
        advantage=target.advantage,
        old_value=values.value,
        value_target=target.value_target,
    )


def train_actor_critic(
    actor: ActorCritic,
    traj: Trajectories,
    values: Values,
    target: GaeTargets,
    loss: Loss[Any, ActorCriticOutput],
    *,
    epochs: int = 1,
    num_minibatches: int = 1,
) -> TrainMetrics:
    """Train actor and critic at once.

    Args:
        actor: The actor that acted.
        traj: What it did.
        values: See `actor_critic_batch`.
        target: See `actor_critic_batch`.
        loss: Reads an `ActorCriticBatch`.
        epochs: Passes over the steps.
        num_minibatches: Optimizer steps in a pass.
    """
    batch = actor_critic_batch(traj, values, target)
    return actor.train(loss, batch, epochs=epochs, num_minibatches=num_minibatches)
