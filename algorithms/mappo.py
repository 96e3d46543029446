"""MAPPO: agents of a team that act by one policy, and a critic that sees what all of them see.

Yu et al., "The Surprising Effectiveness of PPO in Cooperative Multi-Agent Games", 2022.

A row is one agent of one environment; the agents of an environment are rows next to each other, in
one group, and share policy and reward. The critic is a role of its own: for each agent it is shown
the agent's own observation first and then the others', in the order they follow it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..dataflow.graph.tracer import op
from ..dataflow.options import Fraction, PositiveInt, option_class
from .losses.actor_critic import ActorLoss, CriticLoss
from .options import actor_critic_batch, gae_of
from .roles import TrainMetrics
from .roles.environment import (
    ActorCritic,
    Env,
    EnvId,
    EnvRows,
    LastObservation,
    Observations,
    TeamCritic,
)


@dataclass(frozen=True, kw_only=True)
class Joint:
    """Joint observations of teams, once for each agent: its own observation first."""

    obs: Observations
    last_obs: LastObservation


@op(scope="group")
def joint(env: EnvId, *, obs: Observations, last_obs: LastObservation, num_agents: int) -> Joint:
    """Put the observations of a team side by side.

    Args:
        env: i64[rows]; agent a of environment n is number `n * num_agents + a`.
        obs: f32[rows, T, features].
        last_obs: f32[rows, features].
        num_agents: In every team.

    Returns:
        f32[rows, T, num_agents * features] and f32[rows, num_agents * features].

    Raises:
        ValueError: If the agents of a team are not all there, in order.
    """
    first = env[::num_agents]
    expected = (first[:, None] + torch.arange(num_agents)).flatten()
    if bool((first % num_agents != 0).any()) or not torch.equal(env, expected):
        raise ValueError(
            f"rows {env.tolist()!s:.80} are not whole teams of {num_agents} agents next to each "
            "other; the number of agents (algorithm.cfg.num_agents) must be the environment's, and "
            "a group must hold whole teams"
        )
    seat = torch.arange(num_agents)
    order = (seat[:, None] + seat[None, :]) % num_agents  # agent, then who is seen in which place

    def side_by_side(column: Tensor) -> Tensor:
        teams = column.unflatten(0, (-1, num_agents))[:, order]  # [teams, agents, places, ...]
        return teams.movedim(2, -2).flatten(-2).flatten(0, 1)

    return Joint(obs=side_by_side(obs), last_obs=side_by_side(last_obs))


@option_class
class MAPPO:
    """Options of MAPPO."""

    num_agents: PositiveInt = 3
    """Agents of an environment; `task.num_agents` says the same."""
    horizon: PositiveInt = 128
    """Steps that every environment takes between updates."""
    discount: Fraction = 0.99
    """gamma, per step."""
    gae_lambda: Fraction = 0.95
    """lambda of the advantage estimate; 0 trusts the critic fully, 1 not at all."""
    policy_loss: ActorLoss = ActorLoss()
    """The policy's."""
    value_loss: CriticLoss = CriticLoss()
    """The critic's."""
    epochs: PositiveInt = 4
    """Passes over the steps taken."""
    num_minibatches: PositiveInt = 4
    """Optimizer steps in a pass, each on as many steps sampled at random."""


def mappo_step(
    rows: EnvRows, env: Env, actor: ActorCritic, critic: TeamCritic, cfg: MAPPO
) -> tuple[TrainMetrics, TrainMetrics]:
    """Act in teams, let the critic see whole teams, and train both."""
    traj = env.rollout(rows.env, rows.group, actor, horizon=cfg.horizon)
    seen = joint(traj.env, obs=traj.obs, last_obs=traj.last_obs, num_agents=cfg.num_agents)
    values = critic.value(seen.obs, seen.last_obs)
    target = gae_of(traj, values, discount=cfg.discount, gae_lambda=cfg.gae_lambda)
    batch = actor_critic_batch(traj, values, target)
    often = {"epochs": cfg.epochs, "num_minibatches": cfg.num_minibatches}
    return (
        actor.train(cfg.policy_loss, batch, **often),
        critic.train(cfg.value_loss, replace(batch, obs=seen.obs), **often),
    )
