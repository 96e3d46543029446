"""Runs of self-play in games of libraries, from the command line."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from penstock.launch.run_dir.step_logs import read_metrics

from ..conftest import Penstock

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="EnvPool is installed on Linux"),
]

WORDS = ("algorithm=self_play", "model=mlp", "tracker=none", "algorithm.per_step.rows=8")
LEDUC = ("task=envpool_game", "task.id=LeducHoldem-v1", "task.max_turns=6")

FRAIL = """
    from pettingzoo.classic.tictactoe_v3 import raw_env


    class Frail(raw_env):
        \"\"\"It falls down once, at the 130th move in the process.\"\"\"

        taken = 0

        def step(self, action):
            Frail.taken += 1
            if Frail.taken == 130:
                raise RuntimeError("the board fell down")
            super().step(action)


    def env():
        return Frail()
"""


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def test_cards_are_dealt_by_the_runs_seed(penstock: Penstock) -> None:
    found: list[dict[str, Any]] = []
    for number, seed in enumerate((0, 0, 1)):
        said = penstock(
            "run", *WORDS, *LEDUC, "algorithm.num_steps=2", f"seed={seed}", f"runs=run-{number}"
        )
        assert said.code == 0, said.err
        (run,) = Path(f"run-{number}").iterdir()
        found.append(summary(run))
        assert read_metrics(run / "metrics.jsonl")[-1]["board.play/cut_off"] == 0
    assert found[0]["task"] == "LeducHoldem-v1"
    assert found[0]["roles_sha256"] == found[1]["roles_sha256"] != found[2]["roles_sha256"]


def test_a_run_that_a_game_stopped_goes_on_as_if_nothing_had_happened(
    penstock: Penstock, tmp_path: Path
) -> None:
    (tmp_path / "frail.py").write_text(textwrap.dedent(FRAIL))
    words = (*WORDS, "task=pettingzoo_game", "task.id=frail:env", "task.max_turns=5")
    words = (*words, "algorithm.num_steps=4", "checkpoint_every=1")
    said = penstock("run", *words, "runs=stopped")
    (run,) = Path("stopped").iterdir()
    assert said.code == 1
    assert "WorkerError: game " in said.err
    assert "'frail:env' of PettingZoo (seed " in said.err
    assert "raised RuntimeError: the board fell down (frail.py:13)" in said.err
    assert penstock("run", f"resume={run}").code == 0
    assert summary(run)["first_step"] > 0
    assert penstock("run", *words, "runs=whole").code == 0
    (whole,) = Path("whole").iterdir()
    assert summary(run)["roles_sha256"] == summary(whole)["roles_sha256"]
