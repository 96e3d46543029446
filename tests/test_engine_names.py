"""Nothing about one engine stands outside its folder and its line in the registry."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from penstock.workers.engines.registry import ENGINES

ROOT = Path(__file__).parents[1]
NAMED = re.compile(rf"""["']({"|".join(ENGINES)})["']""")
FOLDER = re.compile(r"engines\.\w+_engine")


def _said(source: str) -> list[str]:
    """Names of engines in a source: literals, and modules of an engine's folder."""
    return [match.group() for match in (*NAMED.finditer(source), *FOLDER.finditer(source))]


@pytest.mark.parametrize("folder", ["launch", "planner", "configs", "dataflow", "algorithms"])
def test_no_engine_is_named(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    named = {str(path.relative_to(ROOT)): _said(path.read_text()) for path in files}
    assert {path: said for path, said in named.items() if said} == {}


def test_a_name_would_be_seen() -> None:
    for engine in ENGINES:
        assert _said(f"x = engine == '{engine}'") == [f"'{engine}'"]
        assert _said(f"from ..workers.engines.{engine}_engine.policy import Policy") != []
    assert _said("import torch") == []


def test_every_engine_is_an_option_of_the_command_line() -> None:
    def options(group: str) -> set[str]:
        return {path.stem for path in (ROOT / "configs" / group).glob("*.yaml")}

    assert options("engine") == {name for name, engine in ENGINES.items() if engine.trains}
    generate = {name for name, engine in ENGINES.items() if engine.rollout is not None}
    assert options("rollout") == {"same", *generate}
