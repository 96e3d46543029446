"""Questions about a small table of numbers, and an interpreter of Python to answer them with.

The prompt is a table and a question such as "the largest price times count". A turn with a block of
Python runs it in the sandbox, and the policy is shown what it prints; a turn without one is the
answer, which is right if its last number is. What the policy writes is run nowhere else.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....dataflow.errors import ConfigError
from ....dataflow.option_checks import check_range
from ...data.task import Message
from ...models.tokenizer import PRINTABLE
from ..environment import Environment, Reply, ToolCall, TurnResult
from ..tools.python_tool import PythonTools
from ..tools.tool import Tool
from ..tools.tool_environment import ToolEnvironment, ToolLimits, schemas_of
from .generated_task import GeneratedSpec, GeneratedTask, PlainEnvironment

__all__ = ["TableQuestion", "TableQuestionsTask", "TableQuestionsTaskSpec"]

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
_NUMBER = re.compile(r"-?[0-9]+", re.ASCII)
_MOST_DIGITS = 15
"""Of an answer."""
_NAMES = (
    "fig",
    "pear",
    "plum",
    "kiwi",
    "lime",
    "nut",
    "corn",
    "rice",
    "bean",
    "beet",
    "kale",
    "leek",
)


@dataclass(frozen=True)
class TableQuestion:
    """A table, a question, and the expression that answers it.

    Attributes:
        names: Of the rows.
        rows: Price and count of each.
        question: In words.
        expression: In Python, over `t`, the rows as pairs.
        value: What it comes to.
    """

    names: tuple[str, ...]
    rows: tuple[tuple[int, int], ...]
    question: str
    expression: str
    value: int


@dataclass(frozen=True, kw_only=True)
class TableQuestionsTaskSpec(GeneratedSpec):
    """How many questions, and how large the tables are."""

    min_rows: int = 3
    """Fewest rows of a table."""
    max_rows: int = 5
    """Most rows, at most 12."""
    largest: int = 99
    """Largest price and count."""
    prompt_template: str = "{table}\nWhat is {question}? Use Python."
    """The prompt, with `{table}` and `{question}` where they stand."""
    expert_calls: float = 1.0
    """Share of the demonstrations that run code; in the others the expert knows the answer."""
    time_limit_s: float = 5.0
    """Longest time that a piece of code may take."""
    num_processes: int = 2
    """Pieces of code that run at once."""
    deterministic: bool = False
    """Whether to count on code that asks for neither time nor the system's random bytes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "min_rows", at_least=2)
        check_range(self, "max_rows", at_least=self.min_rows, at_most=len(_NAMES))
        check_range(self, "largest", at_least=10, at_most=10**6)
        check_range(self, "expert_calls", at_least=0, at_most=1)

    def build(self) -> TableQuestionsTask:
        """Make the questions, and find the sandbox.

        Raises:
            ConfigError: If the template has no place for table and question, there are too few
                questions, or the machine has no sandbox.
        """
        for place in ("{table}", "{question}"):
            if place not in self.prompt_template:
                raise ConfigError(
                    f"'task.prompt_template' is {self.prompt_template!r}, without {place}\n"
                    f"    write {place} where it stands"
                )
        tool = PythonTools(
            time_limit_s=self.time_limit_s,
            num_processes=self.num_processes,
            max_bytes=400,
            deterministic=self.deterministic,
        )
        return TableQuestionsTask(self, tool.build())


class TableQuestionsTask(GeneratedTask[TableQuestion]):
    """Tables and questions; see `GeneratedTask`, `HasEnvironments` and `ClosesEnvironments`.

    Args:
        spec: How many, and how large.
        tool: The interpreter.
    """

    def __init__(self, spec: TableQuestionsTaskSpec, tool: Tool) -> None:
        self.spec, self._tool = spec, tool
        self.deterministic = spec.deterministic
        super().__init__("table_questions", spec)

    @property
    def further_characters(self) -> str:
        """Printable ASCII: code may print anything."""
        return PRINTABLE

    def make(self, number: int, rng: random.Random) -> TableQuestion:
        """A table and a question."""
        del number
        spec = self.spec
        count = rng.randint(spec.min_rows, spec.max_rows)
        names = tuple(rng.sample(_NAMES, count))
        rows = tuple((rng.randint(2, spec.largest), rng.randint(2, spec.largest)) for _ in names)
        bound = sorted(price for price, _ in rows)[count // 2] - 1
        question, expression, value = rng.choice(_questions(rows, bound))
        return TableQuestion(names, rows, question, expression, value)

    def prompt_of(self, problem: TableQuestion) -> str:
        """The template filled with both."""
        lines = [f"{n} {p} {c}" for n, (p, c) in zip(problem.names, problem.rows, strict=True)]
        table = "\n".join(["name price count", *lines])
        filled = self.spec.prompt_template.replace("{table}", table)
        return filled.replace("{question}", problem.question)

    def begin(self, index: int) -> PlainEnvironment:
        """None: what runs code is waited for; see `environment`.

        Raises:
            ConfigError: Always.
        """
        del index
        raise ConfigError(
            "task 'table_questions' is answered in conversation only\n    train it with an "
            "algorithm that converses, such as algorithm=agent_grpo"
        )

    def environment(self, problem: int) -> Environment:
        """An interpreter, and the right answer."""
        return _Interpreter(self._tool, self.problem(problem).value)

    async def close_environments(self) -> None:
        """End the interpreters."""
        await self._tool.close()

    def schemas(self) -> Sequence[Mapping[str, Any]] | None:
        """The interpreter."""
        return schemas_of([self._tool])

    def turns(self, problem: TableQuestion, rng: random.Random) -> list[str] | None:
        """Copy the table into Python and print the expression, then say what it prints."""
        if rng.random() >= self.spec.expert_calls:
            return [str(problem.value)]
        rows = ", ".join(f"({price}, {count})" for price, count in problem.rows)
        code = f"t = [{rows}]\nprint({problem.expression})"
        return [f"```python\n{code}\n```", str(problem.value)]

    def replies(self, index: int) -> Sequence[Sequence[Message]] | None:
        """The expert's conversation; what its code prints is known."""
        turns = self._expert(index) or []
        shown = {"role": "tool", "name": "python", "content": f"{self.problem(index).value}\n"}
        said: list[Message] = [{"role": "assistant", "content": turns[0]}]
        for text in turns[1:]:
            said += [shown, {"role": "assistant", "content": text}]
        return [said]

    def score(self, index: int, response: str) -> float:
        """Whether the last number of a response is the value: an answer without code."""
        return _right(response, self.problem(index).value)


def _questions(t: Sequence[tuple[int, int]], bound: int) -> Sequence[tuple[str, str, int]]:
    """What may be asked of a table: in words, in Python, and the answer."""
    products = [p * c for p, c in t]
    dear, many = [c for p, c in t if p > bound], [p for p, c in t if c > bound]
    return (
        ("the sum of price times count", "sum(p * c for p, c in t)", sum(products)),
        ("the largest price times count", "max(p * c for p, c in t)", max(products)),
        ("the smallest price times count", "min(p * c for p, c in t)", min(products)),
        (
            f"the sum of count where price is over {bound}",
            f"sum(c for p, c in t if p > {bound})",
            sum(dear),
        ),
        (
            f"the sum of price where count is over {bound}",
            f"sum(p for p, c in t if c > {bound})",
            sum(many),
        ),
    )


class _Interpreter:
    """Runs blocks of Python until it is told an answer."""

    def __init__(self, tool: Tool, value: int) -> None:
        limits = ToolLimits(max_calls_per_turn=1)
        self._tools = ToolEnvironment([tool], lambda answer: _right(answer, value), limits)

    def reset(self, problem: int, seed: int) -> None:
        self._tools.reset(problem, seed)

    async def step(self, reply: Reply) -> TurnResult:
        if not reply.calls and (found := _BLOCK.search(reply.text)):
            reply = replace(reply, calls=(ToolCall("python", {"code": found[1]}),))
        if not reply.calls and not reply.finished:
            return TurnResult(done=True)
        return await self._tools.step(reply)

    async def close(self) -> None:
        await self._tools.close()


def _right(answer: str, value: int) -> float:
    found = _NUMBER.findall(answer)
    # Longer ones are no answer, and Python refuses to read very long ones.
    return float(bool(found) and len(found[-1]) <= _MOST_DIGITS and int(found[-1]) == value)
