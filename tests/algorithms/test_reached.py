"""Every op and loss is used by a step, a worker or a configuration, if only through others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

HELD = ("ops", "losses")
"""Folders of `algorithms` whose functions and classes must be reached."""


def definitions() -> dict[str, list[ast.AST]]:
    """Name -> where the held folders define it."""
    found: dict[str, list[ast.AST]] = {}
    for folder in HELD:
        for file in (ROOT / "algorithms" / folder).glob("*.py"):
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    found.setdefault(node.name, []).append(node)
    return found


def names_in(node: ast.AST) -> set[str]:
    """What a piece of code names, other than to import it."""
    return {
        one.id if isinstance(one, ast.Name) else one.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Name | ast.Attribute)
    }


def users() -> Iterator[set[str]]:
    """What steps and workers name, and what configurations do."""
    steps = [*(ROOT / "algorithms").glob("*.py"), *(ROOT / "algorithms" / "papers").glob("*.py")]
    for file in (*steps, *(ROOT / "workers").rglob("*.py")):
        if file.name != "__init__.py":
            yield names_in(ast.parse(file.read_text()))
    for file in (ROOT / "configs").rglob("*.yaml"):
        yield set(re.findall(r"\w:(\w+)", file.read_text()))


def test_every_op_and_loss_is_reached() -> None:
    defined = definitions()
    left = set[str]().union(*users()) & defined.keys()
    reached: set[str] = set()
    while left:
        name = left.pop()
        reached.add(name)
        used = set[str]().union(*(names_in(node) for node in defined[name]))
        left |= used & defined.keys() - reached
    public = {name for name in defined if not name.startswith("_")}
    assert len(public) > 100
    assert sorted(public - reached) == []
