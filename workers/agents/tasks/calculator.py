"""Arithmetic that a small model cannot do by itself, and a calculator that it may call.

The prompt is an expression such as `83*47-1289`. A turn of `[83*47-1289]` calls the calculator,
which answers with the value; a turn without a call is the final answer, and is worth 1 if its last
number is the value. What the policy writes is data: expressions are read by `arithmetic`.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ....dataflow.errors import ConfigError
from ....dataflow.options import Fraction, Int, PositiveInt, option_class
from ...data.task import Message
from ..environment import BadCall, Reply, ToolCall, TurnResult
from ..tools.tool import TextFunction
from .generated_task import GeneratedSpec, GeneratedTask, PlainEnvironment, check_template

LONGEST_EXPRESSION = 64  # characters; nesting and the number of operators are bounded by it

_LARGEST = 10**15  # of any value on the way, so that no product grows without bound

_ALLOWED = re.compile(r"[0-9+\-*/() ]+", re.ASCII)

_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


class BadExpression(ValueError):
    """An expression without a value; the text tells its author why."""


def evaluate(text: str) -> int:
    """Compute the value of integers joined by `+`, `-`, `*`, `//` and parentheses."""
    text = text.strip()
    if not text:
        raise BadExpression("empty")
    if len(text) > LONGEST_EXPRESSION:
        raise BadExpression("too long")
    if not _ALLOWED.fullmatch(text):
        raise BadExpression("bad character")
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise BadExpression("syntax") from error
    return _value(tree.body)


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.FloorDiv) and right == 0:
            raise BadExpression("division by zero")
        return _bounded(_OPERATORS[type(node.op)](left, right))
    raise BadExpression("bad operator")


def _bounded(value: int) -> int:
    if abs(value) > _LARGEST:
        raise BadExpression("too large")
    return value


_TOOL = "calculator"

_SCHEMAS = TextFunction(
    "calculator",
    "Computes the value of an expression of integers with + - * // ( ).",
    "expression",
    "For example 83*47-1289.",
).schemas

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_NUMBER = re.compile(r"-?[0-9]+", re.ASCII)

_MOST_VALUE_DIGITS = 15  # of a value on the way to an answer, as `arithmetic` allows


@option_class
class CalculatorTaskSpec(GeneratedSpec):
    """Number and length of expressions."""

    min_terms: PositiveInt = 2
    """Fewest numbers of an expression."""
    max_terms: Int = 3
    """Most numbers of an expression."""
    min_digits: PositiveInt = 2
    """Fewest digits of a number."""
    max_digits: Int = 3
    """Most digits of a number."""
    operators: str = "+-*"
    """Operators between numbers, each as likely as the others."""
    prompt_template: str = "{expression}"
    """The prompt, with `{expression}` where the expression stands: a model that knows language
    needs to be told what to do."""
    expert_calls: Fraction = 1.0
    """Share of the demonstrations that call the calculator; in the others the expert knows the
    value and says it at once."""
    max_turns: PositiveInt = 4
    """Turns after which a conversation without a final answer is over, and worth 0."""

    def __post_init__(self) -> None:
        for name, least in (("max_terms", self.min_terms), ("max_digits", self.min_digits)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least {least:g}")

    def build(self) -> CalculatorTask:
        if not self.operators or set(self.operators) - set("+-*"):
            raise ConfigError(
                f"'task.operators' is {self.operators!r}\n    give some of the characters + - *"
            )
        check_template(self.prompt_template, "{expression}", "expression")
        longest = self.max_terms * (self.max_digits + 1) - 1
        digits = self.max_digits * self.max_terms if "*" in self.operators else self.max_digits + 2
        if longest > LONGEST_EXPRESSION or digits > _MOST_VALUE_DIGITS:
            raise ConfigError(
                f"task 'calculator' with {self.max_terms} numbers of {self.max_digits} digits has "
                "expressions that the calculator refuses\n"
                "    lower task.max_terms or task.max_digits: at most "
                f"{LONGEST_EXPRESSION} characters and values of {_MOST_VALUE_DIGITS} digits"
            )
        return CalculatorTask(self)


class CalculatorTask(GeneratedTask[str]):
    """Expressions to compute; a problem is its expression. See `GeneratedTask`."""

    def __init__(self, spec: CalculatorTaskSpec) -> None:
        self.spec = spec
        super().__init__("calculator", spec)
        errors = "".join(f"error: {text}" for text in _ERRORS)
        self.further_characters = f"0123456789+-*/()[]\n{errors}"

    def make(self, number: int, rng: random.Random) -> str:
        spec = self.spec
        count = rng.randint(spec.min_terms, spec.max_terms)
        digits = [rng.randint(spec.min_digits, spec.max_digits) for _ in range(count)]
        terms = [str(rng.randint(10 ** (most - 1), 10**most - 1)) for most in digits]
        return terms[0] + "".join(rng.choice(spec.operators) + term for term in terms[1:])

    def prompt_of(self, problem: str) -> str:
        return self.spec.prompt_template.replace("{expression}", problem)

    def begin(self, index: int) -> PlainEnvironment:
        return CalculatorEnvironment(evaluate(self.problem(index)), self.spec.max_turns)

    def turns(self, problem: str, rng: random.Random) -> list[str] | None:
        if rng.random() >= self.spec.expert_calls:
            return [str(evaluate(problem))]
        return [f"[{problem}]", str(evaluate(problem))]

    def schemas(self) -> Sequence[Mapping[str, Any]] | None:
        return _SCHEMAS


class CalculatorEnvironment(PlainEnvironment):
    def __init__(self, value: int, max_turns: int) -> None:
        self._value, self._max_turns = value, max_turns

    def step(self, reply: Reply) -> TurnResult:
        calls = _calls_of(reply)
        if not calls or not reply.finished:
            right = reply.finished and _last_number(reply.text) == self._value
            return TurnResult(reward=float(right), done=True)
        messages: list[Message] = []
        counts = {"tool_calls": 0.0, "tool_errors": 0.0, "bad_calls": 0.0}
        for call in calls:
            text, counted = _answer(call)
            messages.append({"role": "tool", "name": _TOOL, "content": text})
            for name in counted:
                counts[name] += 1.0
        done = reply.turn + 1 >= self._max_turns
        return TurnResult(messages=() if done else messages, done=done, counts=counts)


_ERRORS = (
    *("empty", "too long", "bad character", "syntax", "division by zero", "bad operator"),
    *("too large", "no such tool", "bad call"),
)
"""Everything that may follow "error: ", of the calculator's own."""


def _calls_of(reply: Reply) -> tuple[ToolCall | BadCall, ...]:
    """Return the calls of a reply: as parsed, or else in brackets if it says nothing else."""
    if reply.calls:
        return reply.calls
    found = _BRACKETS.findall(reply.text)
    if not found or _BRACKETS.sub("", reply.text).strip():
        return ()
    return tuple(ToolCall(_TOOL, {"expression": text}) for text in found)


def _answer(call: ToolCall | BadCall) -> tuple[str, tuple[str, ...]]:
    if isinstance(call, BadCall):
        return f"error: {call.why or 'bad call'}", ("bad_calls",)
    if call.name != _TOOL:
        return "error: no such tool", ("bad_calls",)
    expression = call.arguments.get("expression")
    if not isinstance(expression, str) or len(call.arguments) != 1:
        return "error: bad call", ("bad_calls",)
    try:
        return str(evaluate(expression)), ("tool_calls",)
    except BadExpression as error:
        return f"error: {error}", ("tool_calls", "tool_errors")


def _last_number(text: str) -> int | None:
    found = _NUMBER.findall(text)
    # Longer ones are no answer, and Python refuses to read very long ones.
    return int(found[-1]) if found and len(found[-1]) <= _MOST_VALUE_DIGITS + 1 else None
