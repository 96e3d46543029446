"""Problems of another task that are answered in another way: with tools, or by a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....dataflow.errors import ConfigError
from ...data.row_report import DataReport
from ...data.task import Converses, HasReplies, Message, Task
from ...models.tokenizer import PRINTABLE
from .conversation_task import TURNS


class AnsweredOtherwise:
    """See `Task`, `Converses`, `HasReplies` and `HasTemplate`; all but the way is the other task's.

    Args:
        task: The problems.
        way: How they are answered, for the task's name.

    Attributes:
        chat_template: See `HasTemplate`.

    Raises:
        ConfigError: If the task runs responses as programs.
    """

    chat_template: str = TURNS
    verifier = None

    def __init__(self, task: Task, way: str) -> None:
        if task.verifier is not None:
            raise ConfigError(
                f"'task.task': task '{task.task_id}' scores in processes of its own, and an answer "
                "in a conversation is scored where it is held\n    if the score is quick and safe, "
                "set task.task.reward_in_process=true; otherwise choose another task"
            )
        self._task = task
        self.task_id = f"{task.task_id} {way}"
        self.train, self.held_out = task.train, task.held_out
        self.correct_score = task.correct_score
        self.report: DataReport = task.report

    @property
    def further_characters(self) -> str:
        """Printable ASCII: whoever answers may write anything."""
        return PRINTABLE

    def messages(self, index: int) -> Sequence[Message] | None:
        """The other task's conversation, or its prompt as what a user says."""
        found = self._task.messages(index) if isinstance(self._task, Converses) else None
        return found or [{"role": "user", "content": self._task.prompt_text(index)}]

    def tools(self, index: int) -> Sequence[Mapping[str, Any]] | None:
        """None."""
        return None

    def imitates_history(self, index: int) -> bool:
        """As the other task says, if it has replies."""
        return isinstance(self._task, HasReplies) and self._task.imitates_history(index)

    def replies(self, index: int) -> Sequence[Sequence[Message]] | None:
        """The other task's, if it has some: they may call tools."""
        return self._task.replies(index) if isinstance(self._task, HasReplies) else None

    def prompt_text(self, index: int) -> str:
        """What the user said last."""
        return self._task.prompt_text(index)

    def answer_text(self, index: int) -> str | None:
        """A right answer."""
        return self._task.answer_text(index)

    def pair_texts(self, index: int) -> tuple[str, str] | None:
        """A better and a worse answer, if the other task has them."""
        return self._task.pair_texts(index)

    def score(self, index: int, response: str) -> float | None:
        """The other task's score of an answer."""
        return self._task.score(index, response)

    def verifier_call(self, index: int, response: str) -> tuple[Any, ...]:
        """As the other task's."""
        return self._task.verifier_call(index, response)

    def where(self, index: int) -> str:
        """Where the problem stands."""
        return self._task.where(index)
