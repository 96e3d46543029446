"""Environments of several agents who share their reward: rows are agents.

Such an environment is one of Gymnasium's whose observations are [agents, features] and whose
actions are one choice for each agent (`MultiDiscrete`, all of one size). Here its agents are pulled
apart: agent a of environment n is row `n * num_agents + a`. They begin and end episodes together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from ...algorithms.roles.environment import ActionSpace
from ...dataflow.errors import ConfigError
from .group import EnvGroup, Failure, Stepped


class CountsAgents(gym.Wrapper[Any, Any, Any, Any]):
    """An environment that must show as many agents as it says.

    Args:
        env: The environment.
        num_agents: Number of agents.
    """

    def __init__(self, env: gym.Env[Any, Any], num_agents: int) -> None:
        super().__init__(env)
        self._num_agents = num_agents

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """See `gymnasium.Env.reset`.

        Raises:
            ValueError: If there are more or fewer agents.
        """
        obs, info = self.env.reset(**options)
        return self._counted(obs), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """See `gymnasium.Env.step`; raises as `reset`."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._counted(obs), reward, terminated, truncated, info

    def _counted(self, obs: Any) -> Any:
        if len(obs) != self._num_agents:
            raise ValueError(f"showed {len(obs)} agents, where {self._num_agents} take part")
        return obs


class TeamGroup:
    """An `EnvGroup` of agents. One environment that fails gives up the episode of all its agents.

    Args:
        teams: The environments.
        num_agents: Agents of each environment.
        actions: What one agent can do.
    """

    def __init__(self, teams: EnvGroup, num_agents: int, actions: ActionSpace) -> None:
        self._teams, self._num_agents = teams, num_agents
        self.num_envs = teams.num_envs * num_agents
        self.num_features = teams.num_features // num_agents
        self.actions = actions
        self.failures: list[Failure] = []

    def start(self) -> NDArray[np.float32]:
        """See `EnvGroup.start`."""
        obs = self._teams.start()
        self._note_failures(0)
        return self._agents(obs)

    def step(self, action: NDArray[np.float32]) -> Stepped:
        """See `EnvGroup.step`."""
        if not self.failures:
            self._teams.failures.clear()
        before = len(self._teams.failures)
        obs, reward, *over = self._teams.step(action.reshape(self._teams.num_envs, -1))
        self._note_failures(before)
        terminated, truncated = (np.repeat(flag, self._num_agents) for flag in over)
        return Stepped(
            self._agents(obs), np.repeat(reward, self._num_agents), terminated, truncated
        )

    def _agents(self, obs: NDArray[np.float32]) -> NDArray[np.float32]:
        return obs.reshape(self.num_envs, self.num_features)

    def _note_failures(self, before: int) -> None:
        agents = range(self._num_agents)
        for said, rows in self._teams.failures[before:]:
            each = (row * self._num_agents + agent for row in rows for agent in agents)
            self.failures.append(Failure(said, tuple(each)))

    def action_mask(self) -> NDArray[np.bool_] | None:
        """See `EnvGroup.action_mask`."""
        mask = self._teams.action_mask()
        return None if mask is None else mask.reshape(self.num_envs, -1)

    def seed_of(self, index: int) -> int:
        """See `EnvGroup.seed_of`."""
        return self._teams.seed_of(index // self._num_agents)

    def state(self) -> dict[str, Any]:
        """See `EnvGroup.state`."""
        return self._teams.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `EnvGroup.restore`."""
        self._teams.restore(state)

    def close(self) -> None:
        """See `EnvGroup.close`."""
        self._teams.close()


def agent_spaces(
    num_features: int, actions: ActionSpace, num_agents: int, name: str
) -> tuple[int, ActionSpace]:
    """What one agent of an environment sees and can do.

    Args:
        num_features: Numbers of an observation of all agents together.
        actions: What all agents can do together.
        num_agents: Number of agents.
        name: The environment's, for the message.

    Raises:
        ConfigError: If it does not fall into as many equal parts.
    """
    sizes = actions.sizes
    each = len(sizes) // num_agents
    equal = actions.kind == "discrete" and each > 0 and sizes == sizes[:each] * num_agents
    if not equal or num_features % num_agents:
        raise ConfigError(
            f"environment '{name}' shows {num_features} numbers and takes {actions}, which are not "
            f"those of {num_agents} equal agents\n    num_agents must be the environment's; its "
            "observations are [agents, features], its actions one choice for each agent"
        )
    return num_features // num_agents, dataclasses.replace(actions, sizes=sizes[:each])


def team_numbers(numbers: list[int], num_agents: int) -> list[int]:
    """The environments that some rows are the agents of.

    Raises:
        ConfigError: If the agents of one are not all there, next to each other and in order.
    """
    first = numbers[::num_agents]
    expected = [number + agent for number in first for agent in range(num_agents)]
    if numbers != expected or any(number % num_agents for number in first):
        raise ConfigError(
            f"a group of rows {numbers!s:.80} does not hold whole teams of {num_agents} agents\n"
            "    the number of rows, and task.group_size, must be multiples of num_agents"
        )
    return [number // num_agents for number in first]
