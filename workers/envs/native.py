"""A group stepped by one numpy object, such as Gymnasium's own vector CartPole.

Its state is its numbers: every array, number and text among the object's attributes, and its random
generator. All else about it must be fixed once it is made; what is not is refused when it is saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorWrapper
from numpy.typing import NDArray

from ...algorithms.env_roles import ActionSpace
from ...dataflow.errors import ConfigError, StateError
from .alarm import StepAlarm
from .attributes import can_save, copied, from_json, same, to_json
from .group import Stepped, closed_on_error, flat_rows, step_together
from .spaces import action_space, from_columns, num_features

__all__ = ["NativeGroup"]

_NOT_SAVED = ("_np_random", "env")
"""Attributes that are saved otherwise: the random generator, and what a wrapper is around."""


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
        with closed_on_error(made.close):
            mode = made.metadata.get("autoreset_mode")
            if mode is not AutoresetMode.NEXT_STEP:
                raise ConfigError(
                    f"vector environment '{env_id}' resets by {mode}; expected NEXT_STEP\n"
                    "    set vectorized=false to step single environments"
                )
            self.num_features = num_features(made.single_observation_space, env_id)
            self.actions: ActionSpace = action_space(made.single_action_space, env_id)
        self.num_envs = num_envs
        self.num_agents = 1
        self.failures: list[tuple[int, int, str]] = []
        self._take = from_columns(made.single_action_space)
        self._fixed = [
            {name: copied(value) for name, value in vars(layer).items() if not can_save(value)}
            for layer in self._layers()
        ]

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
        """See `EnvGroup.state`.

        Raises:
            StateError: If something has changed that cannot be saved.
        """
        *wrappers, values = [
            self._saved(vars(layer), fixed)
            for layer, fixed in zip(self._layers(), self._fixed, strict=True)
        ]
        random = self._env.unwrapped.np_random.bit_generator.state
        return {"values": values, "wrappers": wrappers, "random": random}

    def _layers(self) -> list[Any]:
        """The object that steps all, last, and what it is wrapped in."""
        layers = [self._env]
        while isinstance(layers[-1], VectorWrapper):
            layers.append(layers[-1].env)
        return layers

    def _saved(self, now: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in now.items():
            if can_save(value):
                values[name] = to_json(value)
            elif name not in _NOT_SAVED and not (name in fixed and same(value, fixed[name])):
                raise StateError(
                    f"{self._named()} cannot be saved: attribute '{name}', a "
                    f"{type(value).__name__}, has changed since they were made, and only arrays, "
                    "numbers and texts are saved\n"
                    "    set task.vectorized=false to step single environments"
                )
        return values

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `EnvGroup.restore`."""
        self._env.reset(seed=self._seed)  # makes the generator
        layers = self._layers()
        all_values = [*state.get("wrappers", []), state["values"]]
        if len(all_values) != len(layers):
            self._refuse(f"they have {len(layers) - 1} wrappers, and had {len(all_values) - 1}")
        for layer, values in zip(layers, all_values, strict=True):
            for name, value in values.items():
                if name not in vars(layer):
                    self._refuse(f"they have no attribute '{name}'")
                setattr(layer, name, from_json(value))
        generator = self._env.unwrapped.np_random.bit_generator
        if generator.state["bit_generator"] != state["random"]["bit_generator"]:
            self._refuse(f"their random generator was a {state['random']['bit_generator']}")
        generator.state = dict(state["random"])

    def _refuse(self, what: str) -> NoReturn:
        raise StateError(
            f"{self._named()} do not come to where they were when they were saved: {what}; they "
            "may be of another version"
        )

    def close(self) -> None:
        """See `EnvGroup.close`."""
        self._env.close()
