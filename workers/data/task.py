"""Tasks: problems with a prompt, an answer to imitate and a verifier, by index.

A task numbers its problems once: training problems come first, held-out problems after them, and
no prompt text stands in both. A problem's index is the `prompt_id` of the tables, so a reward
worker that built the same task finds the problem from the id alone.

This module owns the protocol; it reads no data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ...dataflow.errors import WorkerError, one_process
from ..verifiers.pool import VerifierSpec
from .row_report import DataReport

if TYPE_CHECKING:
    from torch import Tensor

PATIENCE = ("max_restarts", "step_limit_s")
"""Fields of how much may go wrong, not of what is computed: a resumed run may change them."""

Message = Mapping[str, Any]
"""One turn of a conversation: `{"role": "user", "content": "Hello"}`."""


@runtime_checkable
class Task(Protocol):
    """Problems by index; building the same spec again gives the same problems."""

    @property
    def task_id(self) -> str:
        """Names the task in logs and file names: "chain_sum"."""
        ...

    @property
    def train(self) -> range:
        """Indices of the training problems."""
        ...

    @property
    def held_out(self) -> range:
        """Indices of the problems kept for evaluation; their prompts are not in `train`."""
        ...

    @property
    def report(self) -> DataReport:
        """What was read and what was left out."""
        ...

    @property
    def correct_score(self) -> float:
        """A response with at least this score counts as right."""
        ...

    @property
    def verifier(self) -> VerifierSpec | None:
        """How to score in another process under a time limit; None if `score` is quick and safe."""
        ...

    def prompt_text(self, index: int) -> str:
        """What the model reads; of a conversation, what the user said last."""
        ...

    def answer_text(self, index: int) -> str | None:
        """A right response to imitate, or None if the task knows none."""
        ...

    def pair_texts(self, index: int) -> tuple[str, str] | None:
        """A better and a worse response, or None if the task has no explicit pairs."""
        ...

    def score(self, index: int, response: str) -> float | None:
        """Score a response, in this process; None if the task cannot say.

        It may return and raise whatever a verifier does: `as_score` reads it.
        """
        ...

    def verifier_call(self, index: int, response: str) -> tuple[Any, ...]:
        """Arguments, as JSON, for the verifier that `verifier` makes elsewhere."""
        ...

    def where(self, index: int) -> str:
        """Where the problem stands, for messages: "train.jsonl:17"."""
        ...


@runtime_checkable
class ScoresPairs(Protocol):
    """A task that may know how good the responses of its pairs are. Optional."""

    def pair_scores(self, index: int) -> tuple[float, float] | None:
        """Scores of the better and the worse response, or None."""
        ...


@runtime_checkable
class Converses(Protocol):
    """A task whose prompts may be conversations, which the tokenizer's template renders. Optional.

    `prompt_text` stays what verifiers and people read.
    """

    def messages(self, index: int) -> Sequence[Message] | None:
        """The conversation to continue; None if the prompt is the text that `prompt_text` gives."""
        ...

    def tools(self, index: int) -> Sequence[Mapping[str, Any]] | None:
        """JSON schemas of what the model may call, or None."""
        ...


@runtime_checkable
class TellsCalls(Protocol):
    """A task whose prompts or demonstrations tell how its tools are called. Optional.

    Attributes:
        tells_calls: Whether it does: then a chat template that shows no tools is as good as one
            that does, and nothing is shown in its place.
    """

    tells_calls: bool


@runtime_checkable
class HasReplies(Protocol):
    """A task whose answers and pairs may be messages that follow the prompt's. Optional."""

    def imitates_history(self, index: int) -> bool:
        """Whether the assistant's turns before the last one are imitated, too."""
        ...

    def replies(self, index: int) -> Sequence[Sequence[Message]] | None:
        """The reply to imitate, or the better and the worse one; None if they are texts."""
        ...


@runtime_checkable
class HasTemplate(Protocol):
    """A task whose conversations suit a tokenizer without a chat template. Optional.

    Attributes:
        chat_template: A template for such a tokenizer, in Jinja.
    """

    chat_template: str

    @property
    def further_characters(self) -> str:
        """What its template, its policy and its environments may write beyond what it shows."""
        ...


@runtime_checkable
class HasPassRates(Protocol):
    """A task that may know how often its problems are solved. Optional."""

    def pass_rate(self, index: int) -> float | None:
        """From 0 to 1; None if it is not known."""
        ...


@runtime_checkable
class HasShares(Protocol):
    """A task of several parts, each with a share of every step. Optional."""

    @property
    def shares(self) -> Sequence[tuple[float, range]]:
        """The share and the training problems of each part; shares add up to 1."""
        ...


@runtime_checkable
class HasSuites(Protocol):
    """A task whose held-out problems fall into kinds that are evaluated apart. Optional."""

    def suites(self) -> Mapping[str, Sequence[int]]:
        """Name of a suite -> indices of held-out problems."""
        ...


@runtime_checkable
class TaskSpec(Protocol):
    """Picklable recipe for a task."""

    def build(self) -> Task:
        """Make the task: read or generate its problems.

        Raises:
            ConfigError: If the options do not make a usable task.
        """
        ...


def task_alphabet(task: Task) -> str:
    """Every character of the task's prompts, answers and pairs, sorted: the smallest alphabet.

    A policy can only write these characters, which is right where answers share an alphabet. A task
    that `HasTemplate` says which others there are.
    """
    found: set[str] = set()
    if isinstance(task, HasTemplate):
        found.update(task.further_characters)
    for index in (*task.train, *task.held_out):
        with one_process():
            found.update(task.prompt_text(index), task.answer_text(index) or "")
            for text in task.pair_texts(index) or ():
                found.update(text)
    return "".join(sorted(found))


def fingerprint(task: Task) -> str:
    """SHA-256 over all that a task says of every problem, in order, as 16 hex digits.

    Equal fingerprints mean that an index names the same problem in another process or another run:
    the same prompt, the same answer and pair to learn from, and the same call of the verifier.
    """
    digest = hashlib.sha256()
    for index in (*task.train, *task.held_out):
        with one_process():
            problem = (
                task.prompt_text(index),
                task.answer_text(index),
                task.pair_texts(index),
                task.verifier_call(index, ""),
            )
            if isinstance(task, ScoresPairs) and (scores := task.pair_scores(index)) is not None:
                problem = (*problem, scores)
            if isinstance(task, Converses) and (messages := task.messages(index)) is not None:
                problem = (*problem, messages, task.tools(index))
            if isinstance(task, HasReplies) and (replies := task.replies(index)) is not None:
                problem = (*problem, replies)
        digest.update(json.dumps(problem).encode() + b"\n")
    digest.update(f"{task.train} {task.held_out}".encode())
    return digest.hexdigest()[:16]


def same_task(spec: TaskSpec, task_fingerprint: str | None, role: str) -> Task:
    """The task built in this process, where its indices name the problems they name elsewhere.

    Raises:
        ConfigError: If it cannot be built.
        WorkerError: If its fingerprint is another one; None asks for none.
    """
    with one_process():
        task = spec.build()
    if task_fingerprint not in (None, fingerprint(task)):
        raise WorkerError(
            f"role '{role}': task '{task.task_id}' has other problems in this process "
            "than where its prompts come from, so answers would be scored against the wrong "
            "ones\n    set PYTHONHASHSEED=0, and see that all machines read the same data"
        )
    return task


def checked_problems(task: Task, prompt_id: Tensor) -> list[int]:
    """The rows' problems, as indices into the task.

    Raises:
        WorkerError: If an index is not one of the task's.
    """
    problems = [int(index) for index in prompt_id.tolist()]
    number = len(task.train) + len(task.held_out)
    for index in problems:
        if not 0 <= index < number:
            raise WorkerError(
                f"prompt_id {index} is not a problem of task '{task.task_id}', which has "
                f"{number}\n    give prompts and reward the same task"
            )
    return problems
