"""A short run of this checkout is no worse than the reference that is kept beside this test.

It compares accuracy, loss, memory and counts of operations, never seconds; and not the hash of the
weights, which machines that say the same of themselves may differ in (`benchmarks/same_bits.py`
compares hashes on one machine). After a change that is meant to change figures:
`PENSTOCK_REFERENCE=write pytest tests/launch/cli/runs/test_own_reference.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ...conftest import Penstock

REFERENCE = Path(__file__).with_name("own_reference.json")
WORDS = (
    "algorithm=sft",
    "algorithm.num_steps=40",
    "algorithm.per_step.demos=32",
    "evaluation.num_prompts=64",
    "executor.num_threads=1",
    "tracker=none",
)
RULES = (
    "not_lower=accuracy_after_rl:0.05",
    "not_higher=actor.train/cross_entropy:2%,peak_memory_bytes:25%",
    "without=weights_sha256",
)
"""Wide enough for another processor and another allocator."""


@pytest.mark.slow
def test_a_short_run_is_no_worse(penstock: Penstock, tmp_path: Path) -> None:
    # In a process of its own: the memory of this one is that of all tests before.
    command = [sys.executable, "-m", "penstock.launch.main", "run", *WORDS]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=200)
    if os.environ.get("PENSTOCK_REFERENCE") == "write":
        assert penstock("runs", "regress", "*", f"write={REFERENCE}", *RULES).code == 0
    said = penstock("runs", "regress", "*", f"reference={REFERENCE}")
    assert (said.code, said.err) == (0, ""), said.out
    assert said.out.endswith("no worse than the reference\n")
