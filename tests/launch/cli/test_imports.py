"""The modules that a run of the default model and `penstock graph` import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys
from penstock.launch.main import main
code = main(sys.argv[1:])
print(code, *sorted(sys.modules), sep="\\n")
"""

RUN = (
    "run",
    "algorithm.num_steps=1",
    "algorithm.before.sft.num_steps=1",
    "evaluation.num_prompts=4",
    "progress=quiet",
)

LEFT_OUT = (
    "networkx.",  # a fifth of the time that torch takes
    "penstock.algorithms.papers.",
    "penstock.planner.search.",
    "penstock.workers.agents.worker",
    "penstock.workers.envs.spec",
)
"""Parts that neither has a use for."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "left_out", "most"),  # the modules of ours that it imports, and a few; packages count
    [
        (RUN, (), 220),
        (
            ("graph", "algorithm=grpo"),
            ("penstock.planner.report.",),
            145,
        ),
    ],
    ids=["run", "graph"],
)
def test_a_command_imports_what_it_uses(
    tmp_path: Path, words: tuple[str, ...], left_out: tuple[str, ...], most: int
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CODE, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    said = ran.stdout.splitlines()
    found = said[said.index("0") + 1 :] if "0" in said else []
    assert found, ran.stderr
    assert [name for name in found if name.startswith((*LEFT_OUT, *left_out))] == []
    assert sum(name.startswith("penstock") for name in found) <= most
