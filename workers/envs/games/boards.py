"""Games of two players that stand side by side, whoever keeps their rules.

A side is 0 for the player who begins and 1 for the other. Three kinds of boards keep this promise:
`mnk_games.py`, our own rules in numpy, `pool.py`, EnvPool's, and `zoo.py`, PettingZoo's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ....algorithms.roles.environment import ActionSpace
from ....dataflow.errors import WorkerError
from ....dataflow.runtime.call_context import CallKey
from ..alarm import StepAlarm, StepTooLong
from ..group import env_seed
from ..restarts import described

T = TypeVar("T")


@dataclass
class GameNames:
    """The games of a group, as messages name them.

    Attributes:
        role: The role that plays them.
        seed: The run's.
        key: The call that they belong to.
        numbers: i64[games], unique in the call.
        title: Which game they are of, as `GameSpec.title`.
        move: How many each that goes on has had, both players together.
    """

    role: str
    seed: int
    key: CallKey
    numbers: NDArray[np.int64]
    title: str
    move: int = 0

    def of(self, index: int) -> str:
        """One game."""
        return f"game {self.numbers[index]} of {self._where()}"

    def own(self, index: int) -> str:
        """One game with the seed of its own, to say what it did."""
        return f"{self.of(index)}: {self.title} (seed {self.own_seed(index)})"

    def together(self) -> str:
        """All of them, where they cannot be told apart."""
        return f"games {self.numbers.tolist()!s:.60} of {self._where()}"

    def _where(self) -> str:
        return f"'{self.role}' (seed {self.seed}), move {self.move}"

    def own_seed(self, index: int) -> int:
        """The seed below 2^31 of one game's dice and cards."""
        step, ordinal = self.key.step, self.key.ordinal
        return env_seed(self.seed, self.role, "game", step, ordinal, int(self.numbers[index]))

    def refuse(self, bad: NDArray[np.bool_], what: Callable[[int], str]) -> None:
        """Raise where something went wrong in games."""
        if bad.any():
            index = int(bad.argmax())
            raise WorkerError(f"{self.of(index)}: {what(index)}")

    def blame(self, bad: NDArray[np.bool_], what: Callable[[int], str]) -> None:
        """Raise as `refuse`, for what the games did themselves."""
        if bad.any():
            index = int(bad.argmax())
            raise WorkerError(f"{self.own(index)} {what(index)}")


def answered(named: Callable[[], str], alarm: StepAlarm, ask: Callable[[], T]) -> T:
    """Call a library's game; its exceptions become `BadRows`."""
    alarm.arm()
    try:
        return ask()
    except (Exception, StepTooLong) as error:
        raise WorkerError(f"{named()} {described(error)}") from error
    finally:
        alarm.disarm()


class Boards(Protocol):
    """Games side by side, each of which has begun when they are made and is played once."""

    @property
    def over(self) -> NDArray[np.bool_]:
        """bool[games]: ended, by the rules or a limit of the game's own."""
        ...

    @property
    def ended(self) -> NDArray[np.bool_]:
        """bool[games, 2]: sides for which it has ended by the rules; a limit only cuts it off."""
        ...

    @property
    def turn(self) -> NDArray[np.int64]:
        """i64[games]: the side to move, where the game goes on."""
        ...

    def obs(self, side: NDArray[np.int64]) -> NDArray[np.float32]:
        """f32[games, features], as `side` of each game, i64[games], sees it."""
        ...

    def allowed(self) -> NDArray[np.bool_]:
        """bool[games, choices] of who is to move, where the game goes on."""
        ...

    def move(self, choice: NDArray[np.int64], live: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Move in some games; the others stay as they are, and are not asked for again.

        Args:
            choice: i64[games], allowed in those.
            live: bool[games]: which; each goes on.

        Returns:
            f32[games, 2]: what the move earned each side.
        """
        ...

    def close(self) -> None:
        """Give up what they hold."""


class GameSpec(Protocol):
    """The specification of a game that `BoardGameWorker` plays."""

    @property
    def title(self) -> str:
        """Name of the game in messages."""
        ...

    @property
    def max_turns(self) -> int:
        """Turns of a player in the longest game."""
        ...

    def spaces(self) -> tuple[int, ActionSpace]:
        """Numbers of an observation, and what can be done: one choice, of which some are not."""
        ...

    def boards(self, names: GameNames) -> Boards:
        """Begin games, at least one, as many as there are names."""
        ...
