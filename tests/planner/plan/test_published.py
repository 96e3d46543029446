"""The committed calibration against published times, as a person would run the scripts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def run(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A script of `benchmarks/` in a process of its own."""
    entry = [sys.executable, str(BENCHMARKS / script), *words]
    return subprocess.run(entry, capture_output=True, text=True, timeout=240, check=False)


def predicted(file: Path, rows: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """What `planner_vs_published.py` writes for some rows, by default its own."""
    words = ["--json", str(file)]
    if rows is not None:
        given = file.with_suffix(".rows.json")
        given.write_text(json.dumps({"rows": rows}))
        words += ["--rows", str(given)]
    done = run("planner_vs_published.py", *words)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


@pytest.mark.slow
def test_published_iterations_are_predicted_within_ten_percent(tmp_path: Path) -> None:
    found = predicted(tmp_path / "found.json")
    assert len(found["rows"]) == found["num_rows"] == 16
    assert found["mean_abs_relative_error_heuristic"] <= 0.10
    assert found["max_abs_relative_error_heuristic"] <= 0.25
    for row in found["rows"]:
        calls = sum(row["calls_heuristic_s"].values())
        assert calls == pytest.approx(row["predicted_heuristic_s"], abs=0.05)
        error = row["predicted_heuristic_s"] / row["heuristic_s"] - 1
        assert error == pytest.approx(row["relative_error_heuristic"], abs=1e-3)


@pytest.mark.slow
def test_the_committed_constants_are_what_the_fit_finds() -> None:
    done = run("planner_fit.py", "--check")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_other_rows_are_predicted_with_the_same_constants(tmp_path: Path) -> None:
    row = {"actor_b": 34, "critic_b": 7, "gpus": 32, "prompt_len": 128, "gen_len": 384,
           "batch_seqs": 256, "heuristic_s": 50.0}  # fmt: skip
    other = predicted(tmp_path / "other.json", [row])
    assert other["calibration"]["source"].startswith("fitted to 16 published PPO iterations")
    assert other["num_rows"] == 1
    # Between the largest 13B and the smallest 70B iterations of those lengths.
    assert 25 < other["rows"][0]["predicted_heuristic_s"] < 80


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"actor_b": 8}, "no model of 8B; there are 7, 13, 34, 70"),
        ({"gpus": 12}, "12 GPUs are no whole number of nodes of 8"),
    ],
)
def test_a_row_that_cannot_be_planned_is_refused(
    change: dict[str, int], message: str, tmp_path: Path
) -> None:
    row = {"actor_b": 7, "critic_b": 7, "gpus": 8, "prompt_len": 128, "gen_len": 128,
           "batch_seqs": 512, "heuristic_s": 30.0, **change}  # fmt: skip
    file = tmp_path / "rows.json"
    file.write_text(json.dumps({"rows": [row]}))
    done = run("planner_vs_published.py", "--rows", str(file))
    assert done.returncode == 1
    assert done.stderr.strip() == message
