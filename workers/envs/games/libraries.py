"""Games of two players of EnvPool and PettingZoo, and any other in PettingZoo's AEC form."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import field
from typing import Any, ClassVar, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ....algorithms.roles.environment import ActionSpace
from ....dataflow.errors import ConfigError, WorkerError, nearest, one_process, raised_at
from ....dataflow.options import PositiveFloat, PositiveInt, option_class
from ....dataflow.runtime.worker_protocol import WorkerContext
from ..group import StepAlarm, action_space, num_features, to_features
from ..pool import ask_envpool, without_casts
from ..task import EnvTask
from .worker import BoardGameWorker, Boards, GameNames, answered

_TOLD = ("current_player", "legal_action_mask")  # columns of EnvPool's games beside observations
_OBS, _MASK = "observation", "action_mask"  # keys of an observation of PettingZoo's games
_METHODS = ("observation_space", "action_space", "reset", "observe", "step", "close")
# Members of an AEC game beside `possible_agents`, once it has begun.
_BEGUN = ("agent_selection", "rewards", "terminations", "truncations")


@option_class
class LibraryGame:
    """A game of two players of EnvPool or PettingZoo."""

    id: str
    """EnvPool's name of the game, `Hex-v1`; PettingZoo's, `connect_four_v3`, or `module:function`
    for a function of your own that makes a game in PettingZoo's AEC form."""
    backend: Literal["envpool", "pettingzoo"] = "envpool"
    """The library that has it. EnvPool computes games together in its own threads, PettingZoo one
    after another in Python."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of the game; of EnvPool also those of the pool, as `num_threads`."""
    max_turns: PositiveInt = 64
    """Turns of each player that there is room for. A game whose next player has had them all is
    cut off, and worth what the critics say of it then."""
    step_limit_s: PositiveFloat | None = 10.0
    """Longest time of a move; EnvPool's are not interrupted. None for no limit but the engine's."""

    @property
    def title(self) -> str:
        return f"'{self.id}' of {'EnvPool' if self.backend == 'envpool' else 'PettingZoo'}"

    def spaces(self) -> tuple[int, ActionSpace]:
        found = pool_game_spaces if self.backend == "envpool" else zoo_game_spaces
        return found(self.id, self.options)

    def boards(self, names: GameNames) -> Boards:
        made = PoolBoards if self.backend == "envpool" else ZooBoards
        return made(self, names)


@option_class
class LibraryGameSpec(LibraryGame):
    """A game of a library, and the recipe for the worker that plays it."""

    def build(self, context: WorkerContext) -> BoardGameWorker:
        return BoardGameWorker(self, context)


@option_class
class LibraryGameTaskSpec(LibraryGame):
    """A game of two players of EnvPool or PettingZoo, and how many games are played together."""

    acts_in: ClassVar[Literal["game"]] = "game"

    group_size: PositiveInt | Literal["auto"] | None = None
    """Games that are played together, as of `BoardTaskSpec`. By default all of them; `auto`: as the
    plan says."""

    @property
    def env(self) -> LibraryGameSpec:
        """Without what only a run needs to know."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(LibraryGame)}
        return LibraryGameSpec(**fields)

    def build(self) -> EnvTask:
        self.spaces()
        return EnvTask(self.id, self)


class PoolBoards:
    """`Boards` of EnvPool's, which it computes in threads of its own. A game has a seed of its own.

    A game that is over begins anew with the next step, and all of them step together; so what a
    game shows is kept from the last step that belongs to it. With several threads games come in the
    order in which they were computed, and are put in their own.
    """

    def __init__(self, game: LibraryGame, names: GameNames) -> None:
        self._id, self._names = game.id, names
        self._count = len(names.numbers)
        self._num_features, self._actions = game.spaces()
        self._seeds = [names.own_seed(index) for index in range(self._count)]
        self.over: NDArray[np.bool_] = np.zeros(self._count, np.bool_)
        self.ended: NDArray[np.bool_] = np.zeros((self._count, 2), np.bool_)
        self._games = np.arange(self._count)
        self._obs = np.zeros((self._count, 2, self._num_features), np.float32)
        self._allowed = np.zeros((self._count, self._actions.num_choices), np.bool_)
        self._mover = np.zeros(self._count, np.int64)
        with ExitStack() as made:
            self._alarm = made.enter_context(StepAlarm(game.step_limit_s))
            self._pool: Any = ask_envpool(
                *("game", game.id, "make_gymnasium", game.options),
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


class ZooBoards:
    """`Boards` of PettingZoo's, or others in its AEC form, one after another in Python.

    A game has a seed of its own. A player may be out while the other goes on: its turns are stepped
    with None, as PettingZoo has it, and it earns nothing more.
    """

    def __init__(self, spec: LibraryGame, names: GameNames) -> None:
        self._names = names
        shown, self._actions = _playable(spec.id, spec.options)
        self._num_features, self._flat = num_features(shown, spec.id), to_features(shown)
        count = len(names.numbers)
        self.over: NDArray[np.bool_] = np.zeros(count, np.bool_)
        self.ended: NDArray[np.bool_] = np.zeros((count, 2), np.bool_)
        self._out: NDArray[np.bool_] = np.zeros((count, 2), np.bool_)
        self._left: dict[tuple[int, int], NDArray[np.float32]] = {}  # what a side saw last
        self.turn: NDArray[np.int64] = np.zeros(count, np.int64)
        self._games: list[Any] = []
        self._players: list[tuple[str, str]] = []
        with ExitStack() as made:
            self._alarm = made.enter_context(StepAlarm(spec.step_limit_s))
            for index in range(count):
                game = _made(spec.id, spec.options)
                made.callback(one_process()(game.close))
                self._games.append(game)
                self._ask(index, lambda g=game, s=names.own_seed(index): g.reset(seed=s))
                _require(spec.id, game, _BEGUN)
                one, other = game.possible_agents
                begins = self._side(index, (one, other))
                self._players.append((other, one) if begins else (one, other))
            self._opened = made.pop_all()

    def _ask(self, index: int, ask: Callable[[], Any]) -> Any:
        return answered(lambda: self._names.own(index), self._alarm, ask)

    def _side(self, index: int, players: Sequence[str]) -> int:
        mover = self._games[index].agent_selection
        if mover not in players:
            raise WorkerError(
                f"{self._names.own(index)} says it is the turn of {mover!r}; expected "
                f"{' or '.join(map(repr, players))}"
            )
        return players.index(mover)

    def obs(self, side: NDArray[np.int64]) -> NDArray[np.float32]:
        """Nothing of games that have come to their end."""
        obs = np.zeros((len(side), self._num_features), np.float32)
        for index in np.nonzero(~self.ended[np.arange(len(side)), side])[0]:
            obs[index] = self._seen(index, int(side[index]))
        return obs

    def _seen(self, index: int, side: int) -> NDArray[np.float32]:
        """Return an observation, laid out flat; of a player who was cut off the last one."""
        if (index, side) in self._left:
            return self._left[index, side]
        shown = self._shown(index, side, _OBS, self._num_features)
        return self._ask(index, lambda: self._flat(shown))

    def allowed(self) -> NDArray[np.bool_]:
        """All where it is over."""
        choices = self._actions.num_choices
        allowed = np.ones((len(self._games), choices), np.bool_)
        for index in np.nonzero(~self.over)[0]:
            allowed[index] = self._shown(index, int(self.turn[index]), _MASK, choices) != 0
        return allowed

    def _shown(self, index: int, side: int, part: str, width: int) -> NDArray[Any]:
        """A part of what a player is shown, laid out flat."""
        player = self._players[index][side]
        shown = self._ask(index, lambda: self._games[index].observe(player))
        if not isinstance(shown, Mapping) or part not in shown:
            raise WorkerError(
                f"{self._names.own(index)} showed {player} {shown!s:.60}; expected a dict with "
                f"{_OBS} and {_MASK}"
            )
        found = np.asarray(shown[part])
        if found.size != width or found.dtype.kind not in "biuf":
            raise WorkerError(
                f"{self._names.own(index)} showed {player} as {part} {found.dtype}"
                f"{list(found.shape)}; expected {width} numbers"
            )
        return found.reshape(-1)

    def move(self, choice: NDArray[np.int64], live: NDArray[np.bool_]) -> NDArray[np.float32]:
        reward = np.zeros((len(choice), 2), np.float32)
        for index in np.nonzero(live)[0]:
            game, players = self._games[index], self._players[index]
            self._ask(index, lambda g=game, c=int(choice[index]): g.step(c))
            earned = [game.rewards.get(player, 0.0) for player in players]
            reward[index] = self._ask(index, lambda found=earned: [*map(float, found)])
            self._go_on(index)
        return reward

    def _go_on(self, index: int) -> None:
        game, players = self._games[index], self._players[index]
        for _ in range(3):  # either may have to be stepped once
            for side, player in enumerate(players):
                ended = game.terminations.get(player, True)
                if self._out[index, side] or not (ended or game.truncations.get(player)):
                    continue
                if not ended:
                    self._left[index, side] = self._seen(index, side)
                self._out[index, side], self.ended[index, side] = True, ended
            self.over[index] = self._out[index].all()
            if self.over[index]:
                return
            self.turn[index] = mover = self._side(index, players)
            if not self._out[index, mover]:
                return
            self._ask(index, lambda: game.step(None))
        raise WorkerError(
            f"{self._names.own(index)} says it is the turn of {game.agent_selection!r} again, who "
            "is out and was stepped with None; expected the turn of the other player"
        )

    def close(self) -> None:
        self._opened.close()


def zoo_game_spaces(game_id: str, options: Mapping[str, Any]) -> tuple[int, ActionSpace]:
    shown, actions = _playable(game_id, options)
    return num_features(shown, game_id), actions


@one_process()
def _playable(game_id: str, options: Mapping[str, Any]) -> tuple[gym.Space[Any], ActionSpace]:
    game = _made(game_id, options)
    try:
        players = list(game.possible_agents)
        shown = [game.observation_space(player) for player in players]
        taken = [game.action_space(player) for player in players]
    except Exception as error:  # of many kinds
        raise ConfigError(
            f"game '{game_id}' does not say what it shows and takes: it {_raised(error)}"
        ) from error
    finally:
        game.close()
    seen: Any = shown[0] if players else None
    one: Any = taken[0] if players else None
    parts = seen.spaces if isinstance(seen, spaces.Dict) else {}
    for wrong, what in (
        (len(players) != 2, f"has {len(players)} player{'s' * (len(players) != 1)}"),
        (not {_OBS, _MASK} <= parts.keys(), f"shows {seen}"),
        (not isinstance(one, spaces.Discrete) or one.start != 0, f"takes {one}"),
        (any(space != seen for space in shown), "shows its players things of other shapes"),
        (any(space != one for space in taken), "lets its players choose from different things"),
    ):
        if wrong:
            raise ConfigError(
                f"'{game_id}' of PettingZoo {what}; expected a game of two players, who choose in "
                f"turn from what is allowed, a Dict with {_OBS} and {_MASK}\n"
                "    such are connect_four_v3, tictactoe_v3 and go_v5"
            )
    actions = ActionSpace("discrete", sizes=(int(one.n),), masked=True)
    return parts[_OBS], actions


@one_process()
def _made(game_id: str, options: Mapping[str, Any]) -> Any:
    module, _, function = game_id.partition(":")
    make = _own(game_id, module, function) if function else _pettingzoos(game_id)
    try:
        game = make(**options)
    except Exception as error:  # of many kinds
        raise ConfigError(f"game '{game_id}' cannot be made: it {_raised(error)}") from error
    _require(game_id, game, ("possible_agents", *_METHODS))
    return game


def _require(game_id: str, game: Any, names: Iterable[str]) -> None:
    missing = [name for name in names if not hasattr(game, name)]
    if not missing:
        return
    kind = type(game).__name__
    came = "None" if game is None else f"a{'n' * (kind[0] in 'AEIOU')} {kind}"
    raise ConfigError(
        f"'{game_id}' of PettingZoo returned {came}, which has no {missing[0]}; expected a game in "
        "PettingZoo's AEC form (possible_agents, agent_selection, observe, step ...)\n"
        "    return an AECEnv whose players choose in turn; games in which all move at once, as a "
        "ParallelEnv's, are not played here"
    )


def _pettingzoos(game_id: str) -> Callable[..., Any]:
    name = f"pettingzoo.classic.{game_id}"
    try:
        make = getattr(_imported(game_id, name), "env", None)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise ConfigError(
                f"{_needs(game_id, error)}\n    pip install penstock-rl[pettingzoo]; for card "
                "games also rlcard, for chess also chess"
            ) from error
        make = None
    if make is not None:
        return make
    where = importlib.import_module("pettingzoo.classic").__path__
    known = [found.name for found in pkgutil.iter_modules(where) if not found.ispkg]
    raise ConfigError(
        f"PettingZoo has no game '{game_id}'{nearest(game_id, known)}\n"
        "    a game of your own is task.id=module:function"
    )


def _own(game_id: str, module: str, function: str) -> Callable[..., Any]:
    try:
        found = _imported(game_id, module)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"there is no module for game '{game_id}'") from error
        fix = "penstock-rl[pettingzoo]" if error.name == "pettingzoo" else "it"
        raise ConfigError(
            f"{_needs(game_id, error)}\n    module {module} imports it; install {fix}"
        ) from error
    make = getattr(found, function, None)
    if callable(make):
        return make
    if hasattr(found, function):
        wrong = f"'{function}' of module {module} is {make!r:.60}"
    else:
        wrong = f"module {module} has no '{function}'{nearest(function, vars(found))}"
    raise ConfigError(
        f"game '{game_id}' cannot be made: {wrong}\n"
        "    task.id=module:function names a function that returns a game"
    )


def _imported(game_id: str, name: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what pygame imports warns of its own end
            return importlib.import_module(name)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # of many kinds
        raise ConfigError(f"game '{game_id}' cannot be imported: it {_raised(error)}") from error


def _needs(game_id: str, error: ModuleNotFoundError) -> str:
    package = str(error.name).partition(".")[0]
    return f"game '{game_id}' needs the package {package}, which is not installed"


def _raised(error: Exception) -> str:
    where = raised_at(error)
    place = "" if where.file == __file__ else f" ({where.short})"
    return f"raised {type(error).__name__}: {error}{place}"
