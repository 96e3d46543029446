"""Every ```python block of README.md and docs runs as it stands, every command is one that the
command line accepts, and every link leads somewhere.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest
from penstock.launch.cli.hydra_app import compose
from penstock.launch.inputs.compose import resolved
from penstock.launch.placement.plan_request import plan_request
from penstock.launch.stages.job import prepare

ROOT = Path(__file__).resolve().parents[1]

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[int, str]]:
    """The line on which each block of a page begins, and its text."""
    text = page.read_text()
    return [(text.count("\n", 0, found.start(1)) + 1, found[1]) for found in _BLOCK.finditer(text)]


ALL = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
WRITING = ROOT / "docs" / "algorithms" / "writing.md"
"""Its blocks are several files, which `tests/launch/test_writing_page.py` runs."""
PAGES = [page for page in ALL if blocks(page) and page != WRITING]

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def test_there_are_pages_with_blocks() -> None:
    assert {"README.md", "index.md", "graph.md", "planner.md"} <= {p.name for p in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
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


def anchors(page: Path) -> set[str]:
    """What `#...` can name in a page: its headings, in lower case and with dashes."""
    found = _HEADING.findall(_FENCED.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", ALL, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken: list[str] = []
    for link in _LINK.findall(_FENCED.sub("", page.read_text())):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


_COMMAND = re.compile(r"^    penstock (run|plan) +(.*)$", re.MULTILINE)
_THE_READERS_OWN = re.compile(r"\w:\w|-v0$|\.jsonl?\b|dataset=\w+/|=runs/|resume=|[A-Z]{2}|^--")
"""Words that name a module, a file, a data set or a run of the reader's, or are no keys."""


def commands() -> list[tuple[str, str]]:
    """What the guides run and plan, but for what needs files of the reader's.

    The commands on the pages of algorithms are generated from the YAML files, which have a test.
    """
    found: dict[tuple[str, str], None] = {}
    for page in [page for page in ALL if page.parent.name != "algorithms"]:
        text = _FENCED.sub("", page.read_text()).replace("\\\n", " ")
        for command, rest in _COMMAND.findall(text):
            words = shlex.split(rest, comments=True)
            if words and not any(_THE_READERS_OWN.search(word) for word in words):
                found[command, shlex.join(words)] = None
    return list(found)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "words"), commands())
def test_a_command_of_a_page_is_accepted(command: str, words: str) -> None:
    composed = compose(command, shlex.split(words))
    for key in ("resume", "json", "html", "trace", "output"):
        composed.pop(key, None)
    if command == "plan":
        plan_request(composed)
    else:
        prepare(resolved(composed))
