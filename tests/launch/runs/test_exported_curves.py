"""Curves that other programs exported: Open RL Benchmark's tables and those of W&B's pages."""

from __future__ import annotations

from pathlib import Path

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.launch.run_dir.run_folder import record_of
from penstock.launch.run_dir.trackers.jsonl import read_metrics
from penstock.launch.runs.exported_curves import import_curves


def imported(tmp_path: Path, text: str) -> dict[tuple[str, int], list[dict[str, float]]]:
    """(name, seed) -> its lines, without times."""
    path = tmp_path / "table.csv"
    path.write_text(text)
    found = {}
    for folder in import_curves(path, tmp_path / "runs"):
        record = record_of(folder)
        assert record.fault is None
        lines = read_metrics(folder.metrics)
        found[(record.name, record.seed)] = [
            {key: value for key, value in line.items() if key != "wall_time_s"} for line in lines
        ]
    return found


def test_a_row_for_each_point_of_a_run(tmp_path: Path) -> None:
    text = (
        "run_id,seed,global_step,_timestamp,charts/episodic_return,comment\n"
        "a1,3,512,1700000000,1.5,good\n"
        "b2,4,512,1700000001,0.5,\n"
        "a1,3,256,1699999999,1.25,\n"
        "a1,3,1024,1700000002,NaN,\n"
    )
    assert imported(tmp_path, text) == {
        ("a1", 3): [
            {"step": 256, "charts/episodic_return": 1.25},
            {"step": 512, "charts/episodic_return": 1.5},
        ],
        ("b2", 4): [{"step": 512, "charts/episodic_return": 0.5}],
    }


def test_a_column_for_each_run(tmp_path: Path) -> None:
    text = (
        '"Step","one - reward","one - reward__MIN","one - reward__MAX","the other - reward"\n'
        '"0","0.125","0.1","0.2",""\n'
        '"1","0.25","0.2","0.3","0.0625"\n'
    )
    assert imported(tmp_path, text) == {
        ("one", 0): [{"step": 0, "reward": 0.125}, {"step": 1, "reward": 0.25}],
        ("the other", 0): [{"step": 1, "reward": 0.0625}],
    }


def test_a_table_of_one_run_is_called_like_its_file(tmp_path: Path) -> None:
    assert imported(tmp_path, "\ufeffstep,loss\n0,2\n") == {
        ("table", 0): [{"step": 0, "loss": 2.0}]
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a column of steps, called one of global_step, _step, step, Step"),
        ("loss\n1\n", "its columns are: loss"),
        ("step,loss\n1\n", "table.csv:2: expected 2 cells, got 1"),
        ("step,loss\n1.5,2\n", "table.csv:2: expected a step, a whole number, got '1.5'"),
        ("step,loss\n-1,2\n", "table.csv:2: expected a step, a whole number, got '-1'"),
        ("step,loss\n1e300,2\n", "table.csv:2: expected a step, a whole number, got '1e300'"),
        ("step,note\n1,good\n", "has no column of numbers beside its steps"),
        ('step,loss\n"1,2\n', "is no CSV file"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_made(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        imported(tmp_path, text)
    assert message in str(raised.value)
    assert not (tmp_path / "runs").exists()


def test_what_is_no_text_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_bytes(b"step\n\xff\n")
    with pytest.raises(ConfigError, match="is no CSV file"):
        import_curves(tmp_path / "table.csv", tmp_path / "runs")
