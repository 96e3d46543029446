"""An environment as the task of a run: what the configuration section `task` describes.

A task numbers problems. An environment is one, and so is a game, described by its specification so
that a run that goes on can tell whether it is still the same; there is nothing to imitate, score or
hold out.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...dataflow.option_checks import check_range
from ..data.row_report import DataReport
from ..data.task import PATIENCE, TaskSpec
from ..verifiers.pool import VerifierSpec
from .normalization import Normalizer
from .spec import EnvSpec


@dataclass(frozen=True, kw_only=True)
class EnvTaskSpec(EnvSpec):
    """An environment of Gymnasium, and how many step together."""

    acts_in: ClassVar[Literal["environment"]] = "environment"

    group_size: int | None = None
    """Rows that step together and share a worker, a seed and running moments; results depend on
    it. By default all rows, or an equal part where the algorithm needs several groups. Workers
    without a group have nothing to do."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "group_size", at_least=1)

    @property
    def env(self) -> EnvSpec:
        """Without what only a run needs to know."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(EnvSpec)}
        return EnvSpec(**fields)

    def build(self) -> EnvTask:
        """The task."""
        Normalizer(self.normalization, 1, self.spaces()[0])
        return EnvTask(self.id, self)


class EnvTask:
    """A `Task` without problems to solve one by one; see this module.

    Args:
        task_id: Its name.
        spec: What describes it, a dataclass of JSON.
    """

    train = range(1)
    held_out = range(1, 1)
    verifier: VerifierSpec | None = None
    correct_score = 0.0

    def __init__(self, task_id: str, spec: TaskSpec) -> None:
        self.task_id = task_id
        self.spec = spec
        self.report = DataReport(task_id)

    def prompt_text(self, index: int) -> str:
        """The specification as JSON, without what may change while a run is resumed."""
        described: Any = self.spec
        patience = {f.name: f.default for f in dataclasses.fields(described) if f.name in PATIENCE}
        described = dataclasses.replace(described, **patience)
        return json.dumps(dataclasses.asdict(described), sort_keys=True, default=str)

    def answer_text(self, index: int) -> str | None:
        """There is none."""

    def pair_texts(self, index: int) -> tuple[str, str] | None:
        """There are none."""

    def score(self, index: int, response: str) -> float:
        """Environments reward steps, not responses."""
        raise NotImplementedError("an environment scores no responses; see EnvWorker")

    def verifier_call(self, index: int, response: str) -> tuple[Any, ...]:
        """There is no verifier."""
        return ()

    def where(self, index: int) -> str:
        """Its name."""
        return self.task_id
