"""Runs commands on hostile inputs, and holds what they say against what they are to say.

What every case must show: the exit code, one message without a traceback, nothing left in the
folder and no process, all within ten seconds. The messages stand in `messages/`, one file for each
test file; `PENSTOCK_MESSAGES=write pytest tests/hostile` writes them anew, to be read in the diff.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import penstock
import pytest

_SERVER = Path(__file__).with_name("forkserver.py")
_MESSAGES = Path(__file__).with_name("messages")
_WRITE = os.environ.get("PENSTOCK_MESSAGES") == "write"
_LIMIT_S = 60.0
"""What ends a command that hangs; a machine that is busy with other things may need some of it."""
_SHOWN = 400
_LONG = 8

SMALL = (
    "algorithm.num_steps=1",
    "algorithm.before.sft.num_steps=1",
    "algorithm.per_step.prompts=2",
    "algorithm.before.sft.per_step.demos=2",
    "evaluation.num_prompts=0",
    "task.num_train=32",
    "task.num_held_out=4",
)
"""Words that make the default run take a second, should it be accepted."""


TINY = (
    "algorithm.num_steps=4",
    "checkpoint_every=2",
    "evaluation.num_prompts=4",
    "model.architecture.hidden_size=16",
    "model.architecture.intermediate_size=16",
    "model.architecture.num_hidden_layers=1",
    "model.architecture.num_attention_heads=2",
    "model.architecture.num_key_value_heads=2",
)
"""And a model and steps such that a checkpoint is half-way."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Leave nine of ten cases of each long list to `make test-all`: one piece of code reads all."""
    cases: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.path.parent == _SERVER.parent:
            cases.setdefault(f"{item.path}::{item.originalname}", []).append(item)
    for listed in cases.values():
        if len(listed) > _LONG:
            for place, item in enumerate(listed):
                if place % 10:
                    item.add_marker(pytest.mark.nightly)


@dataclass(frozen=True)
class Answer:
    """What a command did.

    Attributes:
        code: Its exit code; None if it had to be ended.
        out: What it printed.
        err: What it said.
        seconds: How long it took.
        left: Processes of its session that outlived it.
        peak_bytes: Its resident memory at most.
    """

    code: int | None
    out: str
    err: str
    seconds: float
    left: list[int]
    peak_bytes: int


class Commands:
    """The process in which commands are forked."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment["CUDA_VISIBLE_DEVICES"] = ""  # messages say that there is none
        self._process = subprocess.Popen(
            [sys.executable, str(_SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._answer()

    def run(self, words: Sequence[str], folder: Path, limit_s: float = _LIMIT_S) -> Answer:
        """Run `penstock WORDS` in a folder."""
        asked = {"words": list(words), "folder": str(folder), "limit_s": limit_s}
        assert self._process.stdin is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        found: dict[str, Any] = json.loads(self._answer())
        return Answer(**found)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process in which commands are forked has ended"
        return line


@pytest.fixture(scope="session")
def commands() -> Generator[Commands]:
    """Started once for all tests of a process."""
    started = Commands()
    yield started
    started.close()


@pytest.fixture(scope="session")
def stopped(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a finished stage before it, and a checkpoint of half of its steps."""
    folder = tmp_path_factory.mktemp("stopped")
    answer = commands.run(["run", *SMALL, *TINY], folder)
    assert answer.code == 0, answer.err
    run = next((folder / "runs").glob("*-seed0"))
    (run / "summary.json").unlink()
    shutil.rmtree(run / "models")
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    return run


Refused = Callable[..., Answer]


@pytest.fixture
def refused(commands: Commands, tmp_path: Path, request: pytest.FixtureRequest) -> Refused:
    """Runs a command in `tmp_path` and checks how it is refused."""

    def check(
        words: Sequence[str], files: Mapping[str, str | bytes] | None = None, *, code: int = 2
    ) -> Answer:
        for name, content in (files or {}).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        before = _files(tmp_path)
        answer = commands.run(words, tmp_path)
        assert answer.code == code, answer.err
        assert not answer.left
        # Ten seconds on a machine with nothing else to do; here others work as well.
        assert answer.seconds < _LIMIT_S
        assert len(re.findall(r"^penstock: ", answer.err, re.MULTILINE)) == 1, answer.err
        assert "Traceback" not in answer.err
        if code == 2:
            assert _files(tmp_path) == before
        _compare(request.node, answer.err, tmp_path)
        return answer

    return check


def _files(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


def _compare(node: pytest.Item, said: str, folder: Path) -> None:
    """The message is the one that is kept for this case."""
    file = _MESSAGES / f"{node.path.stem}.json"
    kept: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    plain = said[said.index("penstock: ") :].strip().replace(str(folder), "FOLDER")
    for name in ("stdlib", "purelib"):
        plain = plain.replace(sysconfig.get_paths()[name], name.upper())
    package = str(Path(penstock.__file__).parent)
    plain = plain.replace(package, "PENSTOCK").replace(os.path.realpath(package), "PENSTOCK")
    # When things happened, and where in a file of this run something stands, differs.
    plain = re.sub(r"\b(char|column|line) [0-9]+", r"\1 N", plain)
    plain = re.sub(r"\bmain\.py:[0-9]+", "main.py:N", plain)
    # Where in the depth the limit was met differs with how deep the caller stands.
    plain = re.sub(r"(recursion depth exceeded) (while|in) [\w ]+", r"\1", plain)
    plain = re.sub(r"\b[0-9]+\.[0-9] s ", "N s ", plain)[:_SHOWN]
    if _WRITE:
        kept[node.name] = plain
        _MESSAGES.mkdir(exist_ok=True)
        file.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
        return
    # Other versions of Python say some things in other words.
    length = _SHOWN if sys.version_info[:2] == (3, 11) else 40
    assert kept.get(node.name, "")[:length] == plain[:length]
