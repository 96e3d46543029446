"""The environment and the tools of docs/agents.md work as a reader copies them."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from .conftest import Penstock

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"
_FILE = re.compile(r"```python\n# (\w+\.py)\n(.*?)```", re.DOTALL)
_COMMAND = re.compile(r"test_agents_page.py -->\n((?:    .*\n)+)")
TINY = (
    *("model=tiny", "model.architecture.hidden_size=32", "executor.num_threads=1"),
    *("model.architecture.intermediate_size=64", "model.architecture.num_hidden_layers=1"),
    *("model.architecture.num_attention_heads=2", "model.architecture.num_key_value_heads=2"),
    *("tracker=none", "runs=runs"),
)
TOOLS = (
    *("task.max_total_tokens=2000", "model.architecture.max_position_embeddings=2048"),
    *("algorithm.per_step.prompts=2", "algorithm.cfg.sampling.num_samples=2"),
    *("evaluation.num_prompts=0", "algorithm.num_steps=2", "~task.tools.python"),
    *("task.task.num_held_out=0", "~algorithm.before.sft", "task.max_turns=2"),
)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the folder of a reader who has copied the page's files."""
    for name, text in _FILE.findall(PAGE.read_text()):
        (tmp_path / name).write_text(text)
    asked = [("Velden", 4200), ("Arlon", 30100)]
    rows = [{"prompt": f"How many live in {town}?", "answer": f"{n}"} for town, n in asked]
    (tmp_path / "problems.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def commands() -> list[list[str]]:
    found = _COMMAND.findall(PAGE.read_text())
    return [shlex.split(text.replace("\\\n", " "))[1:] for text in found]


def test_the_page_has_two_modules_and_two_commands(reader: Path) -> None:
    assert {path.name for path in reader.glob("*.py")} == {"towns.py", "countdown.py"}
    assert len(commands()) == 2


def test_the_environment_of_the_page(penstock: Penstock, reader: Path) -> None:
    words = next(words for words in commands() if "task=own" in words)
    said = penstock(*words)
    assert (said.code, said.err) == (0, "")
    assert "agent_grpo can start" in said.out


def tools_command() -> list[str]:
    words = next(words for words in commands() if "task=tools" in words)
    kept = [word for word in words if not word.startswith("model")]
    return [*kept, *TINY, *TOOLS]


def test_the_tools_of_the_page(penstock: Penstock, reader: Path) -> None:
    said = penstock(*tools_command())
    assert (said.code, said.err) == (0, "")
    assert "shows none, so schemas are written into the first message" in said.out
    assert "not reproducible" not in said.out


@pytest.mark.slow
def test_eval_imports_tools_of_the_working_directory(penstock: Penstock, reader: Path) -> None:
    words = [w for w in tools_command()[1:] if w.startswith(("task", "~task", "model"))]
    words = [word.replace("num_held_out=0", "num_held_out=1") for word in words]
    said = penstock("eval", *words, "evaluation.num_prompts=1")
    assert (said.code, said.err) == (0, "")
    assert "shows none, so schemas are written into the first message" in said.out


@pytest.mark.slow
@pytest.mark.parametrize("task", ["task=own", "task=tools"])
def test_both_commands_of_the_page_train(penstock: Penstock, reader: Path, task: str) -> None:
    words = next(words for words in commands() if task in words)
    words = [*words, *TINY] if task == "task=own" else tools_command()
    said = penstock(*(word for word in words if word != "--dry-run"))
    assert said.code == 0, said.err
    (folder,) = (reader / "runs").iterdir()
    shown = penstock("samples", f"run={folder}").out
    assert ("Say " if task == "task=own" else "How many live in") in shown
