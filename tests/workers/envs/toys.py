"""Small environments with one property each, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv, CartPoleVectorEnv


def damage(how: str, row: Any, obs: Any, reward: Any, seconds: float = 30.0) -> tuple[Any, Any]:
    """What one of several environments makes of what they show if it goes wrong."""
    if how == "raises":
        raise RuntimeError("out of coffee")
    if how == "hangs":
        time.sleep(seconds)
    if how == "shape":
        return obs[:, :3], reward
    if how == "few":
        return obs, reward[1:]
    obs, reward = obs.astype(np.float32), reward.astype(np.float32)
    obs[row] = np.nan if how == "nan" else obs[row]
    reward[row] = np.inf if how == "reward" else reward[row]
    return obs, reward


class Counting(gym.Env[Any, Any]):
    """Shows how many steps its episode has, and a number sampled when it began.

    Episodes terminate after `length` steps, or are truncated there.
    """

    def __init__(
        self, length: int = 3, *, truncates: bool = False, actions: str = "discrete"
    ) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space: Any = {
            "discrete": spaces.Discrete(3),
            "multi": spaces.MultiDiscrete([2, 3]),
            "continuous": spaces.Box(-1.0, 1.0, (2,), np.float32),
            "text": spaces.Text(3),
        }[actions]
        self._length, self._truncates = length, truncates
        self._steps, self._random = 0, 0.0

    def _obs(self) -> Any:
        return np.array([self._steps, self._random], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps, self._random = 0, float(self.np_random.random())
        return self._obs(), {"action_mask": np.array([True, False, True])}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self._steps += 1
        over = self._steps >= self._length
        mask = {"action_mask": np.array([True, False, True])}
        reward = float(np.sum(action)) if self._truncates else 1.0
        return self._obs(), reward, over and not self._truncates, over and self._truncates, mask


class Bad(Counting):
    """Goes wrong at one step of an episode, if a number sampled when it began is below `share`."""

    def __init__(self, how: str, at: int = 2, share: float = 0.5, length: int = 5) -> None:
        super().__init__(length=length)
        self._how, self._at, self._share = how, at, share

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        if self._steps == self._at and self._random < self._share:
            if self._how == "raises":
                raise RuntimeError("out of coffee")
            if self._how == "hangs":
                time.sleep(30)
            obs = {"nan": np.full(2, np.nan, np.float32), "shape": np.zeros(5, np.float32)}.get(
                self._how, obs
            )
            reward = float("nan") if self._how == "reward" else reward
        return obs, reward, terminated, truncated, info


class BadCartPoles(CartPoleVectorEnv):
    """Gymnasium's numpy object. One environment goes wrong at one step since it was made or begun.

    It does if a number sampled when it began is below `share`; one that hangs does for `seconds`.
    To make it takes `making_s`.
    """

    num_open = 0

    def __init__(
        self,
        how: str = "nan",
        at: int = 5,
        share: float = 1.1,
        row: int = 1,
        seconds: float = 30.0,
        making_s: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        time.sleep(making_s)
        self._how, self._at, self._share, self._row = how, at, share, row
        self._seconds, self._goes = seconds, lambda: self._random < self._share
        BadCartPoles.num_open += 1

    def close(self, **options: Any) -> None:
        BadCartPoles.num_open -= 1
        super().close(**options)
        self._random, self._taken = 0.0, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        found = super().reset(seed=seed, options=options)
        self._random, self._taken = float(self.np_random.random()), 0
        return found if self._at or not self._goes() else (found[0] * np.nan, {})

    def step(self, action: Any) -> Any:
        obs, reward, *rest = super().step(action)
        self._taken += 1
        if self._taken == self._at and self._goes():
            obs, reward = damage(self._how, self._row, obs, reward, self._seconds)
        return obs, reward, *rest


class Recall(gym.Env[Any, Any]):
    """Shows which of two choices is right when an episode begins, and asks `delay` steps later.

    The last action earns 1 if it is the right one; whoever cannot remember earns 0.5 on average.
    """

    def __init__(self, delay: int = 3) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._delay, self._steps, self._right = delay, 0, 0

    def _obs(self) -> Any:
        cue = 0.0 if self._steps else 2.0 * self._right - 1.0
        return np.array([cue, float(self._steps == self._delay)], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps, self._right = 0, int(self.np_random.integers(2))
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        over = self._steps == self._delay
        self._steps += 1
        return self._obs(), float(over and action == self._right), over, False, {}


class Masks(Counting):
    """Says by a method what is allowed, nothing at the end, and fails to after `at` steps."""

    def __init__(self, at: int = 10**9, length: int = 3) -> None:
        super().__init__(length=length)
        self._at = at

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        obs, _ = super().reset(seed=seed)
        return obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return *super().step(action)[:-1], {}

    def action_masks(self) -> Any:
        if self._steps == self._at:
            raise RuntimeError("out of tea")
        return np.full(3, self._steps < self._length)


def register(**kinds: Callable[..., Any]) -> None:
    """Make them known to Gymnasium as `toys/NAME-v0`."""
    for name, kind in kinds.items():
        if f"toys/{name}-v0" not in gym.registry:
            gym.register(f"toys/{name}-v0", partial(kind))


def register_all() -> None:
    register(Counting=Counting, Bad=Bad, Masks=Masks, Recall=Recall, Worldly=Worldly)
    if "toys/BadCartPoles-v0" not in gym.registry:
        gym.register(
            "toys/BadCartPoles-v0",
            lambda **options: CartPoleEnv(),
            vector_entry_point=lambda **options: BadCartPoles(**options),
        )


class Worldly(Counting):
    """Its episodes depend on more than their seed and actions."""

    def __init__(self, on: str) -> None:
        super().__init__(length=4)
        self._on, self._episodes = on, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        found = super().reset(seed=seed)
        self._episodes += 1
        return found

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, *over, info = super().step(action)
        if self._on == "global":
            obs[1] = np.random.random()  # noqa: NPY002 - what it is to be caught with
        if self._on == "episodes":
            reward += self._episodes
        return obs, reward, over[0], over[1], info


register_all()  # in whatever process imports this, too
