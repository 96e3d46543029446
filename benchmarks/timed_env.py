"""CartPole whose steps take a given time, computing or asleep, for `planned_environments.py`."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
from gymnasium.envs.classic_control.cartpole import CartPoleEnv


class TimedCartPole(CartPoleEnv):
    """Takes `step_s` before each step: a core's time if it `computes`, or else it sleeps."""

    def __init__(self, step_s: float, computes: bool, **options: Any) -> None:
        super().__init__(**options)
        self._step_s, self._computes = step_s, computes

    def step(self, action: Any) -> Any:
        """As CartPole, later."""
        if self._computes:
            end_s = time.thread_time() + self._step_s
            while time.thread_time() < end_s:
                pass
        else:
            time.sleep(self._step_s)
        return super().step(action)


def made(**options: Any) -> TimedCartPole:
    """One of them."""
    return TimedCartPole(**options)


gym.register("TimedCartPole-v0", made, max_episode_steps=500)
