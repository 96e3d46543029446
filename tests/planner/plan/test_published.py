"""The committed calibration against published times, by the scripts that a person would run."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Script = Callable[..., None]
ROW = {"actor_b": 34, "critic_b": 7, "gpus": 32, "prompt_len": 128, "gen_len": 384,
       "batch_seqs": 256, "heuristic_s": 50.0}  # fmt: skip


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Calls a script of `benchmarks/` with words."""
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[3] / "benchmarks"), *sys.path])

    def call(name: str, *words: str) -> None:
        monkeypatch.setattr(sys, "argv", [name, *words])
        importlib.import_module(name).main()

    return call


def predicted(script: Script, file: Path, rows: list[dict[str, Any]] | None = None) -> Any:
    """What `planner_vs_published.py` writes for some rows, by default its own."""
    words = ["--json", str(file)]
    if rows is not None:
        given = file.with_suffix(".rows.json")
        given.write_text(json.dumps({"rows": rows}))
        words += ["--rows", str(given)]
    script("planner_vs_published", *words)
    return json.loads(file.read_text())


def test_published_iterations_are_predicted_within_ten_percent(
    script: Script, tmp_path: Path
) -> None:
    found = predicted(script, tmp_path / "found.json")
    assert len(found["rows"]) == found["num_rows"] == 16
    assert found["mean_abs_relative_error_heuristic"] <= 0.10
    assert found["max_abs_relative_error_heuristic"] <= 0.25
    for row in found["rows"]:
        calls = sum(row["calls_heuristic_s"].values())
        assert calls == pytest.approx(row["predicted_heuristic_s"], abs=0.05)
        error = row["predicted_heuristic_s"] / row["heuristic_s"] - 1
        assert error == pytest.approx(row["relative_error_heuristic"], abs=1e-3)


def test_the_committed_constants_are_what_the_fit_finds(script: Script) -> None:
    script("planner_fit", "--check")


def test_other_rows_are_predicted_with_the_same_constants(script: Script, tmp_path: Path) -> None:
    other = predicted(script, tmp_path / "other.json", [ROW])
    assert other["calibration"]["source"].startswith("fitted to 16 published PPO iterations")
    assert other["num_rows"] == 1
    # Between the largest 13B and the smallest 70B iterations of those lengths.
    assert 25 < other["rows"][0]["predicted_heuristic_s"] < 80
    for change, message in (
        ({"actor_b": 8}, "no model of 8B; there are 7, 13, 34, 70"),
        ({"gpus": 12}, "12 GPUs are no whole number of nodes of 8"),
    ):
        with pytest.raises(SystemExit, match=message):
            predicted(script, tmp_path / "refused.json", [{**ROW, **change}])
