"""Evaluation in environments: play whole held-out episodes. Trains nothing.

A graph of its own on the workers of another: environments and actor have the same names and are the
same workers.
"""

from __future__ import annotations

from ..dataflow.options import PositiveInt, option_class
from .roles.environment import Actor, Env, EnvRows, PerEnv


@option_class
class EnvEvaluation:
    """Options of evaluation in environments."""

    num_episodes: PositiveInt = 1
    """Episodes of every environment."""
    max_episode_steps: PositiveInt = 10_000
    """An episode that is longer counts with what was earned by then."""


def env_evaluate_step(rows: EnvRows, env: Env, actor: Actor, cfg: EnvEvaluation) -> PerEnv:
    """What an actor earns for an episode in each environment."""
    return env.evaluate(
        rows.env,
        rows.group,
        actor,
        num_episodes=cfg.num_episodes,
        max_episode_steps=cfg.max_episode_steps,
    )
