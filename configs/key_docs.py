"""The one-line doc of every key: the text under its field, read from the class's source.

Python keeps no docstrings of fields, so the source is parsed. This serves stdlib dataclasses and
pydantic models alike.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache

__all__ = ["key_docs"]


@cache
def key_docs(kind: type) -> dict[str, str]:
    """Field name -> its doc on one line, inherited fields included."""
    docs: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        if "__annotations__" in vars(owner):
            docs |= _own_docs(owner)
    return docs


def _own_docs(kind: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):  # made without a source file, as pydantic's own base is
        return {}
    body = ast.parse(source).body[0]
    if not isinstance(body, ast.ClassDef):
        return {}
    docs: dict[str, str] = {}
    for statement, after in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            docs[statement.target.id] = " ".join(after.value.value.split())
    return docs
