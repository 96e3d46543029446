"""Every ```python block of README.md and docs/*.md runs as it stands."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[int, str]]:
    """The line on which each block of a page begins, and its text."""
    text = page.read_text()
    return [(text.count("\n", 0, found.start(1)) + 1, found[1]) for found in _BLOCK.finditer(text)]


PAGES = [
    page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if blocks(page)
]


def test_there_are_pages_with_blocks() -> None:
    assert {"README.md", "algorithms.md", "graph.md", "planner.md"} <= {p.name for p in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run_one_after_another(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = ModuleType(f"page_{page.stem}")
    # Annotations of a dataclass are looked up in its module.
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for line, text in blocks(page):
        # Empty lines before it, so that a traceback names the line of the page.
        exec(compile("\n" * (line - 1) + text, str(page), "exec"), module.__dict__)
