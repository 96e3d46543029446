"""A small population that learns by PPO, and whose less fit members inherit the fitter's weights.

Every member acts in environments of its own. From time to time each is compared with the next one
in a ring, and goes on with its weights, changed a little, if that one has earned more: a tournament
of two, as in Jaderberg et al., "Population Based Training of Neural Networks", 2017, of weights
alone. Members are roles, so a plan may train them on devices of their own.

Their environments must give rewards as they are: scaled by running moments, those of one member
could not be compared with those of another.
"""

from __future__ import annotations

import torch

from ...dataflow.graph.tracer import op
from ...dataflow.options import NonNegativeFloat, PositiveInt, option_class
from ..env_ppo import EnvPPO, learn
from ..ops.groups import floating
from ..roles import TrainMetrics
from ..roles.environment import ActorCritic, Env, EnvMask, EnvRows, PerEnv, PerEnvStep


@option_class
class Population:
    """Options of a population of four."""

    learning: EnvPPO = EnvPPO()
    """Training of every member."""
    select_every: PositiveInt = 10
    """Steps from one comparison to the next."""
    mutation: NonNegativeFloat = 0.02
    """Average change of an inherited weight, as a share of it."""


@op(scope="group", makes_rows=True)
def own_rows(rows: EnvRows, *, member: int, num_members: int) -> EnvRows:
    """The environments of one member: those of every `num_members`-th group."""
    own = rows.group % num_members == member
    return EnvRows(env=rows.env[own], group=rows.group[own])


@op(scope="batch")
def mean_return(
    reward: PerEnvStep, mask: EnvMask, *, terminated: EnvMask, truncated: EnvMask
) -> PerEnv:
    """Return per episode that ended, over all environments together.

    If none has ended, what was earned so far.

    Args:
        reward: f32[envs, T].
        mask: bool[envs, T].
        terminated: bool[envs, T].
        truncated: bool[envs, T].

    Returns:
        f32[envs], the same number in each.
    """
    ended = ((terminated | truncated) & mask).sum().clamp(min=1)
    earned = torch.where(mask, reward, 0.0).double().sum() / ended
    return earned.to(floating(reward)).expand(len(reward)).clone()


def population_step(
    rows: EnvRows,
    env: Env,
    first: ActorCritic,
    second: ActorCritic,
    third: ActorCritic,
    fourth: ActorCritic,
    cfg: Population,
) -> tuple[TrainMetrics, ...]:
    """Let every member act and learn, and the less fit of each pair inherit the other's weights."""
    members = (first, second, third, fourth)
    learned: list[TrainMetrics] = []
    fitness: list[PerEnv] = []
    for number, member in enumerate(members):
        own = own_rows(rows, member=number, num_members=len(members))
        traj = env.rollout(own.env, own.group, member, horizon=cfg.learning.horizon)
        learned.append(learn(traj, member, cfg.learning))
        fitness.append(
            mean_return(
                traj.reward, traj.mask, terminated=traj.terminated, truncated=traj.truncated
            )
        )
    for number, member in enumerate(members):
        following = (number + 1) % len(members)
        learned.append(
            member.inherit(
                members[following],
                fitness=fitness[number],
                rival_fitness=fitness[following],
                mutation=cfg.mutation,
                every=cfg.select_every,
            )
        )
    return tuple(learned)
