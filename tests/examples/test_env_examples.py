"""The examples in environments run for two steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def ran(name: str) -> list[str]:
    found = subprocess.run(
        [sys.executable, str(EXAMPLES / name), "2"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()


@pytest.mark.slow
def test_cartpole_runs_and_gives_the_same_weights_twice() -> None:
    first, second = ran("cartpole.py"), ran("cartpole.py")
    assert first[0].startswith("  4,096 steps ")
    assert first[-1] == second[-1]
    assert len(first[-1].split()[-1]) == 16


@pytest.mark.slow
def test_self_play_runs() -> None:
    lines = ran("self_play.py")
    assert sum(line.startswith("step") for line in lines) == 2
    assert sum("against" in line for line in lines) == 4
    first, second = (line.split()[-1] for line in lines[-2:])
    assert len(first) == len(second) == 16
    assert first != second


@pytest.mark.slow
def test_a_population_runs() -> None:
    lines = ran("population.py")
    assert lines[0].startswith("step   2")
    assert len({line.split()[-1] for line in lines[1:]}) == 4
