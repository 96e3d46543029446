"""The modules of ours that a run of the default model imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MOST = 215
"""What such a run imports, and a few; packages count."""

CODE = """
import sys
from penstock.launch.main import main
code = main(sys.argv[1:])
ours = sorted(name for name in sys.modules if name.partition(".")[0] == "penstock")
print(code, *ours, sep="\\n")
"""

WORDS = (
    "run",
    "algorithm.num_steps=1",
    "algorithm.before.sft.num_steps=1",
    "evaluation.num_prompts=4",
    "progress=quiet",
)

LEFT_OUT = (
    "penstock.algorithms.papers",
    "penstock.planner.search",
    "penstock.workers.agents.worker",
    "penstock.workers.envs.spec",
)
"""Parts that the default run has no use for."""


@pytest.mark.slow
def test_the_default_run_imports_what_it_uses(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CODE, *WORDS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    said = ran.stdout.splitlines()
    ours = said[said.index("0") + 1 :] if "0" in said else []
    assert ours, ran.stderr
    assert [name for name in ours if name.startswith(LEFT_OUT)] == []
    assert len(ours) <= MOST
