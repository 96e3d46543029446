"""Questions about small tables, and a Python tool that computes what a small model cannot.

The prompt is a table and a question. A turn that begins with `>>>` is Python code, which runs in
the sandbox and is answered with what it prints and the value of its last expression; a turn without
a call is the answer, and is worth 1 if its last number is the right one. Interpreters know nothing
of the table: a policy has to copy what it computes with.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from annotated_types import Ge, Le

from ....dataflow.errors import ConfigError, nearest
from ....dataflow.options import Int, option_class
from ..environment import ToolCall
from ..tools.python_tool import PythonTools
from .generated_task import ToolQuestions, ToolQuestionsSpec, check_template

_TOOL = "python"
_MARK = ">>>"
_NUMBER = re.compile(r"-?[0-9]+", re.ASCII)
_MOST_DIGITS = 18  # of a number that is read as an answer; Python refuses to read very long ones

_ITEMS = (
    *("apple", "bag", "bell", "book", "box", "bread", "cake", "chair", "coat", "cup", "door"),
    *("fan", "fish", "hat", "key", "lamp", "map"),
)
_COLUMNS = (
    ("price", "stock"),
    ("cost", "sold"),
    ("weight", "count"),
    ("speed", "hours"),
    ("width", "height"),
)

_Rows: TypeAlias = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class _Kind:
    """Texts name columns as `{one}`, which is asked for, and `{other}`, and `{limit}`.

    Code calls the two columns `{x}` and `{y}`; `{t}` is the table, and `{n}` its rows.
    """

    question: str
    code: str
    value: Callable[[_Rows, int], int]


KINDS: Mapping[str, _Kind] = {
    "total": _Kind(
        "What is the total {one}?",
        "sum({x} for a,b in {t})",
        lambda rows, limit: sum(x for x, _ in rows),
    ),
    "where": _Kind(
        "What is the total {one} where {other} > {limit}?",
        "sum({x} for a,b in {t} if {y}>{limit})",
        lambda rows, limit: sum(x for x, y in rows if y > limit),
    ),
    "product": _Kind(
        "What is the total of {one} * {other}?",
        "sum({x}*{y} for a,b in {t})",
        lambda rows, limit: sum(x * y for x, y in rows),
    ),
    "largest": _Kind(
        "What is the largest {one} * {other}?",
        "max({x}*{y} for a,b in {t})",
        lambda rows, limit: max(x * y for x, y in rows),
    ),
    "average": _Kind(
        "What is the average {one}, rounded down?",
        "sum({x} for a,b in {t})//{n}",
        lambda rows, limit: sum(x for x, _ in rows) // len(rows),
    ),
}
"""Name -> a kind of question. `value` is given rows of the column asked for and the other one."""


@option_class
class TableQuestionsSpec(ToolQuestionsSpec):
    """Sizes of tables and kinds of questions."""

    num_rows: Annotated[Int, Ge(2), Le(len(_ITEMS))] = 5
    """Rows of a table, below its header."""
    kinds: tuple[str, ...] = tuple(KINDS)
    """Kinds of questions, each as likely as the others."""
    python: PythonTools = field(
        default_factory=lambda: PythonTools(deterministic=True, max_bytes=200)
    )
    """Limits of the interpreter. A policy that asks for the time makes a run that cannot be
    repeated to the last bit, which `deterministic` says does not happen."""

    def build(self) -> TableQuestionsTask:
        check_template(self)
        for kind in self.kinds or ("",):
            if kind not in KINDS:
                raise ConfigError(
                    f"'task.kinds': there is no kind '{kind}' of question{nearest(kind, KINDS)}\n"
                    f"    give some of {', '.join(KINDS)}"
                )
        return TableQuestionsTask(self)


@dataclass(frozen=True)
class TableQuestion:
    """A table with a question, the code that the expert runs, and its value: the right answer."""

    text: str
    code: str
    value: int


class TableQuestionsTask(ToolQuestions[TableQuestion]):
    """Tables and questions; see `GeneratedTask`."""

    def __init__(self, spec: TableQuestionsSpec) -> None:
        self.spec = spec
        super().__init__("table_questions", spec, spec.python.build())

    def make(self, number: int, rng: random.Random) -> TableQuestion:
        names, columns = rng.sample(_ITEMS, self.spec.num_rows), rng.choice(_COLUMNS)
        rows = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in names]
        lines = [f"{name} {a} {b}" for name, (a, b) in zip(names, rows, strict=True)]
        table = "\n".join([f"item {columns[0]} {columns[1]}", *lines])
        kind = KINDS[rng.choice(self.spec.kinds)]
        second = rng.random() < 0.5
        asked = [(b, a) if second else (a, b) for a, b in rows]
        limits = sorted(y for _, y in asked)[:-1]  # one row is above it at least
        limit = rng.choice(limits)
        one, other = columns[::-1] if second else columns
        question = kind.question.format(one=one, other=other, limit=limit)
        copied = ",".join(f"({a},{b})" for a, b in rows)
        x, y = "ba" if second else "ab"
        code = kind.code.format(x=x, y=y, t=f"[{copied}]", n=len(rows), limit=limit)
        return TableQuestion(f"{table}\n{question}", code, kind.value(asked, limit))

    def question(self, problem: TableQuestion) -> str:
        return problem.text

    def read(self, text: str) -> ToolCall | None:
        text = text.strip()
        code = text.removeprefix(_MARK).strip()
        return ToolCall(_TOOL, {"code": code}) if text.startswith(_MARK) else None

    def calls(self, problem: TableQuestion) -> Sequence[str]:
        return [f"{_MARK} {problem.code}"]

    def result(self, problem: TableQuestion, call: ToolCall) -> str:
        """Return what the expert's code prints; other code does not run here."""
        known = call.arguments["code"] == problem.code
        return f"{problem.value}\n" if known else "Error: this code is not run\n"

    def answer(self, problem: TableQuestion) -> str:
        return str(problem.value)

    def is_right(self, problem: TableQuestion, said: str) -> bool:
        found = _NUMBER.findall(said)
        return bool(found) and len(found[-1]) <= _MOST_DIGITS and int(found[-1]) == problem.value
