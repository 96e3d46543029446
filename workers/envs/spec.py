"""The specification of an environment, and its groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import field
from importlib import import_module
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from ...algorithms.roles.environment import ActionSpace
from ...dataflow.errors import ConfigError, one_process
from ...dataflow.options import NonNegativeInt, PositiveFloat, PositiveInt, option_class
from .alarm import StepAlarm
from .group import EnvGroup, Failure, Stepped, env_seed
from .loop import LoopGroup
from .native import NativeGroup, native_spaces
from .normalization import Normalization
from .pool import PoolGroup, pool_spaces
from .restarts import described
from .spaces import action_space, num_features


class CountsAgents(gym.Wrapper[Any, Any, Any, Any]):
    """An environment that must show as many agents as it declares.

    Args:
        env: The environment.
        num_agents: Number of agents.
    """

    def __init__(self, env: gym.Env[Any, Any], num_agents: int) -> None:
        super().__init__(env)
        self._num_agents = num_agents

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**options)
        return self._counted(obs), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
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
        obs = self._teams.start()
        self._note_failures(0)
        return self._agents(obs)

    def step(self, action: NDArray[np.float32]) -> Stepped:
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
        mask = self._teams.action_mask()
        return None if mask is None else mask.reshape(self.num_envs, -1)

    def seed_of(self, index: int) -> int:
        return self._teams.seed_of(index // self._num_agents)

    def state(self) -> dict[str, Any]:
        return self._teams.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._teams.restore(state)

    def close(self) -> None:
        self._teams.close()


def agent_spaces(
    num_features: int, actions: ActionSpace, num_agents: int, name: str
) -> tuple[int, ActionSpace]:
    """Return what one agent of an environment sees and can do."""
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
    """Return the environments that some rows are the agents of."""
    first = numbers[::num_agents]
    expected = [number + agent for number in first for agent in range(num_agents)]
    if numbers != expected or any(number % num_agents for number in first):
        raise ConfigError(
            f"a group of rows {numbers!s:.80} does not hold whole teams of {num_agents} agents\n"
            "    the number of rows, and task.group_size, must be multiples of num_agents"
        )
    return [number // num_agents for number in first]


@option_class
class EnvSpec:
    """An environment of Gymnasium or EnvPool."""

    id: str
    """Its registered name, `CartPole-v1`, or `module:name` for one that a module registers."""
    backend: Literal["gymnasium", "envpool"] = "gymnasium"
    """The library that makes it. EnvPool computes in threads of its own, which cannot be
    interrupted."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of the environment; of EnvPool also those of the pool, as `num_threads`."""
    vectorized: bool | None = None
    """Step a group as one numpy object (True) or as single environments (False). By default as one
    object if the environment has such a form, which shows and takes the same, and no options."""
    num_agents: PositiveInt = 1
    """Agents of one environment, each of them a row; see `teams`."""
    masked: bool = False
    """Whether it says which choices are allowed: `info["action_mask"]`, or a method
    `action_masks`; of EnvPool also `info["legal_action_mask"]`."""
    normalization: Normalization = Normalization()
    """What is scaled by running moments."""
    step_limit_s: PositiveFloat | None = 10.0
    """Longest time of one step; an environment that takes longer is restarted. None for no limit
    but the engine's."""
    max_restarts: NonNegativeInt = 3
    """How often environments of a group may go wrong, and be restarted, within one rollout."""

    def __post_init__(self) -> None:
        if self.backend == "envpool" and (self.vectorized is not None or self.num_agents > 1):
            raise ValueError(
                "backend is envpool, which steps groups in a way of its own and has no teams; "
                "leave out vectorized and num_agents, or the backend"
            )

    @one_process()
    def make(self) -> gym.Env[Any, Any]:
        """One environment."""
        try:
            made = gym.make(self.id, disable_env_checker=True, **self.options)
        except (gym.error.Error, ImportError, TypeError) as error:
            raise ConfigError(f"environment '{self.id}' cannot be made: {error}") from error
        except Exception as error:
            raise ConfigError(
                f"environment '{self.id}' cannot be made: it {described(error)}"
            ) from error
        return made if self.num_agents == 1 else CountsAgents(made, self.num_agents)

    @one_process()
    def spaces(self) -> tuple[int, ActionSpace]:
        """Numbers of an observation, and what can be done: of one agent."""
        if self.backend == "envpool":
            return pool_spaces(self.id, self.options, masked=self.masked)
        env = self.make()
        if self.num_agents == 1:
            self._vectorized()  # which refuses a form that it does not have
        try:
            found = action_space(env.action_space, self.id, masked=self.masked)
            width = num_features(env.observation_space, self.id)
        finally:
            env.close()
        if self.num_agents == 1:
            return width, found
        return agent_spaces(width, found, self.num_agents, self.id)

    def group(self, number: int, numbers: list[int], seed: int, role: str,
              alarm: StepAlarm) -> EnvGroup:  # fmt: skip
        """Group `number`, of the environments `numbers`."""
        if self.backend == "envpool":
            return PoolGroup(
                self.id,
                numbers,
                seed,
                role,
                self.options,
                alarm=alarm,
                masked=self.masked,
                max_restarts=self.max_restarts,
            )
        if self.num_agents > 1:
            of_one = self.spaces()[1]
            teams = self._loop(team_numbers(numbers, self.num_agents), seed, role, alarm)
            return TeamGroup(teams, self.num_agents, of_one)
        if self._vectorized():
            own = env_seed(seed, role, "group", number)
            return NativeGroup(
                self.id, numbers, own, self.options, alarm=alarm, max_restarts=self.max_restarts
            )
        return self._loop(numbers, seed, role, alarm)

    def _loop(self, numbers: list[int], seed: int, role: str, alarm: StepAlarm) -> LoopGroup:
        return LoopGroup(
            self.id,
            self.make,
            numbers,
            seed,
            role,
            alarm=alarm,
            masked=self.masked,
            max_restarts=self.max_restarts,
        )

    @one_process()
    def _vectorized(self) -> bool:
        module, _, name = self.id.rpartition(":")
        if module:
            import_module(module)  # which registers it
        known = gym.spec(name).vector_entry_point is not None
        if self.vectorized and (not known or self.masked):
            raise ConfigError(
                f"environment '{self.id}' has no vectorized form"
                f"{' with masks' if known else ''}; leave out vectorized=true"
            )
        wanted = self.vectorized
        if wanted is None:
            wanted = known and not self.options and not self.masked
        if not wanted:
            return False
        return gym.spec(name).entry_point is None or self._same_in_both_forms()

    def _same_in_both_forms(self) -> bool:
        """Return whether the vectorized form has the spaces of a single environment."""
        env = self.make()
        alone = env.observation_space, env.action_space
        env.close()
        together = native_spaces(self.id, self.options)
        if alone == together:
            return True
        if self.vectorized is None:
            return False
        raise ConfigError(
            f"environment '{self.id}' is another one in its vectorized form: there it shows "
            f"{together[0]} and takes {together[1]}, and stepped alone it shows {alone[0]} and "
            f"takes {alone[1]}\n    leave out task.vectorized=true; if it is an Atari game, "
            "task.backend=envpool has it with stacked frames"
        )
