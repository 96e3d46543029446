"""The value of an expression of integers, whoever wrote it, without running anything."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping

LONGEST_EXPRESSION = 64
"""Characters; nesting and the number of operators are bounded by it."""

_LARGEST = 10**15
"""Of any value on the way, so that no product grows without bound."""

_ALLOWED = re.compile(r"[0-9+\-*/() ]+", re.ASCII)

_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


class BadExpression(ValueError):
    """Why an expression has no value, in words for whoever wrote it."""


def evaluate(text: str) -> int:
    """The value of integers joined by `+`, `-`, `*`, `//` and parentheses.

    Raises:
        BadExpression: If it is anything else, too long, too large, or divides by zero.
    """
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
