"""A command on hostile input: how it is run, and what is wrong with how it ended.

Commands are forked children of the process of `tests/hostile/forkserver.py`, which has imported
everything. Each has an empty folder of its own, with limited memory and time.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_SERVER = Path(__file__).parents[1] / "tests" / "hostile" / "forkserver.py"
_MEMORY_BYTES = 8 << 30
"""Of address space: what asks for more is refused it, instead of taking the machine's."""
LIMIT_S = 20.0
"""A command that takes longer hangs, unless it takes steps."""
_MOST_CHARACTERS = 8000
"""Of what a command says: more is no message."""
UNKNOWN = "an error that penstock does not know"
SCRIPT = "@script"
"""First word of a case whose second word is Python code instead of a command's words."""
PRECIOUS = "precious"
"""Name of a file beside the case's folder that no command has a reason to touch."""
_PRECIOUS = b"what nobody may overwrite\n"
_MOST_DISK_BYTES = 256 << 20
"""Limit on the files that a command leaves; the runs here take a few hundred kilobytes."""
_MOST_RESIDENT_BYTES = 4 << 30
Content = bytes | None | Callable[[Path], None]
"""Content of a path: bytes, None for no file, or a function that makes something there."""


@dataclass(frozen=True)
class Case:
    """One command, and what must hold of it.

    Attributes:
        words: The words after `penstock`.
        scene: A folder whose content is there when it begins; empty if None.
        files: What stands in its place, or beside it.
        what: What was done to the files.
        num_hostile: How many words at the end are hostile.
        must_refuse: Whether nothing but exit code 2 is right.
        must_fail: Whether exit code 0 is wrong.
        must_succeed: Whether nothing but exit code 0 is right.
        stands: Key -> value that config.yaml of the run must hold if it was accepted.
        weights: What the run must come to if it ends with exit code 0, as a SHA-256 sum.
        other_weights: What it must not come to: weights of a run that ignores a file.
        absent: Patterns of paths that may not be there afterwards.
    """

    words: tuple[str, ...]
    scene: Path | None = None
    files: Mapping[str, Content] = field(default_factory=dict[str, Content])
    what: str = ""
    num_hostile: int = 0
    must_refuse: bool = False
    must_fail: bool = False
    must_succeed: bool = False
    stands: Mapping[str, Any] = field(default_factory=dict[str, Any])
    weights: str | None = None
    other_weights: str | None = None
    absent: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """As a person would type it."""
        return f"penstock {shlex.join(self.words)}".encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True)
class Outcome:
    """How a case ended.

    Attributes:
        code: Its exit code; None if it had to be ended.
        said: What it wrote to its standard error.
        seconds: How long it took.
        faults: What is wrong with that: kind and cause.
        steps: Whether it has taken steps.
    """

    code: int | None
    said: str
    seconds: float
    faults: tuple[tuple[str, str], ...]
    steps: bool


class Commands:
    """The process in which commands are forked."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            ["nice", "-n", "10", sys.executable, str(_SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            preexec_fn=_limit_memory,
        )
        self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait(30)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def run(self, case: Case, limit_s: float = LIMIT_S) -> Outcome:
        """Run a case in a folder of its own and judge it."""
        with tempfile.TemporaryDirectory(prefix="penstock-fuzz-", ignore_cleanup_errors=True) as at:
            folder = Path(at) / "here"
            folder.mkdir()
            (folder.parent / PRECIOUS).write_bytes(_PRECIOUS)
            _lay_out(case, folder)
            before = _files(folder)
            found = self._asked(case.words, folder, limit_s)
            return _judged(case, found, folder, sorted(_files(folder) - before))

    def files_after(self, words: Sequence[str], folder: Path) -> None:
        """Run a command that is to succeed, in a folder that is kept.

        Raises:
            RuntimeError: If it does not.
        """
        found = self._asked(words, folder, 300.0)
        if found["code"] != 0:
            raise RuntimeError(f"penstock {' '.join(words)}: {found['code']}\n{found['err']}")

    def _asked(self, words: Sequence[str], folder: Path, limit_s: float) -> dict[str, Any]:
        """The answer; a process that could not fork, on a machine with none to spare, is replaced.

        Raises:
            RuntimeError: If none could in so many tries.
        """
        asked = json.dumps({"words": list(words), "folder": str(folder), "limit_s": limit_s})
        for wait_s in (5.0, 30.0, 60.0, None):
            try:
                assert self._process.stdin is not None
                print(asked, file=self._process.stdin, flush=True)
                return json.loads(self._answer())
            except (RuntimeError, BrokenPipeError):
                if wait_s is None:
                    raise
                self.close()
                time.sleep(wait_s)
                self._start()
        raise AssertionError("unreachable")

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process in which commands are forked has ended")
        return line


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))


def _lay_out(case: Case, folder: Path) -> None:
    if case.scene is not None:
        shutil.copytree(case.scene, folder, dirs_exist_ok=True)
    for name, content in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
            continue
        path.unlink(missing_ok=True)
        if content is not None:
            content(path)


def _files(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


def _judged(case: Case, found: Mapping[str, Any], folder: Path, new: Sequence[str]) -> Outcome:
    code, said = found["code"], str(found["err"])
    steps = any((folder / name).stat().st_size for name in new if name.endswith("metrics.jsonl"))
    faults = [*_faults_of_text(code, said)]
    if code is None and not steps:
        faults.append(("hang", f"after {found['seconds']:.0f} s"))
    if found["left"] and code is not None:
        faults.append(("process left", f"{len(found['left'])} of them"))
    if code == 2 and new and case.words[0] != "profile":
        faults.append(("file left", re.sub(r"[0-9]+", "N", new[0])))
    if code in (0, 1) and case.must_refuse:
        faults.append(("silent", "what must be refused was accepted"))
    if code == 0 and case.must_fail:
        faults.append(("silent", "a run that cannot go on did"))
    if code not in (0, None) and case.must_succeed:
        faults.append(("refused", (said.strip().splitlines() or [f"exit code {code}"])[0][:160]))
    faults += [("left", name) for name in case.absent if any(folder.glob(name))]
    faults += _faults_of_machine(folder, found)
    if code == 0:
        faults += _silent_changes(case, folder)
    return Outcome(code, said, found["seconds"], tuple(faults), steps)


def _faults_of_machine(folder: Path, found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the faults in what a command did to the disk, the memory and the files of others."""
    faults: list[tuple[str, str]] = []
    precious = folder.parent / PRECIOUS
    if not precious.is_file() or precious.read_bytes() != _PRECIOUS:
        faults.append(("outside", "a file outside the folder was changed"))
    beside = {path.name for path in folder.parent.iterdir()} - {folder.name, PRECIOUS}
    if beside:
        faults.append(("outside", f"made beside the folder: {sorted(beside)}"))
    disk_bytes = sum(
        path.lstat().st_blocks * 512 for path in folder.rglob("*") if not path.is_symlink()
    )
    if disk_bytes > _MOST_DISK_BYTES:
        faults.append(("disk", "hundreds of megabytes were written"))
    if found["peak_bytes"] > _MOST_RESIDENT_BYTES:
        faults.append(("memory", "gigabytes were used"))
    return faults


def _faults_of_text(code: int | None, said: str) -> list[tuple[str, str]]:
    faults: list[tuple[str, str]] = []
    if "Traceback (most recent call last)" in said:
        raised = re.findall(r"^[\w.]+(?:Error|Exception|Interrupt)\b.*", said, re.MULTILINE)
        faults.append(("traceback", (raised or ["?"])[-1][:160]))
    if UNKNOWN in said:
        raised = re.search(r"raised at (\S+)", said)
        what = said.partition(UNKNOWN)[2].splitlines()[0][2:120]
        where = re.sub(r"\S*/(penstock|site-packages)/", "", raised.group(1)) if raised else "?"
        faults.append(("unforeseen", f"{where} {what}"))
    if code is not None and code not in (0, 1, 2):
        faults.append(("exit code", str(code)))
    messages = re.findall(r"^penstock: (?!warning: )", said, re.MULTILINE)
    if code in (1, 2) and len(messages) != 1:
        faults.append(("messages", f"{len(messages)} of them, exit code {code}"))
    if len(said) > _MOST_CHARACTERS:
        faults.append(("messages", f"{said[:60]!r} and thousands of characters more"))
    return faults


def _silent_changes(case: Case, folder: Path) -> list[tuple[str, str]]:
    """What a run that was accepted did other than it was told."""
    faults: list[tuple[str, str]] = []
    if case.weights is not None or case.other_weights is not None:
        summaries = [json.loads(file.read_text()) for file in folder.glob("runs/*/summary.json")]
        hashes = [one["weights_sha256"] for one in summaries]
        if case.weights is not None and hashes != [case.weights]:
            faults.append(("silent", "the run came to other weights"))
        if case.other_weights in hashes:
            faults.append(("silent", "a file made no difference"))
    configs = list(folder.glob("runs/*/config.yaml")) if case.stands else []
    for file in configs:
        config = yaml.safe_load(file.read_text())
        faults += [("silent", fault) for fault in differing(config, case.stands)]
    return faults


def differing(config: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Keys that do not stand in a configuration as they were given, in words."""
    found = {key: (_value(config, key), value) for key, value in given.items()}
    return [
        f"{key} is {written!r:.80}, given as {value!r:.80}"
        for key, (written, value) in found.items()
        if not _same(written, value)
    ]


def _value(config: Any, key: str) -> Any:
    for name in key.split("."):
        if not isinstance(config, Mapping) or name not in config:
            return "(missing)"
        config = config[name]
    return config


def _same(one: Any, other: Any) -> bool:
    """Equal, with the defaults of a mapping spelled out or not, and an integer for a float."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(key in one and _same(one[key], other[key]) for key in other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, float) and isinstance(other, int | float):
        other = float(other)
        return one == other and math.copysign(1, one) == math.copysign(1, other)
    return one == other
