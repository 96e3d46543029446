"""Problems of another task, answered with tools at hand or by a program that asks the policy.

With tools, a turn that calls some is answered by them; a turn that calls none is the answer. The
task's demonstrations call tools where they are messages that do. A program is anybody's: it is
given an address and a key as any client of an OpenAI-compatible server is, and knows nothing of
training. Either's answer is scored by the other task.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from typing_extensions import override

from ....dataflow.errors import ConfigError, nearest
from ....dataflow.options import PositiveFloat, PositiveInt, option_class
from ...data.task import Message, Task, TaskSpec, WrappedTask, build_task
from ..environment import Environment
from ..programs.endpoint import check_extra
from ..programs.program import Access, AgentProgram, CommandProgram, FunctionProgram
from ..tools.functions import FunctionTools, imported
from ..tools.mcp_tools import McpTools
from ..tools.python_tool import PythonTools
from ..tools.search_tool import SearchTools
from ..tools.tool import Tool, Toolbox, ToolEnvironment, ToolLimits, check_names, schemas_of


class AnsweredOtherwise(WrappedTask):
    """All but the way in which they are answered is the other task's."""

    def __init__(self, task: Task, way: str) -> None:
        if task.needs_process:
            raise ConfigError(
                f"'task.task': task '{task.task_id}' scores in processes of its own, and an answer "
                "in a conversation is scored where it is held\n    if the score is quick and safe, "
                "set task.task.reward_in_process=true; otherwise choose another task"
            )
        if any(one.reads_tokens for one in task.verifiers().values()):
            raise ConfigError(
                f"'task.task': a reward of task '{task.task_id}' reads tokens, and an answer in a "
                "conversation is scored as a text\n    take `response` instead of "
                "`response_token_ids`, and no `tokenizer`"
            )
        super().__init__(task, f"{task.task_id} {way}")

    @override
    def messages(self, index: int) -> Sequence[Message]:
        found = super().messages(index)
        return found or [{"role": "user", "content": self.prompt_text(index)}]


TOOLBOXES: Mapping[str, type[Toolbox]] = {
    "functions": FunctionTools,
    "python": PythonTools,
    "mcp": McpTools,
    "search": SearchTools,
}
"""Kind of a toolbox, as configurations name it, and its recipe."""


@dataclass(frozen=True, kw_only=True)
class ToolTaskSpec:
    """Problems and tools."""

    task: Any
    """The problems: an option of `task=`, or its keys, such as `{kind: file, path: p.jsonl}`."""
    tools: Mapping[str, Any]
    """Name of a toolbox -> its kind and options: `{kind: functions, functions:
    ["my_module:lookup"]}`, `{kind: python}`, `{kind: mcp, command: [my-server]}`, `{kind: search,
    path: texts.jsonl}`."""
    limits: ToolLimits = field(default_factory=ToolLimits)
    """Limits of a conversation."""
    tells_calls: bool = False
    """Whether prompts or demonstrations teach how the tools are called, so that nothing is shown in
    place of a chat template that shows no tools."""

    def with_specs(self, spec_of: Callable[[str, Any], TaskSpec]) -> ToolTaskSpec:
        """Replace the task's section by its spec; `spec_of` takes a key and a section."""
        return replace(self, task=spec_of("'task.task'", self.task))

    def build(self) -> ToolTask:
        return ToolTask(self, build_task(self.task), [_toolbox(*one) for one in self.tools.items()])


def _toolbox(name: str, given: Any) -> Tool:
    at = f"'task.tools.{name}'"
    section: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    kind = str(section.get("kind"))
    if kind not in TOOLBOXES:
        raise ConfigError(
            f"{at} is of kind '{kind}'{nearest(kind, TOOLBOXES)}\n"
            f"    give one of {', '.join(TOOLBOXES)}, such as {{kind: python}}"
        )
    options = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in section.items()
        if key != "kind"
    }
    known = TOOLBOXES[kind].__dataclass_fields__  # pyright: ignore[reportAttributeAccessIssue]
    for key in options:
        if key not in known:
            raise ConfigError(
                f"{at} has no option '{key}'{nearest(key, known)}\n    it has: {', '.join(known)}"
            )
    try:
        return TOOLBOXES[kind](**options).build()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{at}: {error}") from error


class ToolTask(AnsweredOtherwise):
    def __init__(self, spec: ToolTaskSpec, task: Task, tools: Sequence[Tool]) -> None:
        super().__init__(task, "with tools")
        check_names(tools)
        self._tools, self._limits = tuple(tools), spec.limits
        self.tells_calls = spec.tells_calls
        self.deterministic = all(tool.deterministic for tool in tools)
        seen = (tool.why_not_deterministic for tool in tools)
        self.why_not_deterministic = next(filter(None, seen), "")

    @override
    def environment(self, problem: int) -> Environment:
        return ToolEnvironment(
            self._tools, lambda answer: self._task.score(problem, answer), self._limits
        )

    @override
    async def close_environments(self) -> None:
        for tool in self._tools:
            await tool.close()

    @override
    def tools(self, index: int) -> Sequence[Mapping[str, Any]] | None:
        return schemas_of(self._tools)


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
