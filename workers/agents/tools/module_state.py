"""Whether a function changes what its module keeps, as far as its source shows."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

_CHANGES = frozenset(
    (
        *("append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse", "add"),
        *("discard", "update", "setdefault", "popitem", "appendleft", "popleft", "subtract"),
    )
)
"""Methods of containers that change them."""
_CONTAINERS = (list, dict, set, bytearray)


def changed_names(function: Callable[..., Any]) -> list[str]:
    """Names of its module that a function assigns to, or whose contents it changes; sorted.

    What it calls is not followed, so an empty list promises nothing.

    Args:
        function: One with source, or nothing is found.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return []
    code = getattr(function, "__code__", None)
    local = set(code.co_varnames) if code is not None else set[str]()
    module: dict[str, Any] = getattr(function, "__globals__", {})
    kept = {name for name, value in module.items() if isinstance(value, _CONTAINERS)} - local
    return sorted({*_assigned(tree), *(kept & set(_filled(tree)))})


def _assigned(tree: ast.AST) -> set[str]:
    """Names that are declared global and assigned to."""
    nodes = list(ast.walk(tree))
    declared = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    stored = (ast.Store, ast.Del)
    found = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, stored)}
    return declared & found


def _filled(tree: ast.AST) -> Iterator[str]:
    """Names of what items are put into or taken out of."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if (
                method in _CHANGES
            ):
                yield name
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                yield name
            case _:
                pass
