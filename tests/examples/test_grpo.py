"""The example runs, and its two ways of running agree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.slow
def test_the_grpo_example_gives_the_same_numbers_twice() -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / "grpo.py")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    by_hand = [line.removeprefix("by hand    ") for line in lines if line.startswith("by hand")]
    graph = [line.removeprefix("as a graph ") for line in lines if line.startswith("as a graph")]
    assert len(by_hand) == 5
    assert by_hand == graph
    assert any(not line.endswith("0.000000") for line in by_hand)
