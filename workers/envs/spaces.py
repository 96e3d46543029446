"""Gymnasium's spaces as columns: observations laid out flat, actions as numbers.

A discrete action is the index of its choice, counted from 0; a continuous one is a number that is
clipped to what the environment takes. Both are float32 in columns, where indices are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ...algorithms.roles.environment import ActionSpace
from ...dataflow.errors import ConfigError


def num_features(space: gym.Space[Any], name: str) -> int:
    """Numbers of an observation laid out flat.

    Raises:
        ConfigError: If it has no fixed number of them.
    """
    if not space.is_np_flattenable:
        raise ConfigError(
            f"environment '{name}' shows observations of {space}, which have no fixed number of "
            "values\n    wrap it so that it shows a Box, a Discrete, or a Dict or Tuple of them"
        )
    return spaces.flatdim(space)


def to_features(space: gym.Space[Any]) -> Callable[[Any], NDArray[np.float32]]:
    """A function from one observation to f32[features]."""
    if isinstance(space, spaces.Box):
        return lambda obs: np.asarray(obs, dtype=np.float32).reshape(-1)
    return lambda obs: np.asarray(spaces.flatten(space, obs), dtype=np.float32)


def action_space(space: gym.Space[Any], name: str, *, masked: bool = False) -> ActionSpace:
    """What can be done, as the actor needs to know it.

    Args:
        space: The space of a single environment.
        name: The environment's, for the message.
        masked: Whether it says which choices are allowed.

    Raises:
        ConfigError: If no actor of ours can act in it.
    """
    match space:
        case spaces.Discrete():
            return ActionSpace("discrete", sizes=(int(space.n),), masked=masked)
        case spaces.MultiDiscrete() if space.nvec.ndim == 1:
            return ActionSpace("discrete", sizes=tuple(map(int, space.nvec)), masked=masked)
        case spaces.MultiBinary():
            return ActionSpace("discrete", sizes=(2,) * int(np.prod(space.shape)), masked=masked)
        case spaces.Box() if np.issubdtype(space.dtype, np.floating) and not masked:
            low, high = space.low.reshape(-1), space.high.reshape(-1)
            return ActionSpace(
                "continuous", low=tuple(map(float, low)), high=tuple(map(float, high))
            )
        case _:
            raise ConfigError(
                f"environment '{name}' takes actions of {space}"
                f"{', some of them invalid' if masked else ''}, which no actor here can give\n"
                "    wrap it so that it takes Discrete, MultiDiscrete, MultiBinary or a Box of "
                "floats"
            )


def from_columns(space: gym.Space[Any]) -> Callable[[NDArray[np.float32]], Any]:
    """A function from the actions f32[..., components] of a column to what environments take.

    It works on one action of an environment, or on those of many at once.
    """
    match space:
        case spaces.Discrete():
            start = int(space.start)
            if start == 0:  # nearly always, and a sum takes half of the time
                return lambda action: action[..., 0].astype(np.int64)[()]
            return lambda action: action[..., 0].astype(np.int64) + start
        case spaces.MultiDiscrete() | spaces.MultiBinary():
            dtype, start = space.dtype, getattr(space, "start", 0)
            return lambda action: action.astype(dtype) + start
        case spaces.Box():
            low, high, shape = space.low.reshape(-1), space.high.reshape(-1), space.shape
            dtype = space.dtype
            return lambda action: (
                np.clip(action, low, high).astype(dtype).reshape(*action.shape[:-1], *shape)
            )
        case _:
            raise TypeError(f"{space} has no actions as numbers")
