"""The table of games: how many a step plays, and which are played together."""

from __future__ import annotations

from ....algorithms.roles.games import GameRows
from ..rows import numbered

__all__ = ["GameRowSource"]


class GameRowSource:
    """As many games in every step, all of them new.

    Args:
        num_games: How many.
        group_size: How many are played together; the last group may have fewer.

    Raises:
        ValueError: If either is below 1.
    """

    def __init__(self, num_games: int, group_size: int) -> None:
        game, group = numbered(num_games, group_size, "num_games")
        self._rows = GameRows(game=game, group=group)

    def batch(self, step: int) -> GameRows:
        """All of them, whatever the step."""
        del step
        return self._rows
