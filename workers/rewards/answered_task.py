"""A task whose responses are compared with its answers by another verifier than its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from ..data.row_report import DataReport
from ..data.task import Task
from ..verifiers.pool import VerifierSpec
from ..verifiers.verifiers import load_verifier


@runtime_checkable
class HasRewardAnswer(Protocol):
    """A task that keeps the answer for a reward apart from the response to imitate."""

    def reward_answer(self, index: int) -> str | None:
        """What a reward compares a response with; None if there is nothing."""
        ...


def reward_answer(task: Task, index: int) -> str | None:
    """What a reward compares responses to a problem with."""
    if isinstance(task, HasRewardAnswer):
        return task.reward_answer(index)
    return task.answer_text(index)


class AnsweredTask:
    """A `Task` with the problems of another and a verifier by name.

    Args:
        task: The problems.
        verifier: See `load_verifier`.
        options: Further arguments of the verifier.

    Attributes:
        name: The verifier's.

    Raises:
        ConfigError: If the verifier cannot be loaded with these options.
    """

    def __init__(self, task: Task, verifier: str, options: Mapping[str, Any]) -> None:
        self._task = task
        self.name = verifier
        self._options = dict(options)
        self._verify = load_verifier(verifier, options)

    @property
    def task_id(self) -> str:
        """The problems' name."""
        return self._task.task_id

    @property
    def train(self) -> range:
        """Indices of the training problems."""
        return self._task.train

    @property
    def held_out(self) -> range:
        """Indices of the problems kept for evaluation."""
        return self._task.held_out

    @property
    def report(self) -> DataReport:
        """What was read and what was left out."""
        return self._task.report

    @property
    def correct_score(self) -> float:
        """1: what the named verifiers give a right response."""
        return 1.0

    @property
    def verifier(self) -> VerifierSpec | None:
        """How to score in another process; None for exact match, which is quick and safe."""
        if self.name == "exact_match":
            return None
        return VerifierSpec(
            factory="penstock.workers.verifiers.verifiers:make_verifier",
            arguments={"reward": self.name, "options": self._options},
        )

    def prompt_text(self, index: int) -> str:
        """What the model reads."""
        return self._task.prompt_text(index)

    def answer_text(self, index: int) -> str | None:
        """A right response to imitate, if the task knows one."""
        return self._task.answer_text(index)

    def pair_texts(self, index: int) -> tuple[str, str] | None:
        """A better and a worse response, if the task has them."""
        return self._task.pair_texts(index)

    def score(self, index: int, response: str) -> float | None:
        """Score here, without a time limit; raises whatever the verifier raises."""
        return self._verify(*self.verifier_call(index, response))

    def verifier_call(self, index: int, response: str) -> tuple[Any, ...]:
        """Prompt, response and answer."""
        return (self._task.prompt_text(index), response, reward_answer(self._task, index))

    def where(self, index: int) -> str:
        """Where the problem stands."""
        return self._task.where(index)
