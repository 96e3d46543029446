"""Problems of another task, answered by a program that asks the policy.

The program is anybody's: it is given an address and a key as any client of an OpenAI-compatible
server is, and knows nothing of training. What it answers is scored by the other task.
"""

from __future__ import annotations

import asyncio
import inspect
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ....dataflow.errors import ConfigError
from ....dataflow.option_checks import check_range
from ...data.row_report import DataReport
from ...data.task import Converses, Message, Task
from ...models.tokenizer import PRINTABLE
from ..programs.endpoint import check_extra
from ..programs.program import Access, Command, Function, Program
from ..tools.functions import imported
from .generated_task import TURNS

__all__ = ["ProgramTask", "ProgramTaskSpec"]

_GIVEN = tuple(field.name for field in fields(Access))


@dataclass(frozen=True, kw_only=True)
class ProgramTaskSpec:
    """Which problems, and what answers them: a function or a command."""

    task: Any
    """The problems: an option of `task=`, or its keys, such as `{kind: file, path: p.jsonl}`."""
    function: str | None = None
    """`module:function`, plain or a coroutine function, called in a thread of its own with those of
    `base_url`, `api_key`, `messages`, `prompt` and `seed` that it has as arguments; it returns the
    answer."""
    command: tuple[str, ...] = ()
    """A command, for each problem in a process of its own with `OPENAI_BASE_URL` and
    `OPENAI_API_KEY` in its environment; it reads the prompt, and prints the answer."""
    num_processes: int = 8
    """Commands that run at once."""
    time_limit_s: float = 300.0
    """Longest time for one problem."""
    max_branches: int = 16
    """Most sequences of tokens of one conversation: branches, sub-agents, rewritten histories."""
    deterministic: bool = False
    """Whether what the program does is a function of the problem, its seed and the policy's turns
    alone; only its author knows."""

    def __post_init__(self) -> None:
        check_range(self, "num_processes", at_least=1)
        check_range(self, "time_limit_s", above=0)
        check_range(self, "max_branches", at_least=1)
        if (self.function is None) == (not self.command):
            raise ValueError("give either task.function or task.command")

    def build(self) -> ProgramTask:
        """Build the task, and look for the program.

        Raises:
            ConfigError: If there is no such program, or the task runs responses as programs.
        """
        return ProgramTask(self, self.task.build())


class ProgramTask:
    """See `ProgramTaskSpec`; a `Task` that `Converses` and `HasPrograms`.

    Args:
        spec: What answers the problems.
        task: The problems.

    Attributes:
        chat_template: See `HasTemplate`.
    """

    chat_template: str = TURNS

    def __init__(self, spec: ProgramTaskSpec, task: Task) -> None:
        if task.verifier is not None:
            raise ConfigError(
                f"'task.task': task '{task.task_id}' scores in processes of its own, and a "
                "program's answer is scored where it is held\n    choose a task whose score is "
                "quick and safe"
            )
        check_extra()
        self._spec, self._task = spec, task
        self._program = None if spec.function is None else _function(spec.function)
        if spec.command and shutil.which(spec.command[0]) is None:
            raise ConfigError(
                f"'task.command': there is no program '{spec.command[0]}'\n    give the path of "
                "one that may be run here"
            )
        self._room: asyncio.Semaphore | None = None
        self.deterministic = spec.deterministic
        self.time_limit_s, self.max_branches = spec.time_limit_s, spec.max_branches
        self.task_id = f"{task.task_id} by a program"
        self.train, self.held_out = task.train, task.held_out
        self.correct_score, self.verifier = task.correct_score, None
        self.report: DataReport = task.report

    @property
    def further_characters(self) -> str:
        """Printable ASCII: a program may show anything."""
        return PRINTABLE

    def program(self, problem: int) -> Program:
        """The same for every problem; called in the event loop that it runs in."""
        del problem
        if self._program is not None:
            return self._program
        if self._room is None:
            self._room = asyncio.Semaphore(self._spec.num_processes)
        return Command(self._spec.command, self._room)

    async def close_environments(self) -> None:
        """Nothing is left running; the next event loop gets room of its own."""
        self._room = None

    def outcome(self, problem: int, answer: str) -> float:
        """The other task's score."""
        return self._task.score(problem, answer)

    def messages(self, index: int) -> Sequence[Message] | None:
        """The other task's conversation, or its prompt as what a user says."""
        found = self._task.messages(index) if isinstance(self._task, Converses) else None
        return found or [{"role": "user", "content": self._task.prompt_text(index)}]

    def tools(self, index: int) -> Sequence[Mapping[str, Any]] | None:
        """None: the program says what may be called."""
        del index
        return None

    def prompt_text(self, index: int) -> str:
        """What the user said last."""
        return self._task.prompt_text(index)

    def answer_text(self, index: int) -> str | None:
        """A right answer."""
        return self._task.answer_text(index)

    def pair_texts(self, index: int) -> tuple[str, str] | None:
        """A better and a worse answer, if the other task has them."""
        return self._task.pair_texts(index)

    def score(self, index: int, response: str) -> float:
        """The other task's score of an answer."""
        return self._task.score(index, response)

    def verifier_call(self, index: int, response: str) -> tuple[Any, ...]:
        """As the other task's."""
        return self._task.verifier_call(index, response)

    def where(self, index: int) -> str:
        """Where the problem stands."""
        return self._task.where(index)


def _function(place: str) -> Function:
    """The function at `module:function`.

    Raises:
        ConfigError: If there is none, or it has other arguments.
    """
    found = imported(place)
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"'task.function': '{place}' cannot be called: {error}") from error
    named = [p.name for p in parameters if p.name in _GIVEN]
    for parameter in parameters:
        if parameter.name not in _GIVEN and parameter.default is parameter.empty:
            raise ConfigError(
                f"'task.function': '{place}' has an argument '{parameter.name}'\n    a program is "
                f"given those of {', '.join(_GIVEN)} that it has"
            )
    return Function(found, tuple(named))
