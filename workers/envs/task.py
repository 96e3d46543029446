"""An environment as the task of a run: what the configuration section `task` describes.

A task numbers problems. An environment is one, and so is a game, described by its specification so
that a run that goes on can tell whether it is still the same; there is nothing to imitate, score or
hold out. A step reads a table of which environments or games there are, and which step together.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from ...algorithms.roles.environment import EnvRows, GameRows
from ...dataflow.options import PositiveInt, option_class
from ..data.task import PATIENCE, DataReport, Task, TaskSpec
from .live import Normalizer
from .spec import EnvSpec


@option_class
class EnvTaskSpec(EnvSpec):
    """An environment of Gymnasium, and how many step together."""

    acts_in: ClassVar[Literal["environment"]] = "environment"

    group_size: PositiveInt | Literal["auto"] | None = None
    """Rows that step together and share a worker, a seed and running moments; results depend on
    it. By default all rows, or an equal part where the algorithm needs several groups; `auto`: as
    the plan says. Workers without a group have nothing to do."""

    @property
    def env(self) -> EnvSpec:
        """Without what only a run needs to know."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(EnvSpec)}
        return EnvSpec(**fields)

    def build(self) -> EnvTask:
        Normalizer(self.normalization, 1, self.spaces()[0])  # which refuses other moments
        return EnvTask(self.id, self)


class EnvTask(Task):
    """A task without problems to solve one by one, described by a dataclass of JSON."""

    train = range(1)
    held_out = range(1, 1)
    correct_score = 0.0

    def __init__(self, task_id: str, spec: TaskSpec) -> None:
        self.task_id, self.spec, self.report = task_id, spec, DataReport(task_id)

    @override
    def prompt_text(self, index: int) -> str:
        """Return the specification as JSON, without what may change while a run is resumed."""
        described: Any = self.spec
        patience = {f.name: f.default for f in dataclasses.fields(described) if f.name in PATIENCE}
        described = dataclasses.replace(described, **patience)
        return json.dumps(dataclasses.asdict(described), sort_keys=True, default=str)

    @override
    def score(self, index: int, response: str) -> float:
        raise NotImplementedError("an environment scores no responses; see EnvWorker")

    @override
    def verifier_call(self, index: int, response: str) -> tuple[Any, ...]:
        return ()

    @override
    def where(self, index: int) -> str:
        return self.task_id


class EnvRowSource:
    """The same environments for every step; the last group may have fewer."""

    def __init__(self, num_envs: int, group_size: int) -> None:
        env, group = _numbered(num_envs, group_size, "num_envs")
        self._rows = EnvRows(env=env, group=group)

    def batch(self, step: int) -> EnvRows:
        return self._rows


class GameRowSource:
    """As many games in every step, all of them new; the last group may have fewer."""

    def __init__(self, num_games: int, group_size: int) -> None:
        game, group = _numbered(num_games, group_size, "num_games")
        self._rows = GameRows(game=game, group=group)

    def batch(self, step: int) -> GameRows:
        return self._rows


def _numbered(count: int, group_size: int, name: str) -> tuple[Tensor, Tensor]:
    if count < 1 or group_size < 1:
        raise ValueError(f"{name} is {count} and group_size {group_size}; expected at least 1")
    numbers = torch.arange(count)
    return numbers, numbers // group_size
