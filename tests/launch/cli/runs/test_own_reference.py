"""A short run of this checkout is no worse than the figures that are kept in this test.

It compares accuracy, loss, memory and counts of operations, never seconds; and not the hash of the
weights, which machines that say the same of themselves may differ in (`benchmarks/same_bits.py`
compares hashes on one machine). After a change that is meant to change figures, change them here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from penstock.launch.runs.values import History

WORDS = (
    "algorithm=sft",
    "algorithm.num_steps=40",
    "algorithm.per_step.demos=32",
    "evaluation.num_prompts=64",
    "executor.num_threads=1",
    "tracker=none",
)


@pytest.mark.slow
def test_a_short_run_is_no_worse(tmp_path: Path) -> None:
    # In a process of its own: the memory of this one is that of all tests before.
    command = [sys.executable, "-m", "penstock.launch.main", "run", *WORDS]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=200)
    (folder,) = (tmp_path / "runs").iterdir()
    summary, history = json.loads((folder / "summary.json").read_text()), History(folder)
    # Wide enough for another processor and another allocator.
    assert summary["accuracy_after_rl"] >= 0.046875 - 0.05
    assert history.series("actor.train/cross_entropy").end <= 1.36014 * 1.02
    assert summary["peak_memory_bytes"] <= 581_431_296 * 1.25
    assert summary["num_steps"] == 40
    assert sum(history.series("actor.train/tokens").ys) == 3308
    assert sum(history.series("run/controller_bytes").ys) == 0
