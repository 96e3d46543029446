"""The tables of environments and games: which there are, and which step together."""

from __future__ import annotations

import torch
from torch import Tensor

from ...algorithms.roles.environment import EnvRows, GameRows


class EnvRowSource:
    """The same environments for every step.

    Args:
        num_envs: Number of environments.
        group_size: How many step together; the last group may have fewer.

    Raises:
        ValueError: If either is below 1.
    """

    def __init__(self, num_envs: int, group_size: int) -> None:
        env, group = _numbered(num_envs, group_size, "num_envs")
        self._rows = EnvRows(env=env, group=group)

    def batch(self, step: int) -> EnvRows:
        """All of them, whatever the step."""
        return self._rows


class GameRowSource:
    """As many games in every step, all of them new.

    Args:
        num_games: Number of games.
        group_size: How many are played together; the last group may have fewer.

    Raises:
        ValueError: If either is below 1.
    """

    def __init__(self, num_games: int, group_size: int) -> None:
        game, group = _numbered(num_games, group_size, "num_games")
        self._rows = GameRows(game=game, group=group)

    def batch(self, step: int) -> GameRows:
        """All of them, whatever the step."""
        return self._rows


def _numbered(count: int, group_size: int, name: str) -> tuple[Tensor, Tensor]:
    """Return numbers from 0 and the group of each, i64[count]; the last group may be shorter."""
    if count < 1 or group_size < 1:
        raise ValueError(f"{name} is {count} and group_size {group_size}; expected at least 1")
    numbers = torch.arange(count)
    return numbers, numbers // group_size
