"""Every block of Python in README.md and docs runs as it stands, and every link leads somewhere.

The commands of the pages are in `test_commands.py`, the built site is in `test_site.py`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from .conftest import chat_model
from .pages import ALL, DOCS, Block, blocks, name

WRITING = DOCS / "algorithms" / "writing.md"
"""Its blocks are several files, which `tests/launch/test_writing_page.py` runs."""
YOUR_OWN = DOCS / "your_own.md"
"""As well, which `test_your_own.py` runs."""

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


PAGES = [page for page in ALL if page not in (WRITING, YOUR_OWN) and python_blocks(page)]


def test_there_are_pages_with_blocks() -> None:
    assert {"README.md", "index.md", "graph.md", "planner.md"} <= {p.name for p in PAGES}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_blocks_of_a_page_run_one_after_another(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if page.name == "evaluation.md":
        chat_model(tmp_path / "my-model")
    module = ModuleType(f"page_{page.stem}")
    # Annotations of a dataclass are looked up in its module.
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in python_blocks(page):
        # Empty lines before it, so that a traceback names the line of the page.
        text = "\n" * (block.line - 1) + "\n".join(block.lines)
        exec(compile(text, str(page), "exec"), module.__dict__)


def anchors(page: Path) -> set[str]:
    """What `#...` can name in a page: its headings, in lower case and with dashes."""
    found = _HEADING.findall(_FENCED.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", ALL, ids=name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken: list[str] = []
    for link in _LINK.findall(_FENCED.sub("", page.read_text())):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []
