"""What players saw, did and earned in the games of a group, as columns of `Trajectories`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class GameColumns:
    """Room for both sides of games, [games, 2, turns, ...], filled turn by turn.

    What a player earns between two turns of its own belongs to the first of them, and what it earns
    before its first turn to none.

    Args:
        num_games: Number of games.
        max_turns: Turns of a player in the longest game.
        num_features: Numbers of an observation.
        num_choices: What can be chosen from.

    Attributes:
        turns: i64[games, 2]: how many each side has had.
        earned: f64[games, 2]: all that each has earned.
    """

    def __init__(self, num_games: int, max_turns: int, num_features: int, num_choices: int) -> None:
        shape = (num_games, 2, max_turns)
        self.turns = np.zeros(shape[:2], np.int64)
        self.earned = np.zeros(shape[:2], np.float64)
        self._max_turns = max_turns
        self._columns: dict[str, NDArray[Any]] = {
            "obs": np.zeros((*shape, num_features), np.float32),
            "last_obs": np.zeros((num_games, 2, num_features), np.float32),
            "action": np.zeros((*shape, 1), np.float32),
            "action_mask": np.ones((*shape, num_choices), np.bool_),
            "behavior_logprob": np.zeros(shape, np.float32),
            "reward": np.zeros(shape, np.float32),
            "terminated": np.zeros(shape, np.bool_),
            "truncated": np.zeros(shape, np.bool_),
            "mask": np.zeros(shape, np.bool_),
            "recurrent_state": np.zeros((num_games, 2, 0), np.float32),  # players begin with none
        }

    def has_room(self, turn: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool[games]: whether the side to move, i64[games], may have another turn."""
        return self.turns[np.arange(len(turn)), turn] < self._max_turns

    def add(self, moved: NDArray[np.bool_], side: int, **shown: NDArray[Any]) -> None:
        """One more turn of a side in some games.

        Args:
            moved: bool[games]: which.
            side: Whose turn it was.
            shown: Columns [games, ...] about it.
        """
        at = self.turns[moved, side]
        for name, column in shown.items():
            self._columns[name][moved, side, at] = column[moved]
        self._columns["mask"][moved, side, at] = True
        self.turns[moved, side] += 1

    def add_reward(self, reward: NDArray[np.float32]) -> None:
        """Give both sides what a move earned them, f32[games, 2]; 0 where nobody moved."""
        self.earned += reward
        game, side = np.nonzero((reward != 0) & (self.turns > 0))
        self._columns["reward"][game, side, self.turns[game, side] - 1] += reward[game, side]

    def end(self, cut: NDArray[np.bool_], left: NDArray[np.float32] | None) -> None:
        """End all games, with the last turn that each side has had.

        Args:
            cut: bool[games, 2]: sides for which it would have gone on.
            left: f32[games, 2, features]: how each side sees the state these were left in; None
                if there are none. It stands where an environment shows it that resets.
        """
        game, side = np.nonzero(self.turns)
        last = self.turns[game, side] - 1
        self._columns["terminated"][game, side, last] = ~cut[game, side]
        self._columns["truncated"][game, side, last] = cut[game, side]
        if left is None:
            return
        self._columns["last_obs"][cut] = left[cut]
        game, side = np.nonzero((self.turns < self._max_turns) & cut)
        self._columns["obs"][game, side, self.turns[game, side]] = left[game, side]

    def rows(self, numbers: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Columns of `Trajectories`: two rows for each game, of which `numbers` are, i64[games]."""
        env = np.stack([2 * numbers, 2 * numbers + 1], axis=1)
        return {
            name: column.reshape(2 * len(numbers), *column.shape[2:])
            for name, column in {"env": env, **self._columns}.items()
        }
