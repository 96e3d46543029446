"""A group stepped by one numpy object, such as Gymnasium's own vector CartPole.

Its state is its numbers: every array and number among the object's attributes, and its random
generator. All else about it must be fixed once it is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from ...algorithms.env_roles import ActionSpace
from ...dataflow.errors import ConfigError
from .alarm import StepAlarm
from .group import Stepped, flat_rows, step_together
from .spaces import action_space, from_columns, num_features

__all__ = ["NativeGroup"]


class NativeGroup:
    """An `EnvGroup` of one vector environment.

    Args:
        env_id: Gymnasium's name of it.
        num_envs: How many.
        seed: Of its random generator.
        options: Keyword arguments of the environment.
        alarm: Limits the time of a step; entered by whoever steps.

    Raises:
        ConfigError: If its observations or actions are not numbers, or it resets otherwise.
    """

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        seed: int,
        options: Mapping[str, Any] | None = None,
        *,
        alarm: StepAlarm,
    ) -> None:
        self._id, self._seed, self._alarm = env_id, seed, alarm
        made: Any = gym.make_vec(
            env_id, num_envs, vectorization_mode="vector_entry_point", **(options or {})
        )
        self._env: Any = made
        mode = made.metadata.get("autoreset_mode")
        if mode is not AutoresetMode.NEXT_STEP:
            raise ConfigError(
                f"vector environment '{env_id}' resets by {mode}; expected NEXT_STEP\n"
                "    set vectorized=false to step single environments"
            )
        self.num_envs = num_envs
        self.num_features = num_features(made.single_observation_space, env_id)
        self.actions: ActionSpace = action_space(made.single_action_space, env_id)
        self.num_agents = 1
        self.failures: list[tuple[int, int, str]] = []
        self._take = from_columns(made.single_action_space)

    def start(self) -> NDArray[np.float32]:
        """See `EnvGroup.start`."""
        obs, _ = self._env.reset(seed=self._seed)
        return self._flat(obs)

    def step(self, action: NDArray[np.float32]) -> Stepped:
        """See `EnvGroup.step`."""
        obs, reward, terminated, truncated, _ = step_together(
            self._named, self._alarm, lambda: self._env.step(self._take(action))
        )
        return Stepped(self._flat(obs), reward, terminated, truncated)

    def _named(self) -> str:
        return f"environments '{self._id}' (seed {self._seed})"

    def _flat(self, obs: NDArray[np.float32]) -> NDArray[np.float32]:
        return flat_rows(self._named, obs, self.num_envs, self.num_features)

    def action_mask(self) -> None:
        """Everything is always allowed."""

    def seed_of(self, index: int) -> int:
        """That of the whole group."""
        del index
        return self._seed

    def state(self) -> dict[str, Any]:
        """See `EnvGroup.state`."""
        unwrapped = self._env.unwrapped
        values: dict[str, Any] = {}
        for name, value in vars(unwrapped).items():
            if isinstance(value, np.ndarray):
                values[name] = {"dtype": value.dtype.str, "shape": value.shape,
                                "values": value.reshape(-1).tolist()}  # fmt: skip
            elif isinstance(value, (bool, int, float)):
                values[name] = value
        return {"values": values, "random": unwrapped.np_random.bit_generator.state}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `EnvGroup.restore`."""
        unwrapped = self._env.unwrapped
        self._env.reset(seed=self._seed)  # makes the generator
        for name, value in state["values"].items():
            if isinstance(value, dict):
                value = np.array(value["values"], dtype=value["dtype"]).reshape(value["shape"])
            setattr(unwrapped, name, value)
        unwrapped.np_random.bit_generator.state = dict(state["random"])

    def close(self) -> None:
        """See `EnvGroup.close`."""
        self._env.close()
