"""Gymnasium's spaces as columns: observations laid out flat, actions as numbers.

A discrete action is the index of its choice, counted from 0; a continuous one is a number that is
clipped to what the environment takes. Both are float32 in columns, where indices are exact. Bytes
from 0 to 255, as images have them, are divided by 255.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, iterate
from numpy.typing import NDArray

from ...algorithms.roles.environment import ActionSpace
from ...dataflow.errors import ConfigError
from .group import as_f32


def num_features(space: gym.Space[Any], name: str) -> int:
    """Numbers of an observation laid out flat."""
    leaves = _leaves(space)
    wrong = "have no fixed number of values" if not space.is_np_flattenable else ""
    if any(isinstance(leaf, spaces.Text) for leaf in leaves):
        wrong = "have text in them, whose letters are no quantities"
    elif not wrong and spaces.flatdim(space) == 0:
        wrong = "have no values at all"
    if wrong:
        raise ConfigError(
            f"environment '{name}' shows observations of {space}, which {wrong}\n"
            "    wrap it so that it shows a Box, a Discrete, or a Dict or Tuple of them"
        )
    return spaces.flatdim(space)


def to_features(
    space: gym.Space[Any], *, many: bool = False
) -> Callable[[Any], NDArray[np.float32]]:
    """Return a function from an observation to its numbers, laid out flat."""
    scale = np.concatenate([_scale(leaf) for leaf in _leaves(space)])
    scale = scale[0] if (scale == scale[0]).all() else scale

    def numbers(obs: Any) -> NDArray[np.float32]:
        if isinstance(space, (spaces.Box, spaces.MultiBinary)):
            found = np.asarray(obs)
            return as_f32(found if many else found.reshape(-1))
        if not many:
            return as_f32(np.asarray(spaces.flatten(space, obs)))
        every = iterate(batch_space(space), obs)
        return as_f32(np.stack([np.asarray(spaces.flatten(space, one)) for one in every]))

    return numbers if np.all(scale == 1) else lambda obs: numbers(obs) / scale


def _leaves(space: gym.Space[Any]) -> list[gym.Space[Any]]:
    """Return the parts of nested spaces, in the order of `flatten`."""
    match space:
        case spaces.Dict():
            parts = list(space.spaces.values())
        case spaces.Tuple():
            parts = list(space.spaces)
        case _:
            return [space]
    return [leaf for part in parts for leaf in _leaves(part)]


def _scale(leaf: gym.Space[Any]) -> NDArray[np.float32]:
    """Return what a space's numbers are divided by."""
    image = (
        isinstance(leaf, spaces.Box)
        and leaf.dtype == np.uint8
        and (leaf.low == 0).all()
        and (leaf.high == 255).all()
    )
    return np.full(spaces.flatdim(leaf), 255 if image else 1, np.float32)


def action_space(space: gym.Space[Any], name: str, *, masked: bool = False) -> ActionSpace:
    """Convert a space of actions to the actor's form."""
    match space:
        case spaces.Discrete():
            return ActionSpace("discrete", sizes=(int(space.n),), masked=masked)
        case spaces.MultiDiscrete():
            sizes = tuple(map(int, space.nvec.reshape(-1)))
            return ActionSpace("discrete", sizes=sizes, masked=masked)
        case spaces.MultiBinary():
            return ActionSpace("discrete", sizes=(2,) * int(np.prod(space.shape)), masked=masked)
        case spaces.Box() if (
            np.issubdtype(space.dtype, np.floating) and not masked and np.prod(space.shape)
        ):
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

    It works on one action of an environment, or on those of many at once: they have the shape and
    the type of the space, after that of the many.
    """
    dtype: Any = space.dtype
    shape: Any = space.shape
    match space:
        case spaces.Discrete():
            start = dtype.type(space.start)
            if start == 0:  # nearly always, and a sum takes half of the time
                return lambda action: action[..., 0].astype(dtype)[()]
            return lambda action: action[..., 0].astype(dtype) + start
        case spaces.MultiDiscrete() | spaces.MultiBinary():
            start = np.asarray(getattr(space, "start", 0), dtype)
            return lambda action: action.astype(dtype).reshape((*action.shape[:-1], *shape)) + start
        case spaces.Box():
            low, high = space.low.reshape(-1), space.high.reshape(-1)
            return lambda action: (
                np.clip(action, low, high).astype(dtype).reshape((*action.shape[:-1], *shape))
            )
        case _:
            raise TypeError(f"{space} has no actions as numbers")
