"""The program of docs/your_own.md runs as it stands there, with a chat model of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import chat_model
from .pages import DOCS, blocks


@pytest.mark.slow
def test_the_program_of_the_page(tmp_path: Path) -> None:
    for block in blocks(DOCS / "your_own.md"):
        if block.language == "python":
            (tmp_path / block.lines[0].removeprefix("# ")).write_text("\n".join(block.lines))
    chat_model(tmp_path / "my-model")
    ran = subprocess.run(
        [sys.executable, "my_run.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "reward.score/reward/brief/mean" in ran.stdout
    runs = [*tmp_path.glob("runs/*/summary.json")]
    assert [json.loads(file.read_text())["num_steps"] for file in runs] == [2, 2, 2]
