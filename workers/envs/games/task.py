"""A game of two players as the task of a run: what the configuration section `task` describes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar, Literal

from ....algorithms.roles.environment import ActionSpace
from ....dataflow.options import PositiveFloat, PositiveInt, option_class
from ....dataflow.runtime.worker_protocol import WorkerContext
from ..task import EnvTask
from .boards import Boards, GameNames
from .mnk_games import BoardSpec
from .pool import PoolBoards, pool_game_spaces
from .worker import BoardGameWorker
from .zoo import ZooBoards, zoo_game_spaces


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
        """Return the numbers of an observation, and the actions that there are."""
        found = pool_game_spaces if self.backend == "envpool" else zoo_game_spaces
        return found(self.id, self.options)

    def boards(self, names: GameNames) -> Boards:
        """Begin games, each with a seed of its own; raises as `spaces`."""
        made = PoolBoards if self.backend == "envpool" else ZooBoards
        return made(self.id, self.options, names, self.step_limit_s)


@option_class
class LibraryGameSpec(LibraryGame):
    """A game of a library, and the recipe for the worker that plays it."""

    def build(self, context: WorkerContext) -> BoardGameWorker:
        """Make the worker; it keeps nothing from call to call."""
        return BoardGameWorker(self, context)


@option_class
class BoardTaskSpec:
    """A game of two players on a board, and how many games are played together."""

    acts_in: ClassVar[Literal["game"]] = "game"

    game: BoardSpec = BoardSpec()
    """Its rules."""
    group_size: PositiveInt | None = None
    """Games that are played together: their players are asked about all of them at once. By default
    all of them. Workers without a group have nothing to do."""

    @property
    def env(self) -> BoardSpec:
        """The rules that players see."""
        return self.game

    def build(self) -> EnvTask:
        """The task."""
        return EnvTask(self.game.title, self)


@option_class
class LibraryGameTaskSpec(LibraryGame):
    """A game of two players of EnvPool or PettingZoo, and how many games are played together."""

    acts_in: ClassVar[Literal["game"]] = "game"

    group_size: PositiveInt | None = None
    """Games that are played together, as of `BoardTaskSpec`. By default all of them."""

    @property
    def env(self) -> LibraryGameSpec:
        """Without what only a run needs to know."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(LibraryGame)}
        return LibraryGameSpec(**fields)

    def build(self) -> EnvTask:
        """The task."""
        self.spaces()
        return EnvTask(self.id, self)
