"""A task for teams: agents on a line who must each stand on a mark of their own.

Importing this module registers it as `penstock/Cover-v0`.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray


class Cover(gym.Env[Any, Any]):
    """Places on a line, some of them marked. An agent goes left, stays or goes right.

    All agents earn the share of marks that an agent stands on, so two on one mark are one too many.
    An agent sees its place, where the marks are from there, and where the others are, as parts of
    the line. An episode is cut off after `max_steps`.

    Args:
        num_agents: Agents, and marks.
        width: Places.
        max_steps: Longest episode, in steps.

    Attributes:
        marks: i64[num_agents], from left to right.
        places: i64[num_agents], where the agents are.

    Raises:
        ValueError: If there are fewer places than marks.
    """

    def __init__(self, num_agents: int = 3, width: int = 7, max_steps: int = 12) -> None:
        if not 1 <= num_agents <= width:
            raise ValueError(f"num_agents is {num_agents}, but there are {width} places")
        self._num_agents, self._width, self._max_steps = num_agents, width, max_steps
        shape = (num_agents, 2 * num_agents)
        self.observation_space = gym.spaces.Box(-1.0, 1.0, shape, np.float32)
        self.action_space = gym.spaces.MultiDiscrete([3] * num_agents)
        seat = np.arange(num_agents)
        self._others = (seat[:, None] + seat[None, 1:]) % num_agents

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Sample marks and places."""
        super().reset(seed=seed, options=options)
        self.marks = np.sort(self.np_random.permutation(self._width)[: self._num_agents])
        self.places = self.np_random.integers(self._width, size=self._num_agents)
        self._step = 0
        return self._obs(), {}

    def step(
        self, action: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Move all agents by their choice, of 0, 1 and 2, less one."""
        self.places = np.clip(self.places + action - 1, 0, self._width - 1)
        self._step += 1
        covered = float(np.isin(self.marks, self.places).mean())
        return self._obs(), covered, False, self._step >= self._max_steps, {}

    def _obs(self) -> NDArray[np.float32]:
        own = self.places[:, None]
        marks, others = self.marks[None] - own, self.places[self._others] - own
        return (np.concatenate([own, marks, others], axis=1) / self._width).astype(np.float32)


gym.register("penstock/Cover-v0", entry_point=f"{__name__}:Cover")
