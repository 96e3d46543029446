"""`import penstock as ps` gives what its page lists, and loads nothing before it is asked for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import penstock as ps

ROOT = Path(__file__).parents[1]


def test_each_name_is_there_and_stands_in_the_table_of_the_page() -> None:
    page = (ROOT / "docs" / "notebooks.md").read_text()
    table = page.partition("## What the package exports")[2].partition("\n## ")[0]
    listed = [
        name
        for row in re.findall(r"^\| [^|]* \| (`.*) \|$", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    ]
    assert sorted(listed) == [name for name in ps.__all__ if name != "__version__"]
    assert all(getattr(ps, name) is not None for name in listed)


def test_the_example_needs_nothing_deeper() -> None:
    text = (ROOT / "examples" / "grpo.py").read_text()
    assert re.findall(r"^(?:from|import) penstock.*$", text, re.MULTILINE) == [
        "import penstock as ps"
    ]


def test_to_import_the_package_loads_nothing() -> None:
    code = "import penstock, sys; sys.exit('torch' in sys.modules or len(sys.modules) > 100)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
