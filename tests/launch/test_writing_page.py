"""The page on writing an algorithm: its files are written as it says, and each command is run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import Penstock

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "algorithms" / "writing.md"

_BLOCK = re.compile(
    r"^```(?:python|yaml)\n(?:# ([\w/]+\.\w+)\n)?(.*?)^```$", re.MULTILINE | re.DOTALL
)
_COMMAND = re.compile(r"^    ((?:penstock|python) (?:.*\\\n)*.*)", re.MULTILINE)

SMALL = ("tracker=none", "evaluation.num_prompts=8", "algorithm.per_step.prompts=4")
"""Makes any run of language models a short one."""


def files() -> dict[str, str]:
    """File name -> its text: a block without a name goes on with the file before it."""
    texts: dict[str, str] = {}
    name = ""
    for given, text in _BLOCK.findall(PAGE.read_text()):
        name = given or name
        texts[name] = texts.get(name, "") + text + "\n"
    return texts


def commands() -> list[str]:
    """The page's commands in order, each on one line."""
    found = _COMMAND.findall(PAGE.read_text())
    return [re.sub(r"\s*\\\n\s*", " ", text) for text in found]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with everything that the page says to put there."""
    for name, text in files().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    problems = [f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(40)]
    (tmp_path / "problems.jsonl").write_text("".join(problems))
    return tmp_path


def shortened(words: list[str]) -> list[str]:
    """The command with few and small steps."""
    of_env = any(word.startswith("task=cartpole") for word in words)
    if of_env:
        return [*words, "algorithm.num_steps=1", "tracker=none", "evaluation.num_episodes=0"]
    short = [*words, "algorithm.num_steps=2", *SMALL]
    short += ["algorithm.before.sft.num_steps=2", "algorithm.before.sft.per_step.demos=4"]
    if any("reward_modelling" in word for word in words):
        stage = "algorithm.before.reward_modelling"
        short += [f"{stage}.num_steps=31", f"{stage}.per_step.pairs=2"]
    if "--config-dir" in words:
        stage = "algorithm.before.style_modelling"
        short += [f"{stage}.num_steps=2", f"{stage}.per_step.pairs=2"]
    if "task=file" in words:
        short.append("task.num_held_out=8")
    return short


def test_the_page_has_files_and_commands() -> None:
    assert list(files()) == [
        "brevity.py",
        "careful.py",
        "conf/algorithm/careful.yaml",
        "calculator.py",
        "test_brevity.py",
        "curious.py",
    ]
    assert len(commands()) >= 12


def chosen() -> list[Any]:
    """Every fourth command for each run of the tests, the others for the longest one."""
    return [
        pytest.param(command, id=command[:60], marks=[pytest.mark.nightly] if number % 4 else [])
        for number, command in enumerate(commands())
    ]


@pytest.mark.parametrize("command", chosen())
def test_a_command_of_the_page_does_what_it_is_for(
    penstock: Penstock, folder: Path, command: str
) -> None:
    program, *words = shlex.split(command)
    if program == "python":
        done = subprocess.run(
            [sys.executable, *words, "-p", "no:cacheprovider"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout
        assert "3 passed" in done.stdout
        return
    said = penstock(*(shortened(words) if words[0] == "run" else words))
    assert said.code == 0, said.err
    if words[0] == "run":
        assert len(list(folder.glob("runs/*/summary.json"))) == 1
    else:
        assert "penstock:" not in said.err
        assert len(said.out.splitlines()) > 20
