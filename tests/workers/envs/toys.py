"""Small environments with one property each, for tests."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

__all__ = ["Bad", "Counting", "Masks", "Recall", "register"]


class Counting(gym.Env[Any, Any]):
    """Shows how many steps its episode has, and a number drawn when it began.

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
        self._steps, self._drawn = 0, 0.0

    def _obs(self) -> Any:
        return np.array([self._steps, self._drawn], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps, self._drawn = 0, float(self.np_random.random())
        return self._obs(), {"action_mask": np.array([True, False, True])}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self._steps += 1
        over = self._steps >= self._length
        mask = {"action_mask": np.array([True, False, True])}
        reward = float(np.sum(action)) if self._truncates else 1.0
        return self._obs(), reward, over and not self._truncates, over and self._truncates, mask


class Bad(Counting):
    """Goes wrong at one step of an episode, if a number drawn when it began is below `share`."""

    def __init__(self, how: str, at: int = 2, share: float = 0.5, length: int = 5) -> None:
        super().__init__(length=length)
        self._how, self._at, self._share = how, at, share

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        if self._steps == self._at and self._drawn < self._share:
            if self._how == "raises":
                raise RuntimeError("out of coffee")
            if self._how == "hangs":
                time.sleep(30)
            obs = {"nan": np.full(2, np.nan, np.float32), "shape": np.zeros(5, np.float32)}.get(
                self._how, obs
            )
            reward = float("nan") if self._how == "reward" else reward
        return obs, reward, terminated, truncated, info


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


def register() -> None:
    """Make them known to Gymnasium under `toys/NAME-v0`."""
    if "toys/Counting-v0" not in gym.registry:
        gym.register("toys/Counting-v0", lambda **options: Counting(**options))
        gym.register("toys/Bad-v0", lambda **options: Bad(**options))
        gym.register("toys/Masks-v0", lambda **options: Masks(**options))
        gym.register("toys/Recall-v0", lambda **options: Recall(**options))
