"""PettingZoo's games of two players, and any other in its AEC form, one after another in Python."""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ...algorithms.env_roles import ActionSpace
from ...dataflow.errors import ConfigError, WorkerError, nearest, raised_at
from ..envs.alarm import StepAlarm
from .boards import GameNames, answered

__all__ = ["ZooBoards", "zoo_game_spaces"]

_OBS, _MASK = "observation", "action_mask"
"""What PettingZoo's games show a player."""


class ZooBoards:
    """`Boards` of PettingZoo's. A game has a seed of its own.

    Args:
        game_id: PettingZoo's name of the game, or `module:function`.
        options: The game's own.
        names: Of the games.
        limit_s: Longest time of an answer of one game; None for no limit.

    Raises:
        ConfigError: If PettingZoo is not installed, or the game is none for two players.
        WorkerError: If a game fails to begin.
    """

    def __init__(
        self,
        game_id: str,
        options: Mapping[str, Any],
        names: GameNames,
        limit_s: float | None,
    ) -> None:
        self._id, self._names = game_id, names
        self._num_features, self._actions = zoo_game_spaces(game_id, options)
        count = len(names.numbers)
        self.over: NDArray[np.bool_] = np.zeros(count, np.bool_)
        self.cut: NDArray[np.bool_] = np.zeros(count, np.bool_)
        self.turn: NDArray[np.int64] = np.zeros(count, np.int64)
        self._games: list[Any] = []
        self._players: list[tuple[str, str]] = []
        with ExitStack() as made:
            self._alarm = made.enter_context(StepAlarm(limit_s))
            for index in range(count):
                game = _made(game_id, options)
                made.callback(game.close)
                self._games.append(game)
                self._ask(index, lambda g=game, s=names.own_seed(index): g.reset(seed=s))
                one, other = game.possible_agents
                first = game.agent_selection
                self._players.append((first, other if first == one else one))
            self._opened = made.pop_all()

    def _ask(self, index: int, ask: Callable[[], Any]) -> Any:
        return answered(lambda: self._named(index), self._alarm, ask)

    def _named(self, index: int) -> str:
        own = self._names.own_seed(index)
        return f"{self._names.of(index)}: '{self._id}' of PettingZoo (seed {own})"

    def obs(self, side: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `Boards.obs`; nothing of games that have come to their end.

        Raises:
            WorkerError: If a game fails, takes too long, or shows something of another shape; as
                the other methods.
        """
        obs = np.zeros((len(side), self._num_features), np.float32)
        for index in np.nonzero(~self.over | self.cut)[0]:
            obs[index] = self._shown(index, int(side[index]), _OBS, self._num_features)
        return obs

    def allowed(self) -> NDArray[np.bool_]:
        """See `Boards.allowed`; all where it is over."""
        choices = self._actions.num_choices
        allowed = np.ones((len(self._games), choices), np.bool_)
        for index in np.nonzero(~self.over)[0]:
            allowed[index] = self._shown(index, int(self.turn[index]), _MASK, choices) != 0
        return allowed

    def _shown(self, index: int, side: int, part: str, width: int) -> NDArray[Any]:
        """A part of what a player is shown, laid out flat."""
        player = self._players[index][side]
        found = np.asarray(self._ask(index, lambda: self._games[index].observe(player)[part]))
        if found.size != width or found.dtype.kind not in "biuf":
            raise WorkerError(
                f"{self._named(index)} showed {player} as {part} {found.dtype}"
                f"{list(found.shape)}; expected {width} numbers"
            )
        return found.reshape(-1)

    def move(self, choice: NDArray[np.int64], live: NDArray[np.bool_]) -> NDArray[np.float32]:
        """See `Boards.move`."""
        reward = np.zeros((len(choice), 2), np.float32)
        for index in np.nonzero(live)[0]:
            game, players = self._games[index], self._players[index]
            self._ask(index, lambda g=game, c=int(choice[index]): g.step(c))
            reward[index] = [game.rewards.get(player, 0.0) for player in players]
            ended = any(game.terminations.values())
            self.over[index] = ended or any(game.truncations.values())
            self.cut[index] = self.over[index] and not ended
            if not self.over[index]:
                mover = game.agent_selection
                self.turn[index] = players.index(mover) if mover in players else -1
        return reward

    def close(self) -> None:
        """See `Boards.close`."""
        self._opened.close()


def zoo_game_spaces(game_id: str, options: Mapping[str, Any]) -> tuple[int, ActionSpace]:
    """Numbers of an observation, and what can be done.

    Args:
        game_id: PettingZoo's name of the game, or `module:function`.
        options: The game's own.

    Raises:
        ConfigError: If PettingZoo is not installed or does not have it, or it is no game of two
            players who choose in turn from what is allowed.
    """
    game = _made(game_id, options)
    try:
        players = list(game.possible_agents)
        shown = [game.observation_space(player) for player in players]
        taken = [game.action_space(player) for player in players]
    finally:
        game.close()
    parts = shown[0].spaces if isinstance(shown[0], spaces.Dict) else {}
    one = taken[0]
    for wrong, what in (
        (len(players) != 2, f"has {len(players)} players"),
        (not {_OBS, _MASK} <= parts.keys(), f"shows {shown[0]}"),
        (not isinstance(one, spaces.Discrete) or one.start != 0, f"takes {one}"),
        (any(space != shown[0] for space in shown), "shows its players things of other shapes"),
        (any(space != one for space in taken), "lets its players choose from different things"),
    ):
        if wrong:
            raise ConfigError(
                f"'{game_id}' of PettingZoo {what}; expected a game of two players, who choose in "
                f"turn from what is allowed, a Dict with {_OBS} and {_MASK}\n"
                "    such are connect_four_v3, tictactoe_v3 and go_v5"
            )
    actions = ActionSpace("discrete", sizes=(int(one.n),), masked=True)
    return spaces.flatdim(parts[_OBS]), actions


def _games() -> list[str]:
    """Where PettingZoo's games of this form are."""
    return list(importlib.import_module("pettingzoo.classic").__path__)


def _made(game_id: str, options: Mapping[str, Any]) -> Any:
    """A new game."""
    module, _, function = game_id.partition(":")
    name = module if function else f"pettingzoo.classic.{module}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what pygame imports warns of its own end
            found = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            known = [] if function else [found.name for found in pkgutil.iter_modules(_games())]
            raise ConfigError(
                f"{'there is no module for' if function else 'PettingZoo has no'} game "
                f"'{game_id}'{nearest(game_id, known)}"
            ) from error
        raise ConfigError(
            f"game '{game_id}' needs the package {str(error.name).partition('.')[0]}, which is not "
            "installed\n"
            "    install penstock[pettingzoo]; for card games also rlcard, for chess also chess"
        ) from error
    try:
        return getattr(found, function or "env")(**options)
    except Exception as error:  # of many kinds
        raise ConfigError(
            f"game '{game_id}' cannot be made: it raised {type(error).__name__}: {error} "
            f"({raised_at(error).short})"
        ) from error
