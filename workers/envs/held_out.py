"""Held-out episodes: what an actor earns in environments that nobody learns in.

Every evaluation of a run plays the same episodes with the same noise, in new environments, and
leaves no trace: what comes after is the same with and without it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ...algorithms.roles.environment import Actor
from ...dataflow.errors import WorkerError
from ...dataflow.graph.role import Metric
from .live import LiveGroup

PIECE = 128
"""Steps between looks at whether all episodes are over."""

MAX_GIVEN_UP = 8
"""Episodes in a row that one environment may give up."""


class Episodes:
    """The first episodes of every environment of a group.

    Args:
        num_envs: Environments.
        num_episodes: Number of episodes of each that count.
        max_steps: An episode that is longer counts with what was earned by then, and no other
            follows in its environment.

    Attributes:
        total: f64[envs], what was earned in those that are over.
        length: i64[envs], steps of them.
        count: i64[envs], how many are over.
        given_up: i64[envs], how many were given up since the last that was not.
        restarts: Environments that had to be restarted.
    """

    def __init__(self, num_envs: int, num_episodes: int, max_steps: int) -> None:
        self.total = np.zeros(num_envs)
        self.length = np.zeros(num_envs, np.int64)
        self.count = np.zeros(num_envs, np.int64)
        self.given_up = np.zeros(num_envs, np.int64)
        self.restarts = 0
        self._left, self._max_steps = np.full(num_envs, num_episodes), max_steps
        self._earned = np.zeros(num_envs)
        self._steps = np.zeros(num_envs, np.int64)

    @property
    def over(self) -> bool:
        """Whether nothing that may come counts."""
        return not self._left.any()

    def add(
        self,
        reward: NDArray[np.float32],
        mask: NDArray[np.bool_],
        ended: NDArray[np.bool_],
        failed: NDArray[np.bool_],
    ) -> None:
        """Take in steps of all environments, [envs, steps].

        Args:
            reward: The reward of each step.
            mask: False on those of resets.
            ended: True on the last step of an episode.
            failed: True on the step after it if the episode was given up, which does not count.
        """
        given_up = np.zeros_like(failed)
        given_up[:, :-1] = failed[:, 1:]
        ended = ended & ~given_up
        for step in range(reward.shape[1]):
            self._give_up(failed[:, step])
            counts = mask[:, step] & (self._left > 0)
            self._earned[counts] += reward[counts, step]
            self._steps += counts
            over = counts & ended[:, step]
            long = counts & ~over & (self._steps >= self._max_steps)
            self._close(over | long)
            self._left[long] = 0

    def metrics(self) -> dict[str, Metric]:
        """Return and length of the episodes that are over, their number, and restarts."""
        count = float(self.count.sum())
        return {
            "episode_return": Metric.mean(float(self.total.sum()), count),
            "episode_length": Metric.mean(float(self.length.sum()), count),
            "episodes": Metric.sum(count),
            "env_restarts": Metric.sum(float(self.restarts)),
        }

    def _close(self, over: NDArray[np.bool_]) -> None:
        self.total[over] += self._earned[over]
        self.length[over] += self._steps[over]
        self.count[over] += 1
        self.given_up[over] = 0
        self._left[over] -= 1
        self._earned[over], self._steps[over] = 0.0, 0

    def _give_up(self, failed: NDArray[np.bool_]) -> None:
        failed = failed & (self._left > 0)
        self.given_up[failed] += 1
        self._earned[failed], self._steps[failed] = 0.0, 0


def play(
    live: LiveGroup,
    actor: Actor,
    noise: Callable[[int], NDArray[np.float64]],
    *,
    num_episodes: int,
    max_episode_steps: int,
) -> Episodes:
    """Play the first episodes of a group that has begun.

    Args:
        live: The group; its rewards as they are.
        actor: The actor.
        noise: For piece 0, 1, ... f64[PIECE, envs, components].
        num_episodes: Episodes of every environment.
        max_episode_steps: Longest episode, in steps.

    Raises:
        WorkerError: See `EnvWorker.rollout`. Or an environment gave up too many in a row.
    """
    found, piece = Episodes(len(live.numbers), num_episodes, max_episode_steps), 0
    while not found.over:
        part = live.roll(actor, noise(piece))
        ended = part["terminated"] | part["truncated"]
        found.add(part["reward"], part["mask"], ended, live.given_up(PIECE))
        restarts = live.restarts()
        found.restarts += len(restarts)
        if found.given_up.max(initial=0) >= MAX_GIVEN_UP:
            index = int(found.given_up.argmax())
            own = [said for said in restarts if said.startswith(live.named(index))]
            raise WorkerError(
                f"{live.named(index)} gave up {found.given_up[index]} held-out episodes in a row; "
                f"last of all, {(own or restarts)[-1]}"
            )
        piece += 1
    return found
