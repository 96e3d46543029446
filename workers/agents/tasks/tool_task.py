"""Problems of another task, answered with tools at hand.

A turn that calls tools is answered by them; a turn that calls none is the answer, which the other
task scores. Its demonstrations call tools where they are messages that do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from typing_extensions import override

from ....dataflow.errors import ConfigError, nearest
from ...data.task import Message, Task, TaskSpec, WrappedTask, build_task
from ..environment import Environment
from ..tools.functions import FunctionTools
from ..tools.mcp_tools import McpTools
from ..tools.python_tool import PythonTools
from ..tools.search_tool import SearchTools
from ..tools.tool import Tool, Toolbox, ToolEnvironment, ToolLimits, check_names, schemas_of


class AnsweredOtherwise(WrappedTask):
    """All but the way in which they are answered is the other task's."""

    def __init__(self, task: Task, way: str) -> None:
        if task.verifier is not None:
            raise ConfigError(
                f"'task.task': task '{task.task_id}' scores in processes of its own, and an answer "
                "in a conversation is scored where it is held\n    if the score is quick and safe, "
                "set task.task.reward_in_process=true; otherwise choose another task"
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
    """How much a conversation may do."""
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
    """Problems of a task with tools at hand."""

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
