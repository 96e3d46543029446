"""Trackio: what is logged is what its store holds, and what comes again replaces what was there."""

from __future__ import annotations

import math
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from penstock.launch.run_dir.shipped_trackers import TrackioTracker

from .logged import SAMPLES, SUMMARY, bits, info, odd_rows

pytest.importorskip("gradio_client", reason="trackio is not installed")


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    """Trackio's folder, which it reads once when it is first imported."""
    folder = tmp_path_factory.mktemp("trackio")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder))
        import trackio.utils

        assert folder == trackio.utils.TRACKIO_DIR
        yield folder


def logs(project: str, name: str) -> list[dict[str, Any]]:
    """A run's rows as Trackio reads them, in the order of its steps."""
    from trackio.sqlite_storage import SQLiteStorage

    rows: list[dict[str, Any]] = SQLiteStorage.get_logs(project, name)
    return [{k: v for k, v in row.items() if k != "timestamp"} for row in rows]


def test_every_metric_is_there_bit_for_bit(store: Path, tmp_path: Path) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    rows = odd_rows(20)
    tracker = TrackioTracker("odd")
    run = info(tmp_path, {"algorithm": {"lr": 1e-5}, "seed": 0})
    assert tracker.start(run) == "trackio show --project odd"
    assert (store / "odd.db").is_file()
    tracker.rewind(0, "sft")
    tracker.log(0, "sft", {"loss": 3.0})
    tracker.rewind(0, "grpo")
    for step, row in enumerate(rows):
        tracker.log(step, "grpo", row)
    tracker.log(20, "grpo", {"odd": math.nan, "high": math.inf, "low": -math.inf})
    tracker.finish(SUMMARY)

    assert logs("odd", f"{run.id}/sft") == [{"loss": 3.0, "step": 0}]
    *found, last, came_out = logs("odd", run.id)
    assert [row.pop("step") for row in found] == [*range(20)]
    assert [*map(bits, found)] == [*map(bits, rows)]
    assert math.isnan(last.pop("odd"))
    assert last == {"high": math.inf, "low": -math.inf, "step": 20}
    assert came_out == {"summary/accuracy": 0.1, "summary/suites.change": 0.25, "step": 21}
    config: Any = SQLiteStorage.get_run_config("odd", run.id)
    assert (config["algorithm"], config["_Group"]) == ({"lr": 1e-5}, run.id)


def test_what_a_resumed_run_does_again_is_forgotten(tmp_path: Path) -> None:
    for first, last in ((0, 4), (2, 3)):
        tracker = TrackioTracker("resumed")
        tracker.start(info(tmp_path, resumed=first > 0))
        tracker.rewind(first, "grpo")
        for step in range(first, last):
            tracker.log(step, "grpo", {"reward": 10.0 * first + step})
        tracker.finish(None)
    found = logs("resumed", "20261121-031454-grpo-seed0")
    assert found == [{"reward": x, "step": step} for step, x in enumerate([0.0, 1.0, 22.0])]


def test_samples_are_a_table_of_text(tmp_path: Path) -> None:
    tracker = TrackioTracker("tables")
    tracker.start(info(tmp_path))
    tracker.rewind(0, "grpo")
    tracker.log_samples(2, "grpo", SAMPLES)
    tracker.finish(None)
    (row,) = logs("tables", "20261121-031454-grpo-seed0")
    table = row["samples"]
    assert table["_type"] == "trackio.table"
    assert [one["response"] for one in table["_value"]] == ["<b>2</b>", "5,\n'no'"]
    assert [one["rule.score"] for one in table["_value"]] == [1.0, None]
