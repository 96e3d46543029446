"""Moments of `benchmarks/disk_full.py`: the disk of a run is really full, and the run resumed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "disk_full.py"
NOT_ALLOWED = 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moments", "num_moments"),
    [
        ("optimizer of a checkpoint", 1),
        pytest.param("of a checkpoint", 5, marks=pytest.mark.nightly),
    ],
)
def test_a_full_disk_loses_no_checkpoint(tmp_path: Path, moments: str, num_moments: int) -> None:
    result = tmp_path / "result.json"
    words = [sys.executable, str(SCRIPT), "--only", moments, "--no-ray", "--json", result]
    done = subprocess.run(words, capture_output=True, text=True, timeout=250, check=False)
    if done.returncode == NOT_ALLOWED:
        assert "a disk cannot be mounted here" in done.stderr
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout
    found = json.loads(result.read_text())
    assert (found["tried"], found["lost"], found["same_weights"]) == (num_moments, 0, num_moments)
