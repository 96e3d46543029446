"""Self-play: two players of one game, each trained against the other as it gets better.

Both learn by PPO from the same games, each from its own moves. They are two roles, so a plan may
train them on devices of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from torch import Tensor

from ..dataflow.axes import Axis, GroupId, i64
from ..dataflow.record import op
from ..dataflow.role import Role, call
from .env_ppo import EnvPPO, learn
from .env_roles import ActorCritic, Trajectories
from .roles import TrainMetrics

__all__ = ["GAME", "BoardGame", "GameRows", "SelfPlay", "self_play_step", "side_of"]

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
    """A game of two players who move in turn."""

    @call("rollout", scope="group")
    def play(
        self, game: GameNumber, group: GameGroup, first: ActorCritic, second: ActorCritic
    ) -> Trajectories:
        """Play whole games.

        Every game makes two rows, next to each other: `env` is twice its number for the first
        player, and one more for the second. A step of a row is a turn of that player; `mask` is
        False on those after the end. The last turn of each earns 1 to who won and -1 to who lost.

        Args:
            game: i64[games].
            group: i64[games]; the rows of a group are next to each other.
            first: Who begins, in all games.
            second: The other.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class SelfPlay:
    """Options of self-play."""

    learning: EnvPPO = field(default_factory=lambda: EnvPPO(discount=1.0))
    """How both players learn; `horizon` means nothing here, games are played to their ends."""


@op(scope="row", makes_rows=True)
def side_of(games: Trajectories, *, side: int) -> Trajectories:
    """The rows of one player.

    Args:
        games: Of both, as `BoardGame.play` makes them.
        side: 0 for who begins, 1 for the other.
    """
    own = games.env % 2 == side
    return Trajectories(**{name: column[own] for name, column in vars(games).items()})


def self_play_step(
    rows: GameRows, board: BoardGame, first: ActorCritic, second: ActorCritic, cfg: SelfPlay
) -> tuple[TrainMetrics, TrainMetrics]:
    """Play games, and train both players on their own turns."""
    games = board.play(rows.game, rows.group, first, second)
    return (
        learn(side_of(games, side=0), first, cfg.learning),
        learn(side_of(games, side=1), second, cfg.learning),
    )
