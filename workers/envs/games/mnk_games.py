"""The m,n,k board games, with or without gravity: tic-tac-toe, connect four, and their like.

All games of a group are played side by side with numpy. A game is seen by one of the players: own
stones, then the other's, 1 where there is one.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ....algorithms.roles.environment import ActionSpace
from ....dataflow.options import PositiveInt, option_class
from ....dataflow.runtime.worker_protocol import WorkerContext
from ..task import EnvTask
from .worker import BoardGameWorker, GameNames


@option_class
class BoardSpec:
    """Rules of a game, and the recipe for who keeps them."""

    height: PositiveInt = 3
    """Rows of the board."""
    width: PositiveInt = 3
    """Columns of the board."""
    in_line: PositiveInt = 3
    """Stones in a line, straight or diagonal, that win."""
    gravity: bool = False
    """A stone falls to the lowest free place of a column, and a choice is a column; else a choice
    is a place."""

    def __post_init__(self) -> None:
        if self.in_line > max(self.height, self.width):
            longest = max(self.height, self.width)
            raise ValueError(f"in_line is {self.in_line}; expected at most {longest:g}")

    @property
    def title(self) -> str:
        falls = " falling" if self.gravity else ""
        return f"{self.in_line} in line on {self.height}x{self.width}{falls}"

    @property
    def num_places(self) -> int:
        """Places of the board: the longest game, in moves."""
        return self.height * self.width

    @property
    def max_turns(self) -> int:
        """Turns of the first player in the longest game."""
        return (self.num_places + 1) // 2

    @property
    def actions(self) -> ActionSpace:
        choices = self.width if self.gravity else self.num_places
        return ActionSpace("discrete", sizes=(choices,), masked=True)

    def spaces(self) -> tuple[int, ActionSpace]:
        return 2 * self.num_places, self.actions

    def lines(self) -> NDArray[np.int64]:
        """The places of every line that wins, i64[lines, in_line]."""
        height, width, steps = self.height, self.width, self.in_line - 1
        found = [
            [(row + down * i) * width + column + right * i for i in range(self.in_line)]
            for row in range(height)
            for column in range(width)
            for down, right in ((0, 1), (1, 0), (1, 1), (1, -1))
            if row + down * steps < height and 0 <= column + right * steps < width
        ]
        return np.array(found, dtype=np.int64)

    def boards(self, names: GameNames) -> MnkBoards:
        return MnkBoards(self, len(names.numbers))

    def build(self, context: WorkerContext) -> BoardGameWorker:
        return BoardGameWorker(self, context)


TIC_TAC_TOE = BoardSpec()
CONNECT_FOUR = BoardSpec(height=6, width=7, in_line=4, gravity=True)


@option_class
class BoardTaskSpec:
    """A game of two players on a board, and how many games are played together."""

    acts_in: ClassVar[Literal["game"]] = "game"

    game: BoardSpec = BoardSpec()
    """Its rules."""
    group_size: PositiveInt | Literal["auto"] | None = None
    """Games that are played together: their players are asked about all of them at once. By default
    all of them; `auto`: as the plan says. Workers without a group have nothing to do."""

    @property
    def env(self) -> BoardSpec:
        """The rules that players see."""
        return self.game

    def build(self) -> EnvTask:
        return EnvTask(self.game.title, self)


class MnkBoards:
    """`Boards` of an m,n,k game."""

    def __init__(self, spec: BoardSpec, num_games: int) -> None:
        self._spec, self._lines = spec, spec.lines()
        self._games = np.arange(num_games)
        self._occupied: NDArray[np.bool_] = np.zeros((num_games, 2, spec.num_places), np.bool_)
        self.over: NDArray[np.bool_] = np.zeros(num_games, np.bool_)
        self.ended: NDArray[np.bool_] = np.zeros((num_games, 2), np.bool_)
        self.turn: NDArray[np.int64] = np.zeros(num_games, np.int64)

    def obs(self, side: NDArray[np.int64]) -> NDArray[np.float32]:
        seen = self._occupied[self._games[:, None], np.stack([side, 1 - side], axis=1)]
        return seen.reshape(len(seen), -1).astype(np.float32)

    def allowed(self) -> NDArray[np.bool_]:
        free = ~np.any(self._occupied, axis=1)
        return free[:, : self._spec.width] if self._spec.gravity else free  # the top row

    def move(self, choice: NDArray[np.int64], live: NDArray[np.bool_]) -> NDArray[np.float32]:
        """1 to who has won by it, -1 to the other."""
        games = np.nonzero(live)[0]
        side = self.turn[games]
        self._occupied[games, side, self._places(choice)[games]] = True
        lines = np.all(self._occupied[games, side][:, self._lines], axis=2)
        won = np.any(lines, axis=1)
        self.over[games] = won | np.all(self._occupied[games].any(axis=1), axis=1)
        self.ended[games] = self.over[games, None]
        self.turn[games] = 1 - side
        reward = np.zeros((len(choice), 2), np.float32)
        reward[games[won], side[won]] = 1.0
        reward[games[won], 1 - side[won]] = -1.0
        return reward

    def _places(self, choice: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self._spec.gravity:
            return choice
        height, width = self._spec.height, self._spec.width
        taken = self._occupied.any(axis=1).reshape(-1, height, width)
        stack = taken.sum(axis=1)[self._games, choice]
        return (height - 1 - stack) * width + choice

    def close(self) -> None: ...
