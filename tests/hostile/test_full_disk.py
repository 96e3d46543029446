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
def test_a_full_disk_loses_no_checkpoint(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    words = [sys.executable, str(SCRIPT), "--only", "of a checkpoint", "--no-ray", "--json", result]
    done = subprocess.run(words, capture_output=True, text=True, timeout=250, check=False)
    if done.returncode == NOT_ALLOWED:
        assert "a disk cannot be mounted here" in done.stderr
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout
    found = json.loads(result.read_text())
    assert (found["tried"], found["lost"], found["same_weights"]) == (5, 0, 5)
