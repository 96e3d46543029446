"""Several tasks in one, each with its share of every step."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ...dataflow.errors import ConfigError, nearest
from ..verifiers.child import as_score
from ..verifiers.pool import VerifierSpec
from .task import Converses, HasReplies, HasSuites, ScoresPairs, Task, TaskSpec, TellsCalls


@dataclass(frozen=True, kw_only=True)
class MixtureTaskSpec:
    """Which tasks, and how much of each."""

    tasks: Mapping[str, Any]
    """Name -> a task's own section: an option of `task=`, or its keys, such as `{kind: file, path:
    problems.jsonl}`."""
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    """Name -> its weight; 1 for a task that is left out. 0 leaves it to evaluation alone."""

    is_mixture: ClassVar[bool] = True

    def with_specs(self, spec_of: Callable[[str, Any], TaskSpec]) -> MixtureTaskSpec:
        """Replace the tasks' sections by their specs; `spec_of` takes a key and a section."""
        specs = {name: spec_of(f"'task.tasks.{name}'", own) for name, own in self.tasks.items()}
        return replace(self, tasks=specs)

    def build(self) -> MixtureTask:
        """Build every task.

        Raises:
            ConfigError: If a task cannot be built, the weights add up to nothing, or the tasks do
                not fit together.
        """
        return MixtureTask(self)


class MixtureTask:
    """Problems of several tasks; see `Task` for the methods, and `HasShares` for `shares`."""

    task_id = "mixture"

    def __init__(self, spec: MixtureTaskSpec) -> None:
        weights = _weights(spec)
        self._names = list(spec.tasks)
        self._tasks: list[Task] = [task.build() for task in spec.tasks.values()]
        self.correct_score = _correct_score(spec.tasks, self._tasks)
        self.report = self._tasks[0].report
        for task in self._tasks[1:]:
            self.report = self.report.joined(task.report)
        self._problems: list[tuple[int, int]] = []
        ranges = [self._add(part, self._trained(part)) for part in range(len(self._tasks))]
        self.train = range(len(self._problems))
        self._held_out = [self._add(p, task.held_out) for p, task in enumerate(self._tasks)]
        self.held_out = range(len(self.train), len(self._problems))
        total = sum(weights)
        self.shares: Sequence[tuple[float, range]] = [
            (weight / total, part) for weight, part in zip(weights, ranges, strict=True) if weight
        ]

    def suites(self) -> dict[str, Sequence[int]]:
        """Each task's held-out problems, by its own suites if it has them; see `HasSuites`."""
        found: dict[str, Sequence[int]] = {}
        for name, task, part in zip(self._names, self._tasks, self._held_out, strict=True):
            if isinstance(task, HasSuites):
                moved = part.start - task.held_out.start
                for suite, indices in task.suites().items():
                    found[f"{name}/{suite}"] = [index + moved for index in indices]
            elif part:
                found[name] = part
        return found

    @property
    def verifier(self) -> VerifierSpec | None:
        """One that knows those of all tasks; None if none of them needs a process of its own."""
        verifiers = [task.verifier for task in self._tasks]
        if all(verifier is None for verifier in verifiers):
            return None
        known = {
            str(part): [verifier.factory, dict(verifier.arguments)]
            for part, verifier in enumerate(verifiers)
            if verifier is not None
        }
        factory = "penstock.workers.data.mixture_task:make_verifier"
        return VerifierSpec(factory=factory, arguments={"verifiers": known})

    def prompt_text(self, index: int) -> str:
        """The task's."""
        task, own = self._at(index)
        return task.prompt_text(own)

    def messages(self, index: int) -> Sequence[Mapping[str, Any]] | None:
        """The task's, if it has conversations; see `Converses`."""
        task, own = self._at(index)
        return task.messages(own) if isinstance(task, Converses) else None

    def tools(self, index: int) -> Sequence[Mapping[str, Any]] | None:
        """The task's, if it has conversations."""
        task, own = self._at(index)
        return task.tools(own) if isinstance(task, Converses) else None

    @property
    def tells_calls(self) -> bool:
        """Whether one of the tasks tells its calls; see `TellsCalls`."""
        return any(isinstance(task, TellsCalls) and task.tells_calls for task in self._tasks)

    def replies(self, index: int) -> Sequence[Sequence[Mapping[str, Any]]] | None:
        """The task's, if it has replies; see `HasReplies`."""
        task, own = self._at(index)
        return task.replies(own) if isinstance(task, HasReplies) else None

    def imitates_history(self, index: int) -> bool:
        """The task's, if it has replies."""
        task, own = self._at(index)
        return isinstance(task, HasReplies) and task.imitates_history(own)

    def answer_text(self, index: int) -> str | None:
        """The task's."""
        task, own = self._at(index)
        return task.answer_text(own)

    def reward_answer(self, index: int) -> str | None:
        """The task's; see `HasRewardAnswer`."""
        task, own = self._at(index)
        answer_of: Callable[[int], str | None] = getattr(task, "reward_answer", task.answer_text)
        return answer_of(own)

    def pair_texts(self, index: int) -> tuple[str, str] | None:
        """The task's."""
        task, own = self._at(index)
        return task.pair_texts(own)

    def pair_scores(self, index: int) -> tuple[float, float] | None:
        """The task's, if it has scores; see `ScoresPairs`."""
        task, own = self._at(index)
        return task.pair_scores(own) if isinstance(task, ScoresPairs) else None

    def score(self, index: int, response: str) -> float | None:
        """The task's."""
        task, own = self._at(index)
        return task.score(own, response)

    def verifier_call(self, index: int, response: str) -> tuple[Any, ...]:
        """Which task, and its call; of a task that needs no process, the score itself."""
        part, own = self._problems[index]
        task = self._tasks[part]
        if task.verifier is not None:
            return (str(part), list(task.verifier_call(own, response)))
        if self.verifier is None:
            return (part, *task.verifier_call(own, response))
        try:
            return ("score", [as_score(task.score(own, response))])
        except Exception as error:  # raised again where it is counted
            return ("error", [repr(error)])

    def where(self, index: int) -> str:
        """The task's name, and where it has the problem."""
        part, own = self._problems[index]
        return f"{self._names[part]}: {self._tasks[part].where(own)}"

    def _at(self, index: int) -> tuple[Task, int]:
        part, own = self._problems[index]
        return self._tasks[part], own

    def _add(self, part: int, problems: Sequence[int]) -> range:
        start = len(self._problems)
        self._problems += [(part, index) for index in problems]
        return range(start, len(self._problems))

    def _trained(self, part: int) -> list[int]:
        """The task's training problems, without those that another task holds out."""
        held_out = {
            task.prompt_text(index)
            for number, task in enumerate(self._tasks)
            if number != part
            for index in task.held_out
        }
        task, kept = self._tasks[part], list[int]()
        for index in task.train:
            if task.prompt_text(index) in held_out:
                self.report.drop(task.where(index), "prompt is held out by another task")
            else:
                kept.append(index)
        return kept


def make_verifier(verifiers: Mapping[str, Sequence[Any]]) -> Callable[[str, Sequence[Any]], Any]:
    """A verifier of several tasks, in a process of its own: part -> factory and its arguments."""
    known: dict[str, Any] = {}
    for part, (factory, arguments) in verifiers.items():
        module, _, name = factory.partition(":")
        known[part] = getattr(importlib.import_module(module), name)(**arguments)

    def verify(part: str, call: Sequence[Any]) -> Any:
        if part == "error":
            raise ValueError(call[0])
        return call[0] if part == "score" else known[part](*call)

    return verify


def _weights(spec: MixtureTaskSpec) -> list[float]:
    if not spec.tasks:
        raise ConfigError(
            "'task.tasks' is empty\n    give at least one: task.tasks={sums: chain_sum}"
        )
    for name, weight in spec.weights.items():
        if name not in spec.tasks:
            raise ConfigError(
                f"'task.weights.{name}': there is no task '{name}'{nearest(name, spec.tasks)}\n"
                f"    tasks are: {', '.join(spec.tasks)}"
            )
        if not weight >= 0 or not math.isfinite(weight):
            raise ConfigError(
                f"'task.weights.{name}' is {weight:g}\n    give a number that is at least 0"
            )
    weights = [spec.weights.get(name, 1.0) for name in spec.tasks]
    if not sum(weights):
        raise ConfigError(
            "'task.weights' add up to 0, so no task would be trained on\n"
            "    give at least one of them a weight above 0"
        )
    return weights


def _correct_score(names: Mapping[str, Any], tasks: Sequence[Task]) -> float:
    scores = {name: task.correct_score for name, task in zip(names, tasks, strict=True)}
    if len(set(scores.values())) > 1:
        told = ", ".join(f"{name} at {score:g}" for name, score in scores.items())
        raise ConfigError(
            f"the tasks of the mixture count responses as right at different scores: {told}\n"
            "    give them the same correct_score"
        )
    return next(iter(scores.values()))
