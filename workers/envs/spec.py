"""Which environment, and how groups of it are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

import gymnasium as gym

from ...algorithms.roles.environment import ActionSpace
from ...dataflow.errors import ConfigError, one_process
from ...dataflow.option_checks import check_range
from .alarm import StepAlarm
from .group import EnvGroup, env_seed
from .loop import LoopGroup
from .native import NativeGroup, native_spaces
from .normalization import Normalization
from .pool import PoolGroup, pool_spaces
from .restarts import described
from .spaces import action_space, num_features
from .teams import CountsAgents, TeamGroup, agent_spaces, team_numbers


@dataclass(frozen=True, kw_only=True)
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
    num_agents: int = 1
    """Agents of one environment, each of them a row; see `teams`."""
    masked: bool = False
    """Whether it says which choices are allowed: `info["action_mask"]`, or a method
    `action_masks`; of EnvPool also `info["legal_action_mask"]`."""
    normalization: Normalization = Normalization()
    """What is scaled by running moments."""
    step_limit_s: float | None = 10.0
    """Longest time of one step; an environment that takes longer is restarted. None for no limit
    but the engine's."""
    max_restarts: int = 3
    """How often environments of a group may go wrong, and be restarted, within one rollout."""

    def __post_init__(self) -> None:
        check_range(self, "step_limit_s", above=0)
        check_range(self, "max_restarts", at_least=0)
        check_range(self, "num_agents", at_least=1)
        if self.backend == "envpool" and (self.vectorized is not None or self.num_agents > 1):
            raise ValueError(
                "backend is envpool, which steps groups in a way of its own and has no teams; "
                "leave out vectorized and num_agents, or the backend"
            )

    @one_process()
    def make(self) -> gym.Env[Any, Any]:
        """One environment.

        Raises:
            ConfigError: If there is none of that name, or it cannot be made.
        """
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
        """Numbers of an observation, and what can be done: of one agent.

        Raises:
            ConfigError: If no actor of ours can act in it, or it has another number of agents.
        """
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
        """Group `number`, of the environments `numbers`.

        Args:
            number: Number of the group, unique in the run.
            numbers: Numbers of its environments, unique in the run.
            seed: The run's.
            role: The role whose environments they are.
            alarm: Limits the time of a step.

        Raises:
            ConfigError: If the environment has no vectorized form and was asked for it, or a team
                is not whole.
        """
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
        """Whether the vectorized form shows and takes what an environment does by itself.

        Raises:
            ConfigError: If it does not, and was asked for.
        """
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
