"""How each command of the pages is held against the code.

| command | what is done |
|---|---|
| `penstock run` | a dry run: it is composed and checked as far as a run is before anything starts |
| `penstock graph`, `plan` | it is run |
| what needs a run, a browser or an installation | the test that `BY` names does it |
| `make TARGET` | the target is there, and the `penstock` commands of its recipe are held as above |
| after `<!-- run by tests/FILE.py -->` | that test is there and knows of the command |
| after `<!-- not run: WHY -->` | nothing |

A comment stands directly before a block and is for all of its commands; `<!-- all commands run by
tests/FILE.py -->` anywhere in a page is for the whole page. `<!-- exit code 2 -->` says that the
commands of a block fail, with that code.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace

from .pages import ALL, ROOT, Command, commands

__all__ = ["distinct", "expected_code", "recipe", "to_run", "unchecked"]

NOT_RUN = "not run: "
RUN_BY = "run by "
_NOTES = (NOT_RUN, RUN_BY, "exit code ")
_ALL_RUN_BY = re.compile(r"^<!-- all commands (run by tests/\S+\.py) -->$", re.MULTILINE)
_EXIT_CODE = re.compile(r"exit code (\d+)")

DRY_RUN = "--dry-run"
SAFE = ("graph", "plan")
"""Commands that take seconds, and change nothing but the file that they are told to write."""

BY: dict[tuple[str, ...], str] = {
    ("penstock", "doctor"): "tests/launch/cli/test_doctor.py",
    ("penstock", "eval"): "tests/launch/cli/test_eval.py",
    ("penstock", "export"): "tests/launch/cli/test_export.py",
    ("penstock", "profile"): "tests/launch/profile/test_profile.py",
    ("penstock", "runs"): "tests/launch/cli/runs/test_page.py",
    ("penstock", "samples"): "tests/launch/cli/test_samples.py",
    ("penstock", "watch"): "tests/launch/cli/test_watch.py",
    ("pip", "install"): "tests/test_wheel.py",
}
"""Tests of commands that are run somewhere else, wherever a page has them."""
RESUMED_BY = "tests/launch/cli/test_run.py"

FOR_THE_READER = {
    "algorithm=NAME": "algorithm=grpo",
    "model=PATH": "model=./my-model",
    "model=./runs/SFT/models/actor": "model=./my-model",
    "model=./runs/DPO/models/actor": "model=./my-model",
    "model=ORG/NAME": "model=./my-model",
    "model=HuggingFaceTB/SmolLM2-135M-Instruct": "model=./my-model",
    "model.folder=MODEL": "model.folder=my-model",
    "task.dataset=openai/gsm8k": "task.dataset=./sums",
    "task.dataset=ORG/DATA": "task.dataset=./sums",
}
"""What a reader puts their own name for, or what only a network has; see `reader` in the test."""


def distinct() -> list[Command]:
    """The commands of all pages, each once, with what their pages say of them."""
    found: dict[tuple[str, ...], Command] = {}
    for page in ALL:
        for_all = _ALL_RUN_BY.search(page.read_text())
        for command in commands(page):
            note = for_all[1] if for_all else command.note
            told = replace(command, note=note if note.startswith(_NOTES) else _usual(command))
            before = found.setdefault(told.words, told)
            if _is_excused(before) and not _is_excused(told):
                found[told.words] = told
    return list(found.values())


def _usual(command: Command) -> str:
    """What is said of a command whose page says nothing."""
    if any(word.startswith("resume=") for word in command.words):
        return RUN_BY + RESUMED_BY
    path = BY.get((command.words[0], *command.words[1:2]))
    return "" if path is None or "--help" in command.words else RUN_BY + path


def _is_excused(command: Command) -> bool:
    return command.note.startswith((NOT_RUN, RUN_BY))


def unchecked(command: Command) -> str | None:
    """Why a command is checked by nothing; None if it is."""
    if command.note.startswith(NOT_RUN):
        few = len(command.note.removeprefix(NOT_RUN).split()) < 2
        return f"{command.where}: 'not run' without a reason" if few else None
    if command.note.startswith(RUN_BY):
        return _not_by(command, command.note.removeprefix(RUN_BY))
    if to_run(command) is not None or command.words[0] == "make":
        return None
    return (
        f"{command.where}: nothing runs '{command.text}'\n"
        "    name the test that does before its block, <!-- run by tests/FILE.py -->, or say why "
        "none can: <!-- not run: WHY -->"
    )


def _not_by(command: Command, path: str) -> str | None:
    """Why it is not true that this test runs a command: it never names it, or is not there."""
    if not (ROOT / path).is_file():
        return f"{command.where}: there is no test {path}"
    program, *words = command.words
    if program == "penstock":
        called = "resume=" if any(word.startswith("resume=") for word in words) else words[0]
    else:
        called = next(word for word in words if not word.startswith("-")).rpartition("/")[2]
        called = called.removesuffix(".py").rpartition(".")[2]
    page = command.where.partition(":")[0].rpartition("/")[2]
    text = (ROOT / path).read_text()
    knows = re.search(rf"\b{re.escape(called)}", text) or page in text
    return None if knows else f"{command.where}: {path} says nothing of '{called}' nor of {page}"


def to_run(command: Command) -> list[str] | None:
    """The words after `penstock` to run for a command; None if it is not run here."""
    program, *words = command.words
    if program != "penstock" or _is_excused(command) or not words:
        return None
    words = [FOR_THE_READER.get(word, word) for word in words]
    if words[0] in SAFE or "--help" in words:
        return words
    if words[0] != "run" or any(word.startswith("resume=") for word in words):
        return None
    if not {DRY_RUN, "--show-rows", "--cfg"}.isdisjoint(words):
        return words
    return ["run", DRY_RUN, *words[1:]]


def expected_code(command: Command) -> int:
    """The exit code that the page says a command has."""
    found = _EXIT_CODE.fullmatch(command.note)
    return int(found[1]) if found else 0


def recipe(words: Sequence[str]) -> Iterator[Command]:
    """The `penstock` commands that a `make` command would run.

    Raises:
        AssertionError: If there is no such target.
    """
    said = subprocess.run(
        ["make", "--dry-run", "--always-make", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    for line in said.stdout.splitlines():
        if line.startswith(".venv/bin/penstock "):
            yield Command(f"make {shlex.join(words)}", line, (), ("penstock", *_words(line)), "")


def _words(line: str) -> list[str]:
    return shlex.split(line)[1:]
