"""Several tasks in one, each with its share of every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from typing_extensions import override

from ...dataflow.errors import ConfigError, nearest
from .task import Task, TaskSpec, WrappedTask, build_task, handed_on


@dataclass(frozen=True, kw_only=True)
class MixtureTaskSpec:
    """Tasks, and how much of each."""

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
        return MixtureTask(self)


class MixtureTask(WrappedTask):
    """Problems of several tasks, each with its share of every step."""

    def __init__(self, spec: MixtureTaskSpec) -> None:
        weights = _weights(spec)
        self._names = list(spec.tasks)
        self._tasks = [build_task(task) for task in spec.tasks.values()]
        if streams := [n for n, t in zip(spec.tasks, self._tasks, strict=True) if t.buffer_rows]:
            raise ConfigError(
                f"'task.tasks.{streams[0]}' is a stream, and a mixture knows all its problems\n"
                "    give max_rows, or set streaming=false"
            )
        super().__init__(self._tasks[0], "mixture")
        scores = {n: task.correct_score for n, task in zip(spec.tasks, self._tasks, strict=True)}
        if len(set(scores.values())) > 1:
            told = ", ".join(f"{name} at {score:g}" for name, score in scores.items())
            raise ConfigError(
                "the tasks of the mixture count responses as right at different scores: "
                f"{told}\n    give them the same correct_score"
            )
        for task in self._tasks[1:]:
            self.report = self.report.joined(task.report)
        self._problems: list[tuple[int, int]] = []
        ranges = [self._add(part, self._trained(part)) for part in range(len(self._tasks))]
        self.train = range(len(self._problems))
        self._held_out = [self._add(p, task.held_out) for p, task in enumerate(self._tasks)]
        self.held_out = range(len(self.train), len(self._problems))
        total = sum(weights)
        self.shares = [
            (weight / total, part) for weight, part in zip(weights, ranges, strict=True) if weight
        ]
        self.tells_calls = any(task.tells_calls for task in self._tasks)

    @override
    def suites(self) -> dict[str, Sequence[int]]:
        found: dict[str, Sequence[int]] = {}
        for name, task, part in zip(self._names, self._tasks, self._held_out, strict=True):
            moved = part.start - task.held_out.start
            suites = task.suites()
            for suite, indices in suites.items():
                found[f"{name}/{suite}"] = [index + moved for index in indices]
            if part and not suites:
                found[name] = part
        return found

    @override
    def scorers(self) -> Sequence[Task]:
        return [scorer for task in self._tasks for scorer in task.scorers()]

    @override
    def scored_by(self, index: int) -> tuple[Task, int]:
        task, own = self.at(index)
        return task.scored_by(own)

    @override
    def column_names(self) -> Sequence[str]:
        return [*dict.fromkeys(name for task in self._tasks for name in task.column_names())]

    reward_answer = handed_on(Task.reward_answer)
    pair_scores = handed_on(Task.pair_scores)

    @override
    def verifier_call(self, index: int, response: str) -> tuple[Any, ...]:
        """Return which task, and its call."""
        part, own = self._problems[index]
        return (part, *self._tasks[part].verifier_call(own, response))

    @override
    def where(self, index: int) -> str:
        part, own = self._problems[index]
        return f"{self._names[part]}: {self._tasks[part].where(own)}"

    @override
    def at(self, index: int) -> tuple[Task, int]:
        part, own = self._problems[index]
        return self._tasks[part], own

    def _add(self, part: int, problems: Sequence[int]) -> range:
        start = len(self._problems)
        self._problems += [(part, index) for index in problems]
        return range(start, len(self._problems))

    def _trained(self, part: int) -> list[int]:
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
