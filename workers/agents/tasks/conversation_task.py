"""The base class of tasks whose problems are answered in conversation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from ....dataflow.errors import ConfigError
from ...data.row_report import DataReport
from ...data.task import Message
from ...models.tokenizer import PRINTABLE
from ...verifiers.pool import VerifierSpec
from ..environment import Environment

TURNS = (
    "{% for message in messages %}{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\\n' }}{% endfor %}"
)
"""A chat template: every turn of the policy ends with the end of sequence, every other message with
a line feed. There is no generation prompt, and schemas of tools are not shown."""


class ConversationTask(ABC):
    """Problems by index, each with an environment; everything else has a default.

    Args:
        task_id: Names the task in messages and file names.
        prompts: The prompt of each problem, whose index is its position here.
        num_held_out: How many of them, the last ones, are kept for evaluation.

    Attributes:
        deterministic: Whether environments follow from problem, seed and turns alone.
        correct_score: A conversation with at least this sum of rewards counts as right.
        chat_template: How conversations are rendered with a tokenizer that has no template.

    Raises:
        ConfigError: If no problem is left to train on, or a held-out one is trained on.
    """

    deterministic: bool = True
    correct_score: float = 1.0
    chat_template: str = TURNS
    verifier: VerifierSpec | None = None

    def __init__(self, task_id: str, prompts: Sequence[str], num_held_out: int = 0) -> None:
        self.task_id, self._prompts = task_id, list(prompts)
        num_train = len(self._prompts) - num_held_out
        if num_held_out < 0 or num_train < 1:
            raise ConfigError(
                f"task '{task_id}' has {len(self._prompts)} prompts, of which {num_held_out} are "
                "held out\n    leave at least one to train on"
            )
        both = set(self._prompts[:num_train]) & set(self._prompts[num_train:])
        if both:
            raise ConfigError(
                f"task '{task_id}' trains on a held-out prompt: {min(both)!r:.80}\n    give each "
                "prompt once, or hold none out"
            )
        self.train = range(num_train)
        self.held_out = range(num_train, len(self._prompts))
        self.report = DataReport(f"task '{task_id}'")
        self.report.keep(len(self._prompts))

    @abstractmethod
    def environment(self, problem: int) -> Environment:
        """Return a new environment for one conversation about a problem."""

    @property
    def further_characters(self) -> str:
        """Characters beyond those of the prompts, for a tokenizer made of the task's."""
        return PRINTABLE

    def prompt_text(self, index: int) -> str:
        """Return the prompt."""
        return self._prompts[index]

    def messages(self, index: int) -> Sequence[Message] | None:
        """Return the prompt as one message of the user."""
        return [{"role": "user", "content": self.prompt_text(index)}]

    def tools(self, index: int) -> Sequence[Mapping[str, Any]] | None:
        """Return JSON schemas of the tools that the policy may call; none by default."""
        return None

    def answer_text(self, index: int) -> str | None:
        """Return a right answer to imitate in one turn; none by default."""
        return None

    def replies(self, index: int) -> Sequence[Sequence[Message]] | None:
        """Return a conversation to imitate, without its prompt; none by default."""
        return None

    def imitates_history(self, index: int) -> bool:
        """Return False: turns of the assistant in the prompt are not imitated."""
        return False

    def pair_texts(self, index: int) -> tuple[str, str] | None:
        """Return a better and a worse answer; none by default."""
        return None

    def score(self, index: int, response: str) -> float:
        """Score an answer without a conversation; refused by default.

        Raises:
            ConfigError: Always, unless overridden.
        """
        raise ConfigError(
            f"task '{self.task_id}' scores whole conversations only\n"
            "    train it with an algorithm that converses"
        )

    def verifier_call(self, index: int, response: str) -> tuple[Any, ...]:
        """Return the prompt and the response."""
        return (self.prompt_text(index), response)

    def where(self, index: int) -> str:
        """Return the task and the problem's index."""
        return f"{self.task_id}[{index}]"
