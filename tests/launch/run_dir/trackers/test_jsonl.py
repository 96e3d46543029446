"""`metrics.jsonl`: what is written is what is read back, resumed or not."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.dataflow.errors import ConfigError
from penstock.launch.run_dir.trackers.jsonl import MetricsLog, finite_or_none, read_metrics


def test_one_object_per_step_with_flat_names(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write(0, {"actor.train/loss": 0.25, "rows": 4}, wall_time_s=10.0)
        log.write(2, {}, wall_time_s=11.5)
    assert path.read_text() == (
        '{"step": 0, "wall_time_s": 10.0, "actor.train/loss": 0.25, "rows": 4.0}\n'
        '{"step": 2, "wall_time_s": 11.5}\n'
    )


def test_a_line_is_readable_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write(0, {"loss": 1.0})
        assert [line["loss"] for line in read_metrics(log.path)] == [1.0]


def test_what_json_cannot_say_is_null(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.write(0, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": -0.0})
    line = read_metrics(log.path)[0]
    assert [line[name] for name in "abcd"] == [None, None, None, 0.0]
    assert math.copysign(1.0, line["d"]) == -1.0


@given(value=st.floats())
def test_a_finite_number_survives_to_the_last_bit(value: float) -> None:
    written = json.loads(json.dumps(finite_or_none(value), allow_nan=False))
    assert written == (value if math.isfinite(value) else None)


def test_resuming_drops_what_came_after_the_checkpoint_and_a_cut_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        for step in range(5):
            log.write(step, {"loss": float(step)})
    path.write_text(path.read_text() + '{"step": 5, "wall_ti')  # killed while writing
    with MetricsLog(path, first_step=3) as log:
        log.write(3, {"loss": 30.0})
    assert [(line["step"], line["loss"]) for line in read_metrics(path)] == [
        (0, 0.0),
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
    ]


def test_steps_only_go_up(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl", first_step=4) as log:
        with pytest.raises(
            ValueError,
            match=r"^metrics\.jsonl: step 3 came after step 3; each step is written once, in "
            r"order \(a resumed run passes first_step\)$",
        ):
            log.write(3, {})
        with pytest.raises(ValueError, match="no metric may be called 'step'; rename it"):
            log.write(4, {"step": 1.0})


@pytest.mark.parametrize("line", ["{}", "[1]", "3", "{nonsense", '{"step": "3"}'])
def test_a_foreign_line_is_refused_by_file_and_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2: expected a JSON object with an int"):
        read_metrics(path)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2: "):
        MetricsLog(path, first_step=1)
    assert path.read_text() == f'{{"step": 0}}\n{line}\n'
