"""Problems of another task, answered with tools at hand.

A turn that calls tools is answered by them; a turn that calls none is the answer, which the other
task scores. Its demonstrations call tools where they are messages that do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ....dataflow.errors import ConfigError, nearest
from ...data.task import Task, TaskSpec
from ..environment import Environment
from ..tools.functions import FunctionTools
from ..tools.mcp_tools import McpTools
from ..tools.python_tool import PythonTools
from ..tools.search_tool import SearchTools
from ..tools.tool import Tool, Toolbox
from ..tools.tool_environment import ToolEnvironment, ToolLimits, check_names, schemas_of
from .answered_otherwise import AnsweredOtherwise

TOOLBOXES: Mapping[str, type[Toolbox]] = {
    "functions": FunctionTools,
    "python": PythonTools,
    "mcp": McpTools,
    "search": SearchTools,
}
"""Kind of a toolbox, as configurations name it, and its recipe."""


@dataclass(frozen=True, kw_only=True)
class ToolTaskSpec:
    """Which problems, and which tools."""

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
        """Build the task and the tools.

        Raises:
            ConfigError: If one cannot be built, or the task runs responses as programs.
        """
        return ToolTask(self, self.task.build(), [_toolbox(*one) for one in self.tools.items()])


def _toolbox(name: str, given: Any) -> Tool:
    at = f"'task.tools.{name}'"
    section: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    kind = str(section.get("kind"))
    if kind not in TOOLBOXES:
        raise ConfigError(
            f"{at} is of kind '{kind}'{nearest(kind, TOOLBOXES)}\n"
            f"    give one of {', '.join(TOOLBOXES)}, such as {{kind: python}}"
        )
    options = {key: _frozen(value) for key, value in section.items() if key != "kind"}
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


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class ToolTask(AnsweredOtherwise):
    """See `ToolTaskSpec`; a task that `HasEnvironments`.

    Args:
        spec: How much a conversation may do.
        task: The problems.
        tools: What may be called.

    Attributes:
        why_not_deterministic: Describes what conversations were seen to share; "" if nothing.
    """

    def __init__(self, spec: ToolTaskSpec, task: Task, tools: Sequence[Tool]) -> None:
        super().__init__(task, "with tools")
        check_names(tools)
        self._tools, self._limits = tuple(tools), spec.limits
        self.tells_calls = spec.tells_calls
        self.deterministic = all(tool.deterministic for tool in tools)
        seen = (getattr(tool, "why_not_deterministic", "") for tool in tools)
        self.why_not_deterministic = next(filter(None, seen), "")

    def environment(self, problem: int) -> Environment:
        """The tools, and the task's score of the answer."""
        return ToolEnvironment(
            self._tools, lambda answer: self._task.score(problem, answer), self._limits
        )

    async def close_environments(self) -> None:
        """End what the tools have started."""
        for tool in self._tools:
            await tool.close()

    def tools(self, index: int) -> Sequence[Mapping[str, Any]] | None:
        """Schemas of all tools."""
        return schemas_of(self._tools)
