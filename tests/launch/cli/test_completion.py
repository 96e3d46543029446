"""Completion in a real, non-interactive bash, as a person's shell would do it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from penstock.launch.main import COMMANDS

from ..conftest import Penstock

BASH = shutil.which("bash")

pytestmark = pytest.mark.skipif(BASH is None, reason="needs bash")

COMPLETE = """\
eval "$(penstock -sc install=bash)"
COMP_LINE="$1"; COMP_POINT=${#COMP_LINE}
COMP_WORDS=($COMP_LINE); [[ "$COMP_LINE" == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
_penstock_complete
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder with a `penstock` command in it."""
    command = tmp_path / "bin" / "penstock"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m penstock.launch.main "$@"\n')
    command.chmod(0o755)
    return command.parent


def completions(line: str, commands: Path) -> list[str]:
    environment = {**os.environ, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"}
    ran = subprocess.run(
        [str(BASH), "-c", COMPLETE, "bash", line],
        env=environment,
        cwd=commands,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return ran.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("penstock ", [*COMMANDS, "--help", "--version"]),
        ("penstock g", ["graph"]),
        ("penstock run alg", ["algorithm.", "algorithm="]),
        ("penstock run algorithm=pp", ["algorithm=ppo"]),
        ("penstock run algorithm=sft sched", ["schedule.", "schedule="]),
        ("penstock run schedule.m", ["schedule.max_lag="]),
        ("penstock run algorithm=sft algorithm.per_step.", ["algorithm.per_step.demos="]),
        ("penstock graph form", ["format="]),
        ("penstock plan cluster=h", ["cluster=h100", "cluster=h200"]),
        ("penstock plan workload.r", ["workload.response="]),
        ("penstock export pu", ["push="]),
    ],
)
def test_what_bash_offers(line: str, expected: list[str], commands: Path) -> None:
    assert sorted(completions(line, commands)) == sorted(expected)


def test_the_script_is_printed_for_a_command_too(penstock: Penstock) -> None:
    assert penstock("run", "-sc", "install=bash").out == penstock("-sc", "install=bash").out


def test_zsh_gets_bashs_completion_through_its_own_loader(penstock: Penstock) -> None:
    said = penstock("-sc", "install=zsh")
    assert said.out.startswith("autoload -U +X bashcompinit && bashcompinit\n")


def test_another_shell_is_refused(penstock: Penstock) -> None:
    said = penstock("-sc", "install=tcsh")
    assert said.code == 2
    assert said.err == (
        "penstock: shell completion was asked for with 'install=tcsh'\n"
        "    use: penstock -sc install=bash (or zsh), uninstall=..., query=...\n"
    )
