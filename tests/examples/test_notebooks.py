"""The notebooks: their cells run from top to bottom, and name what there is."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

NOTEBOOKS = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
ALL = sorted(NOTEBOOKS.glob("*.ipynb"))

SHOWS = {
    "first_run.ipynb": ("mean reward", "<svg", "accuracy_after_rl", "finished"),
    "planning_a_cluster.ipynb": ("<iframe", "per step", "tp8.yaml", "2 x peak flops"),
    "writing_an_algorithm.ipynb": ("against_others", "expected f32[sample, token~]", "<svg"),
}
"""What outputs of a notebook's cells hold, among others."""


def cells(notebook: Path) -> list[str]:
    """The texts of its code cells."""
    read: Any = nbformat.read(notebook, as_version=4)
    return [cell["source"] for cell in read.cells if cell["cell_type"] == "code"]


def test_there_are_notebooks() -> None:
    assert [path.name for path in ALL] == list(SHOWS)


@pytest.mark.parametrize("notebook", ALL, ids=lambda path: path.name)
def test_cells_compile_and_what_they_import_is_there(notebook: Path) -> None:
    for text in cells(notebook):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
                module = importlib.import_module(node.module or "")
                missing = [name.name for name in node.names if not hasattr(module, name.name)]
                assert missing == [], node.module
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used = node.value.id == "penstock"
                assert not used or hasattr(importlib.import_module("penstock"), node.attr)


@pytest.mark.parametrize("notebook", ALL, ids=lambda path: path.name)
def test_a_notebook_is_kept_without_what_a_machine_has_made_of_it(notebook: Path) -> None:
    read: Any = nbformat.read(notebook, as_version=4)
    nbformat.validate(read)
    for cell in read.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
    assert sorted(read.metadata) == ["kernelspec", "language_info"]


def shown(notebook: Any) -> str:
    """Everything that its cells have put out, as one text."""
    texts: list[str] = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            texts.append(str(output.get("text", "")))
            texts += [str(value) for value in output.get("data", {}).values()]
    return "\n".join(texts)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("notebook", ALL, ids=lambda path: path.name)
def test_a_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    names = ("IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR")
    own = {name: str(tmp_path / name.lower()) for name in names}
    work, output = tmp_path / "work", tmp_path / "output.ipynb"
    work.mkdir()
    before = set(os.listdir(NOTEBOOKS))
    runner = Path(__file__).with_name("executed.py")
    ran = subprocess.run(
        [sys.executable, str(runner), str(notebook), str(work), str(output)],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    text = shown(nbformat.read(output, as_version=4))
    assert [word for word in SHOWS[notebook.name] if word not in text] == []
    assert "Traceback" not in text
    assert set(os.listdir(NOTEBOOKS)) == before, "runs are left where the notebook was started"
