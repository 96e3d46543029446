"""Self-play: two players of one game, each trained against the other as it gets better.

Both learn by PPO from the same games, each from its own moves. They are two roles, so a plan may
train them on devices of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...dataflow.graph.tracer import op
from ..env_ppo import EnvPPO, learn
from ..roles import TrainMetrics
from ..roles.environment import ActorCritic, BoardGame, GameRows, Trajectories


@dataclass(frozen=True, kw_only=True)
class SelfPlay:
    """Options of self-play."""

    learning: EnvPPO = field(default_factory=lambda: EnvPPO(discount=1.0))
    """Training of both players; `horizon` means nothing here, games are played to their ends."""


@op(scope="row", makes_rows=True)
def side_of(games: Trajectories, *, side: int) -> Trajectories:
    """The rows of one player.

    Args:
        games: Games of both players, as `BoardGame.play` makes them.
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
