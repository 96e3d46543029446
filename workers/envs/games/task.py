"""A game of two players as the task of a run: what the configuration section `task` describes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ....dataflow.option_checks import check_range
from ..task import EnvTask
from .mnk_games import BoardSpec
from .spec import LibraryGame, LibraryGameSpec


@dataclass(frozen=True, kw_only=True)
class BoardTaskSpec:
    """A game of two players on a board, and how many games are played together."""

    game: BoardSpec = BoardSpec()
    """Its rules."""
    group_size: int | None = None
    """Games that are played together: their players are asked about all of them at once. By default
    all of them. Workers without a group have nothing to do."""

    def __post_init__(self) -> None:
        check_range(self, "group_size", at_least=1)

    @property
    def env(self) -> BoardSpec:
        """What players see and can do."""
        return self.game

    def build(self) -> EnvTask:
        """The task."""
        return EnvTask(self.game.title, self)


@dataclass(frozen=True, kw_only=True)
class LibraryGameTaskSpec(LibraryGame):
    """A game of two players of EnvPool or PettingZoo, and how many games are played together."""

    group_size: int | None = None
    """Games that are played together, as of `BoardTaskSpec`. By default all of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "group_size", at_least=1)

    @property
    def env(self) -> LibraryGameSpec:
        """Without what only a run needs to know."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(LibraryGame)}
        return LibraryGameSpec(**fields)

    def build(self) -> EnvTask:
        """The task.

        Raises:
            ConfigError: If the library is not installed or has no such game, or it is none for two
                players who choose in turn from what is allowed.
        """
        self.spaces()
        return EnvTask(self.id, self)
