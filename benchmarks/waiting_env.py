"""CartPole whose steps take time without computing, as a simulator's on another machine do."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

STEP_S = 5e-4


class WaitingCartPole(CartPoleEnv):
    """Waits `STEP_S` before each step."""

    def step(self, action: Any) -> Any:
        """As CartPole, later."""
        time.sleep(STEP_S)
        return super().step(action)


def made(**options: Any) -> WaitingCartPole:
    """One of them."""
    return WaitingCartPole(**options)


gym.register("WaitingCartPole-v0", made, max_episode_steps=500)
