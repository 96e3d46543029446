"""EnvPool's games of two players, which it computes in threads of its own.

A game that is over begins anew with the next step, and all of them step together; so what a game
shows is kept from the last step that belongs to it. With several threads games come in the order in
which they were computed, and are put in their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ....algorithms.roles.environment import ActionSpace
from ....dataflow.errors import ConfigError, WorkerError
from ..alarm import StepAlarm
from ..pool import ask_envpool, without_casts
from ..spaces import action_space, num_features, to_features
from .boards import GameNames, answered

_TOLD = ("current_player", "legal_action_mask")
"""Columns of EnvPool's games beside observations."""


class PoolBoards:
    """`Boards` of EnvPool's. A game has a seed of its own.

    Args:
        game_id: EnvPool's name of the game.
        options: EnvPool's own, such as `num_threads`.
        names: What messages call the games.
        limit_s: Longest time of a move in all of them; None for no limit.

    Raises:
        ConfigError: If EnvPool is not installed, or the game is none for two players.
        WorkerError: If the games fail to begin.
    """

    def __init__(
        self,
        game_id: str,
        options: Mapping[str, Any],
        names: GameNames,
        limit_s: float | None,
    ) -> None:
        self._id, self._names = game_id, names
        self._count = len(names.numbers)
        self._num_features, self._actions = pool_game_spaces(game_id, options)
        self._seeds = [names.own_seed(index) for index in range(self._count)]
        self.over: NDArray[np.bool_] = np.zeros(self._count, np.bool_)
        self.ended: NDArray[np.bool_] = np.zeros((self._count, 2), np.bool_)
        self._games = np.arange(self._count)
        self._obs = np.zeros((self._count, 2, self._num_features), np.float32)
        self._allowed = np.zeros((self._count, self._actions.num_choices), np.bool_)
        self._mover = np.zeros(self._count, np.int64)
        with ExitStack() as made:
            self._alarm = made.enter_context(StepAlarm(limit_s))
            self._pool: Any = ask_envpool(
                "game",
                game_id,
                "make_gymnasium",
                options,
                num_envs=self._count,
                seed=self._seeds,
            )
            made.callback(self._pool.close)
            with without_casts():
                # EnvPool asks for this property at every step.
                self._flat = to_features(self._pool.observation_space, many=True)
            obs, info = answered(self._named, self._alarm, self._pool.reset)
            order = self._order(info)
            self._show(~self.over, obs, info, order)
            self._first = self._mover.copy()
            self._opened = made.pop_all()

    def _named(self) -> str:
        return f"{self._names.together()}: EnvPool's '{self._id}' (seeds {self._seeds!s:.60})"

    @property
    def turn(self) -> NDArray[np.int64]:
        strange = (self._mover != 0) & (self._mover != 1)
        return np.where(strange, self._mover, self._mover ^ self._first)

    def obs(self, side: NDArray[np.int64]) -> NDArray[np.float32]:
        return self._obs[self._games, side ^ self._first]

    def allowed(self) -> NDArray[np.bool_]:
        return self._allowed

    def move(self, choice: NDArray[np.int64], live: NDArray[np.bool_]) -> NDArray[np.float32]:
        # A game that is over steps as well, and by something that its new beginning allows.
        taken = np.where(live, choice, self._allowed.argmax(axis=1)).astype(np.int32)
        obs, reward, terminated, truncated, info = answered(
            self._named, self._alarm, lambda: self._pool.step(taken)
        )
        order = self._order(info)
        self._show(live, obs, info, order)
        self.over |= live & (terminated | truncated)[order]
        self.ended |= (live & np.asarray(terminated, np.bool_)[order])[:, None]
        of_players = np.asarray(reward, np.float32).reshape(self._count, 2)[order]
        players = self._first[:, None] ^ np.arange(2)
        return np.where(live[:, None], of_players[self._games[:, None], players], np.float32(0))

    def _order(self, info: Mapping[str, Any]) -> NDArray[np.int64]:
        """Where each game stands in what came back, of which every player has a row."""
        found, players = np.asarray(info["env_id"]), info["players"]
        if (
            not np.array_equal(np.sort(found), self._games)
            or not np.array_equal(players["env_id"], found.repeat(2))
            or not np.array_equal(players["id"], np.tile([0, 1], self._count))
        ):
            raise WorkerError(f"{self._named()} showed other games or players: {players!s:.200}")
        return np.argsort(found)

    def _show(
        self,
        live: NDArray[np.bool_],
        obs: NDArray[Any],
        info: Mapping[str, Any],
        order: NDArray[np.int64],
    ) -> None:
        """Take what games show that go on, and what all of them allow."""
        flat = answered(self._named, self._alarm, lambda: self._flat(obs))
        if flat.size != self._obs.size:
            raise WorkerError(
                f"{self._named()} showed observations of shape {list(obs.shape)}; expected "
                f"[{2 * self._count}, {self._num_features}]"
            )
        self._obs[live] = flat.reshape(self._obs.shape)[order[live]]
        self._mover[live] = np.asarray(info["current_player"])[order[live]]
        self._allowed = np.asarray(info["legal_action_mask"], np.bool_)[order]

    def close(self) -> None:
        self._opened.close()


def pool_game_spaces(game_id: str, options: Mapping[str, Any]) -> tuple[int, ActionSpace]:
    """Return the numbers of an observation, and the actions that there are."""
    made = ask_envpool("game", game_id, "make_spec", options)
    players = getattr(made.config, "max_num_players", 1)
    told = {key.removeprefix("info:") for key in made.state_array_spec}
    with without_casts():
        shown, taken = made.gymnasium_observation_space, made.gymnasium_action_space
    for wrong, what in (
        (players != 2, f"has {players} player{'s' * (players > 1)}"),
        (not told.issuperset(_TOLD), f"does not tell {' and '.join(_TOLD)}"),
        (not isinstance(taken, spaces.Discrete), f"takes {taken}"),
        (isinstance(shown, spaces.Dict), f"shows {shown}"),
    ):
        if wrong:
            raise ConfigError(
                f"'{game_id}' of EnvPool {what}; expected a game of two players, who choose in "
                "turn from what is allowed\n    such are ConnectFour-v1, Hex-v1 and Go9x9-v1"
            )
    return num_features(shown, game_id), action_space(taken, game_id, masked=True)
