"""Problems of another task, answered by a program that asks the policy.

The program is anybody's: it is given an address and a key as any client of an OpenAI-compatible
server is, and knows nothing of training. What it answers is scored by the other task.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from typing_extensions import override

from ....dataflow.errors import ConfigError
from ....dataflow.options import PositiveFloat, PositiveInt, option_class
from ...data.task import Task, TaskSpec, build_task
from ..programs.endpoint import check_extra
from ..programs.program import Access, AgentProgram, CommandProgram, FunctionProgram
from ..tools.functions import imported
from .tool_task import AnsweredOtherwise

_GIVEN = tuple(field.name for field in fields(Access))


@option_class
class ProgramTaskSpec:
    """Problems, and what answers them: a function or a command."""

    task: Any
    """The problems: an option of `task=`, or its keys, such as `{kind: file, path: p.jsonl}`."""
    function: str | None = None
    """`module:function`, plain or a coroutine function, called in a thread of its own with those of
    `base_url`, `api_key`, `messages`, `prompt` and `seed` that it has as arguments; it returns the
    answer."""
    command: tuple[str, ...] = ()
    """A command, for each problem in a process of its own with `OPENAI_BASE_URL` and
    `OPENAI_API_KEY` in its environment; it reads the prompt, and prints the answer."""
    max_running: PositiveInt = 16
    """Programs that run at once; the others begin when one ends."""
    time_limit_s: PositiveFloat = 300.0
    """Longest time for one problem."""
    max_branches: PositiveInt = 16
    """Most sequences of tokens of one conversation: branches, sub-agents, rewritten histories."""
    deterministic: bool = False
    """Whether what the program does is a function of the problem, its seed and the policy's turns
    alone; only its author knows."""

    def __post_init__(self) -> None:
        if (self.function is None) == (not self.command):
            raise ValueError("give either task.function or task.command")

    def with_specs(self, spec_of: Callable[[str, Any], TaskSpec]) -> ProgramTaskSpec:
        """Replace the task's section by its spec; `spec_of` takes a key and a section."""
        return replace(self, task=spec_of("'task.task'", self.task))

    def build(self) -> ProgramTask:
        return ProgramTask(self, build_task(self.task))


class ProgramTask(AnsweredOtherwise):
    """Problems of a task, answered by one program."""

    def __init__(self, spec: ProgramTaskSpec, task: Task) -> None:
        super().__init__(task, "by a program")
        check_extra()
        self._spec = spec
        if spec.command and shutil.which(spec.command[0]) is None:
            raise ConfigError(
                f"'task.command': there is no program '{spec.command[0]}'\n    give the path of "
                "one that may be run here"
            )
        self._program = (
            CommandProgram(spec.command) if spec.function is None else _function(spec.function)
        )
        self.deterministic = spec.deterministic
        self.time_limit_s, self.max_running = spec.time_limit_s, spec.max_running
        self.max_branches = spec.max_branches

    @override
    def program(self, problem: int) -> AgentProgram:
        return self._program


def _function(place: str) -> FunctionProgram:
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
    return FunctionProgram(found, tuple(named))
