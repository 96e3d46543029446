"""Role contracts and tables of games that several players play."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from ...dataflow.graph.axes import Axis, GroupId, i64
from ...dataflow.graph.role import Role, call
from .environment import ActorCritic, Trajectories

GAME = Axis("game")

GameNumber = Annotated[Tensor, i64(GAME)]
"""Which game of a step a row is."""
GameGroup = Annotated[Tensor, i64(GAME), GroupId()]
"""The group a game is played with: its players are asked about all of them at once."""


@dataclass(frozen=True, kw_only=True)
class GameRows:
    """The games of a step; every step begins new ones.

    Example:
        Two groups of two: `game = [0, 1, 2, 3]`, `group = [0, 0, 1, 1]`.
    """

    game: GameNumber
    group: GameGroup


class BoardGame(Role):
    """A game of two players, one of whom is to move at a time."""

    @call("rollout", scope="group")
    def play(
        self, game: GameNumber, group: GameGroup, first: ActorCritic, second: ActorCritic
    ) -> Trajectories:
        """Play whole games.

        Every game makes two rows, next to each other: `env` is twice its number for the first
        player, and one more for the second. A step of a row is a turn of that player; `mask` is
        False on those after the end. What a player earns belongs to its last turn before: in most
        games 1 to who won and -1 to who lost, with the last turn of each.

        The last turn of each is `terminated`; it is `truncated` where a game was cut off that would
        have gone on, and how the player sees it then stands in the next column or in `last_obs`.

        Args:
            game: i64[games].
            group: i64[games]; the rows of a group are next to each other.
            first: The player who begins, in all games.
            second: The other.
        """
        raise NotImplementedError
