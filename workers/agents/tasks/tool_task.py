"""Problems of another task, answered with tools at hand.

A turn that calls tools is answered by them; a turn that calls none is the answer, which the other
task scores. Its demonstrations, if it has any, call nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....dataflow.errors import ConfigError, nearest
from ...data.row_report import DataReport
from ...data.task import Converses, Message, Task
from ..environment import Environment
from ..tools.functions import FunctionTools
from ..tools.mcp_tools import McpTools
from ..tools.python_tool import PythonTools
from ..tools.search_tool import SearchTools
from ..tools.tool import Tool, Toolbox
from ..tools.tool_environment import ToolEnvironment, ToolLimits, check_names, schemas_of

__all__ = ["TOOLBOXES", "ToolTask", "ToolTaskSpec"]

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


class ToolTask:
    """See `ToolTaskSpec`; a `Task` that `Converses` and `HasEnvironments`.

    Args:
        spec: How much a conversation may do.
        task: The problems.
        tools: What may be called.
    """

    def __init__(self, spec: ToolTaskSpec, task: Task, tools: Sequence[Tool]) -> None:
        if task.verifier is not None:
            raise ConfigError(
                f"'task.task': task '{task.task_id}' scores in processes of its own, and an answer "
                "in a conversation is scored where it is held\n    choose a task whose score is "
                "quick and safe"
            )
        check_names(tools)
        self._task, self._tools, self._limits = task, tuple(tools), spec.limits
        self.deterministic = all(tool.deterministic for tool in tools)
        self.task_id = f"{task.task_id} with tools"
        self.train, self.held_out = task.train, task.held_out
        self.correct_score, self.verifier = task.correct_score, None
        self.report: DataReport = task.report

    def environment(self, problem: int) -> Environment:
        """The tools, and the task's score of the answer."""
        return ToolEnvironment(
            self._tools, lambda answer: self._task.score(problem, answer), self._limits
        )

    async def close_environments(self) -> None:
        """End what the tools have started."""
        for tool in self._tools:
            await tool.close()

    def messages(self, index: int) -> Sequence[Message] | None:
        """The other task's conversation, or its prompt as what a user says."""
        found = self._task.messages(index) if isinstance(self._task, Converses) else None
        return found or [{"role": "user", "content": self._task.prompt_text(index)}]

    def tools(self, index: int) -> Sequence[Mapping[str, Any]] | None:
        """Schemas of all tools."""
        del index
        return schemas_of(self._tools)

    def prompt_text(self, index: int) -> str:
        """What the user said last."""
        return self._task.prompt_text(index)

    def answer_text(self, index: int) -> str | None:
        """A right answer, said without a call."""
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
