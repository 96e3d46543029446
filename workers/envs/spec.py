"""The specification of an environment, its groups, and whether they go on as they would have."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import field
from importlib import import_module
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from ...algorithms.roles.environment import ActionSpace
from ...dataflow.errors import ConfigError, StateError, WorkerError, one_process
from ...dataflow.options import NonNegativeInt, PositiveFloat, PositiveInt, option_class
from .group import (
    EnvGroup,
    Failure,
    Members,
    StepAlarm,
    Stepped,
    action_space,
    described,
    num_features,
)
from .live import Normalization
from .loop import LoopGroup
from .native import NativeGroup, native_spaces
from .pool import PoolGroup, pool_spaces


class CountsAgents(gym.Wrapper[Any, Any, Any, Any]):
    """An environment that must show as many agents as it declares."""

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


class TeamGroup(EnvGroup):
    """A group of agents. One environment that fails gives up the episode of all its agents."""

    def __init__(self, teams: EnvGroup, num_agents: int, actions: ActionSpace) -> None:
        self._teams, self._num_agents = teams, num_agents
        self.num_envs = teams.num_envs * num_agents
        self.num_features = teams.num_features // num_agents
        self.actions, self.failures = actions, []

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
    """Agents of one environment, each of them a row."""
    masked: bool = False
    """Whether it says which choices are allowed: `info["action_mask"]`, or a method
    `action_masks`; of EnvPool also `info["legal_action_mask"]`."""
    normalization: Normalization = Normalization()
    """Quantities that are scaled by running moments."""
    step_limit_s: PositiveFloat | None = 10.0
    """Longest time of one step; an environment that takes longer is restarted. None for no limit
    but the engine's."""
    max_restarts: NonNegativeInt = 3
    """Most failures of environments of a group, each with a restart, within one rollout."""

    def __post_init__(self) -> None:
        if self.backend == "envpool" and (self.vectorized is not None or self.num_agents > 1):
            raise ValueError(
                "backend is envpool, which steps groups in a way of its own and has no teams; "
                "leave out vectorized and num_agents, or the backend"
            )

    @one_process()
    def make(self) -> gym.Env[Any, Any]:
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
        members = Members(
            name=self.id,
            options=self.options,
            numbers=numbers,
            seed=seed,
            role=role,
            alarm=alarm,
            masked=self.masked,
            max_restarts=self.max_restarts,
        )
        if self.backend == "envpool":
            return PoolGroup(members)
        if self.num_agents > 1:
            of_one = self.spaces()[1]
            teams = dataclasses.replace(members, numbers=team_numbers(numbers, self.num_agents))
            return TeamGroup(LoopGroup(teams, self.make), self.num_agents, of_one)
        if self._vectorized():
            return NativeGroup(members, number)
        return LoopGroup(members, self.make)

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


_NUM_NOISE = 64  # random numbers for one environment and step; taken again where it takes more
_ROLE = "exactness"


def why_not_exact(spec: EnvSpec, *, num_before: int = 64, num_after: int = 64) -> str | None:
    """Name what differs after a restart, tried with two environments and random actions.

    What is saved of single environments are their seed and actions, and of a vectorized one its
    numbers. Whatever else an environment depends on (a global random generator, a clock, statistics
    over episodes) is lost with its process, and nothing that is read from it says so.
    """
    numbers = list(range(2 * spec.num_agents))
    random = np.random.default_rng(0)
    with StepAlarm(spec.step_limit_s) as alarm:
        first = spec.group(0, numbers, 0, _ROLE, alarm)
        try:
            first.start()
            for _ in range(num_before):
                first.step(_action(first, random.random((len(numbers), _NUM_NOISE))))
            state = json.loads(json.dumps(first.state()))
            noise = random.random((num_after, len(numbers), _NUM_NOISE))
            expected = [_shown(first, one) for one in noise]
        except StateError as error:
            return f"cannot be saved: {error}"
        except WorkerError:
            return None
        finally:
            first.close()
        again = spec.group(0, numbers, 0, _ROLE, alarm)
        try:
            return _difference(again, state, noise, expected)
        finally:
            again.close()


def _difference(
    group: EnvGroup,
    state: Mapping[str, Any],
    noise: NDArray[np.float64],
    expected: list[tuple[bytes, ...]],
) -> str | None:
    try:
        group.restore(state)
        for step, one in enumerate(noise):
            if _shown(group, one) != expected[step]:
                return f"show something else {step + 1} steps after they were saved"
    except StateError as error:
        return f"do not come to where they were: {error}"
    except WorkerError as error:
        return f"fail where they had not: {error}"
    return None


def _shown(group: EnvGroup, noise: NDArray[np.float64]) -> tuple[bytes, ...]:
    """Everything that a step shows, as bytes."""
    mask = group.action_mask()
    found = group.step(_action(group, noise))
    shown = (found.obs, found.reward, found.terminated, found.truncated, mask)
    return tuple(b"" if one is None else np.asarray(one).tobytes() for one in shown)


def _action(group: EnvGroup, noise: NDArray[np.float64]) -> NDArray[np.float32]:
    """Random actions that are allowed, f32[envs, components]."""
    actions, mask = group.actions, group.action_mask()
    found = np.take(noise, np.arange(actions.num_components), axis=1, mode="wrap")
    if mask is not None:
        weight = mask * (np.take(noise, np.arange(mask.shape[1]), axis=1, mode="wrap") + 1.0)
        ends = np.cumsum(actions.sizes)[:-1]
        found = np.stack([one.argmax(1) for one in np.split(weight, ends, axis=1)], axis=1)
    elif actions.kind == "discrete":
        found = np.floor(found * np.array(actions.sizes))
    return found.astype(np.float32)
