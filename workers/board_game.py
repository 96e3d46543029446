"""Games of two players who place stones in turn: tic-tac-toe, connect four, and their like.

All games of a group are played side by side with numpy. A game is seen by whose turn it is: own
stones, then the other's, 1 where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..algorithms.env_roles import ActionSpace, Actor, Trajectories
from ..algorithms.game_roles import BoardGame, GameRows
from ..dataflow.context import call_key
from ..dataflow.errors import WorkerError
from ..dataflow.ranges import check_range
from ..dataflow.role import Metric, add_metrics
from ..dataflow.worker import WorkerContext
from .sampling import row_uniforms, stream_key

__all__ = ["CONNECT_FOUR", "TIC_TAC_TOE", "BoardGameWorker", "BoardSpec", "GameRowSource"]


@dataclass(frozen=True, kw_only=True)
class BoardSpec:
    """Rules of a game, and the recipe for who keeps them."""

    height: int = 3
    """Rows of the board."""
    width: int = 3
    """Columns of the board."""
    in_line: int = 3
    """Stones in a line, straight or diagonal, that win."""
    gravity: bool = False
    """A stone falls to the lowest free place of a column, and a choice is a column; else a choice
    is a place."""

    def __post_init__(self) -> None:
        check_range(self, "height", "width", "in_line", at_least=1)
        check_range(self, "in_line", at_most=max(self.height, self.width))

    @property
    def num_places(self) -> int:
        """Places of the board: the longest game, in moves."""
        return self.height * self.width

    @property
    def actions(self) -> ActionSpace:
        """One choice, of which some are not allowed."""
        choices = self.width if self.gravity else self.num_places
        return ActionSpace("discrete", sizes=(choices,), masked=True)

    def spaces(self) -> tuple[int, ActionSpace]:
        """Numbers of an observation, and what can be done."""
        return 2 * self.num_places, self.actions

    def lines(self) -> NDArray[np.int64]:
        """The places of every line that wins, i64[lines, in_line]."""
        found: list[list[int]] = []
        for row in range(self.height):
            for column in range(self.width):
                for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
                    last_row = row + down * (self.in_line - 1)
                    last_column = column + right * (self.in_line - 1)
                    if last_row < self.height and 0 <= last_column < self.width:
                        found.append(
                            [
                                (row + down * i) * self.width + column + right * i
                                for i in range(self.in_line)
                            ]
                        )
        return np.array(found, dtype=np.int64)

    def build(self, context: WorkerContext) -> BoardGameWorker:
        """Make the worker; it keeps nothing from call to call."""
        return BoardGameWorker(self, context)


TIC_TAC_TOE = BoardSpec()
CONNECT_FOUR = BoardSpec(height=6, width=7, in_line=4, gravity=True)


class Boards:
    """Games that stand at the same move. Stones are bool[games, 2, places]: those to move, others.

    Args:
        spec: The rules.
        num_games: How many.
    """

    def __init__(self, spec: BoardSpec, num_games: int) -> None:
        self._spec, self._lines = spec, spec.lines()
        self.stones: NDArray[np.bool_] = np.zeros((num_games, 2, spec.num_places), np.bool_)
        self.over: NDArray[np.bool_] = np.zeros(num_games, np.bool_)

    def obs(self) -> NDArray[np.float32]:
        """f32[games, 2 * places], as who is to move sees them."""
        return self.stones.reshape(len(self.stones), -1).astype(np.float32)

    def allowed(self) -> NDArray[np.bool_]:
        """bool[games, choices]; all of them where the game is over, as some choice must be."""
        free = ~np.any(self.stones, axis=1)
        if self._spec.gravity:
            free = free[:, : self._spec.width]  # the top row
        return free | self.over[:, None]

    def move(self, choice: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Place a stone in every game that goes on, and turn the boards; who has won by it.

        Args:
            choice: i64[games]; must be allowed where the game goes on.
        """
        rows = np.nonzero(~self.over)[0]
        self.stones[rows, 0, self._places(choice)[rows]] = True
        lines = np.all(self.stones[:, 0][:, self._lines], axis=2)
        won = np.any(lines, axis=1) & ~self.over
        self.over |= won | np.all(self.stones.any(axis=1), axis=1)
        self.stones = self.stones[:, ::-1].copy()
        return won

    def _places(self, choice: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self._spec.gravity:
            return choice
        height, width = self._spec.height, self._spec.width
        taken = self.stones.any(axis=1).reshape(-1, height, width)
        stack = taken.sum(axis=1)[np.arange(len(choice)), choice]
        return (height - 1 - stack) * width + choice


class BoardGameWorker(BoardGame):
    """See `BoardSpec`.

    Attributes:
        metrics: Of the last call: shares of games that the first and the second player won, how
            many moves a game took, and how many all of them (`env_steps`).
    """

    def __init__(self, spec: BoardSpec, context: WorkerContext) -> None:
        self.spec = spec
        self.context = context
        self.metrics: dict[str, Metric] = {}

    def play(self, game: Tensor, group: Tensor, first: Actor, second: Actor) -> Trajectories:
        """See `BoardGame.play`.

        Raises:
            WorkerError: If a player makes a move that is not allowed, or says what is no number;
                names game and move.
        """
        key = call_key(self.context.role, "play")
        stream = stream_key(self.context.seed, self.context.role, "noise", key)
        parts = [self._group(numbers, (first, second), stream) for numbers in _groups(game, group)]
        if not parts:
            parts = [self._group(np.zeros(0, np.int64), (first, second), stream)]
        columns = {
            name: torch.from_numpy(np.concatenate([part[name] for part in parts]))
            for name in parts[0]
        }
        return Trajectories(**columns)

    def _group(
        self, numbers: NDArray[np.int64], players: tuple[Actor, Actor], stream: NDArray[np.uint64]
    ) -> dict[str, NDArray[Any]]:
        """Play some games to their ends: columns of `Trajectories`."""
        spec, count = self.spec, len(numbers)
        noise = row_uniforms(stream, numbers, np.zeros_like(numbers), spec.num_places).numpy()
        found = _rooms(spec, count)
        boards = Boards(spec, count)
        memories: list[NDArray[np.float32] | None] = [None, None]
        for t in range(spec.num_places if count else 0):
            if boards.over.all():
                break
            side, turn = t % 2, t // 2
            obs, allowed, live = boards.obs(), boards.allowed(), ~boards.over
            action, logprob, memories[side] = players[side].act(
                obs, noise[:, t : t + 1], allowed, memories[side]
            )
            self._check_numbers(numbers, t, live, action, logprob)
            choice = np.where(live, action[:, 0], 0).astype(np.int64)
            self._check(numbers, t, live, allowed, choice)
            for name, column in (
                ("obs", obs),
                ("action", action),
                ("action_mask", allowed),
                ("behavior_logprob", logprob),
                ("mask", live),
            ):
                found[name][live, side, turn] = column[live]
            won = boards.move(choice)
            _settle(found, side, turn, won, live & boards.over)
        found["last_obs"] = found["obs"][:, :, -1].copy()  # every game is over: nobody asks
        found["env"] = np.stack([2 * numbers, 2 * numbers + 1], axis=1)
        self._count(found)
        return {name: array.reshape(2 * count, *array.shape[2:]) for name, array in found.items()}

    def _check_numbers(
        self,
        numbers: NDArray[np.int64],
        move: int,
        live: NDArray[np.bool_],
        action: NDArray[np.float32],
        logprob: NDArray[np.float32],
    ) -> None:
        for found, what in ((action[:, 0], "action"), (logprob, "log-probability of an action")):
            bad = live & ~np.isfinite(found)
            if bad.any():
                raise WorkerError(
                    f"game {numbers[bad.argmax()]} of '{self.context.role}' (seed "
                    f"{self.context.seed}), move {move}: the actor's {what} is not finite"
                )

    def _check(
        self,
        numbers: NDArray[np.int64],
        move: int,
        live: NDArray[np.bool_],
        allowed: NDArray[np.bool_],
        choice: NDArray[np.int64],
    ) -> None:
        there = (choice >= 0) & (choice < allowed.shape[1])
        bad = live & ~(there & allowed[np.arange(len(choice)), choice * there])
        if bad.any():
            index = int(bad.nonzero()[0][0])
            raise WorkerError(
                f"game {numbers[index]} of '{self.context.role}' (seed {self.context.seed}), move "
                f"{move}: choice {choice[index]} is not allowed, which are "
                f"{allowed[index].nonzero()[0].tolist()}; an actor must heed its action_mask"
            )

    def _count(self, found: dict[str, NDArray[Any]]) -> None:
        total = found["reward"].sum(axis=2)
        count = float(len(total))
        wins = (total > 0).sum(axis=0).tolist()
        add_metrics(
            self.metrics,
            {
                "first_wins": Metric.mean(wins[0], count),
                "second_wins": Metric.mean(wins[1], count),
                "num_moves": Metric.mean(float(found["mask"].sum()), count),
                "games": Metric.sum(count),
                "env_steps": Metric.sum(float(found["mask"].sum())),
            },
        )


class GameRowSource:
    """As many games in every step, all of them new.

    Args:
        num_games: How many.
        group_size: How many are played together; the last group may have fewer.

    Raises:
        ValueError: If either is below 1.
    """

    def __init__(self, num_games: int, group_size: int) -> None:
        if num_games < 1 or group_size < 1:
            raise ValueError(
                f"num_games is {num_games} and group_size {group_size}; expected at least 1"
            )
        game = torch.arange(num_games)
        self._rows = GameRows(game=game, group=game // group_size)

    def batch(self, step: int) -> GameRows:
        """All of them, whatever the step."""
        del step
        return self._rows


def _rooms(spec: BoardSpec, count: int) -> dict[str, NDArray[Any]]:
    """Room for both sides of games, [games, 2, turns, ...]."""
    shape = (count, 2, (spec.num_places + 1) // 2)
    features, actions = spec.spaces()
    return {
        "obs": np.zeros((*shape, features), np.float32),
        "action": np.zeros((*shape, 1), np.float32),
        "action_mask": np.ones((*shape, actions.num_choices), np.bool_),
        "behavior_logprob": np.zeros(shape, np.float32),
        "reward": np.zeros(shape, np.float32),
        "terminated": np.zeros(shape, np.bool_),
        "truncated": np.zeros(shape, np.bool_),
        "mask": np.zeros(shape, np.bool_),
        "memory": np.zeros((count, 2, 0), np.float32),  # players begin with nothing remembered
    }


def _settle(
    found: dict[str, NDArray[Any]],
    side: int,
    turn: int,
    won: NDArray[np.bool_],
    over: NDArray[np.bool_],
) -> None:
    """Pay both players where a move ended the game: it was the last turn of each.

    Args:
        found: Columns to write to.
        side: Who has moved.
        turn: Which turn of theirs it was.
        won: Games won by it.
        over: Games ended by it.
    """
    other, last = 1 - side, turn if side == 1 else turn - 1
    found["reward"][won, side, turn] = 1.0
    found["terminated"][over, side, turn] = True
    if last >= 0:
        found["reward"][won, other, last] = -1.0
        found["terminated"][over, other, last] = True


def _groups(game: Tensor, group: Tensor) -> Iterator[NDArray[np.int64]]:
    """The games of every group, in the order of the rows."""
    ends = torch.cat(
        [(group[1:] != group[:-1]).nonzero().flatten() + 1, torch.tensor([len(group)])]
    )
    start = 0
    for end in ends.tolist():
        if end > start:
            yield game[start:end].numpy()
        start = end
