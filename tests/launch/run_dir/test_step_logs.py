"""Metrics, warnings and the timeline: written is what is read back, resumed or cut short."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.messages import TaskSpan
from penstock.launch.run_dir.files import finite_or_none
from penstock.launch.run_dir.step_logs import (
    EVENTS,
    EventLog,
    MetricsLog,
    TraceLog,
    count_kinds,
    read_events,
    read_metrics,
    read_trace,
    stage_events,
)


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


VALUES = (
    "true",
    "0.5",
    '"3"',
    *(f'0, "loss": {v}' for v in ('"low"', "[1]", "true", "Infinity", "9" * 400)),
)


@pytest.mark.parametrize(
    "line", ["{}", '["step"]', "3", "{nonsense", *(f'{{"step": {v}}}' for v in VALUES)]
)
def test_a_foreign_line_is_refused_by_file_and_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0, "loss": null}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2: expected a JSON object with an int"):
        read_metrics(path)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2: "):
        MetricsLog(path, first_step=1)
    assert path.read_text().endswith(f"\n{line}\n")


def test_a_resumed_run_forgets_what_comes_again(tmp_path: Path) -> None:
    path = tmp_path / EVENTS
    log = EventLog(path)
    assert read_events(path) == []
    assert not path.exists(), "a run without warnings has no file"
    for step in (3, 5, 8):
        log.write({"step": step, "kind": "cut_off", "seen": "all"})
    with path.open("a") as file:
        file.write('{"step": 9, "ki')  # as a kill leaves it
    EventLog(path, first_step=8).write({"step": 9, "kind": "mismatch"})
    assert [(one["step"], one["kind"]) for one in read_events(path)] == [
        (3, "cut_off"),
        (5, "cut_off"),
        (9, "mismatch"),
    ]
    assert read_events(path)[0]["at"].endswith("+00:00")


def test_stages_are_counted_together(tmp_path: Path) -> None:
    before = tmp_path / "stages" / "sft"
    before.mkdir(parents=True)
    for folder in (tmp_path, before, tmp_path):
        EventLog(folder / EVENTS, first_step=9).write({"step": 1, "kind": "cut_off"})
    assert count_kinds(tmp_path) == {"cut_off": 3}
    assert [event["stage"] for event in stage_events(tmp_path)] == ["sft", "", ""]


@pytest.mark.parametrize("line", ["3", "{", '{"step": 1}', '{"kind": "x", "step": "1"}'])
def test_what_no_log_wrote_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / EVENTS
    path.write_text(f"{line}\n")
    with pytest.raises(ConfigError) as caught:
        read_events(path)
    assert str(caught.value) == (
        f"{path}:1: expected a JSON object with a 'step' and a 'kind', got {line!r}; remove the "
        "line or the file"
    )


GENERATE = TaskSpan("actor.generate", 0, 1, "actor", 0, 10.0, 10.5, (("actor", 3),))
SCORE = TaskSpan("reward.score", 0, None, "reward", 0, 10.5, 10.75)


def _slices(events: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(event["name"], event["args"]["step"]) for event in events if event["ph"] == "X"]


def _span(step: int, rank: int = 0, group: str = "actor") -> TaskSpan:
    return TaskSpan("actor.train", step, None, group, rank, float(step), step + 0.5)


def test_a_worker_is_a_track_and_a_task_a_slice(tmp_path: Path) -> None:
    with TraceLog(tmp_path / "trace.json") as trace:
        trace.write([GENERATE, SCORE])
        trace.write_counters(0, 10.75, {"reward": 0.5, "broken": float("nan")})
    assert json.loads(trace.path.read_text()) == [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "actor"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 0, "args": {"name": "rank 0"}},
        {
            "ph": "X",
            "name": "actor.generate",
            "cat": "task",
            "pid": 1,
            "tid": 0,
            "ts": 10_000_000,
            "dur": 500_000,
            "step": 0,
            "args": {"node": "actor.generate", "step": 0, "chunk": 1, "versions": {"actor": 3}},
        },
        {"ph": "M", "name": "process_name", "pid": 2, "tid": 0, "args": {"name": "reward"}},
        {"ph": "M", "name": "thread_name", "pid": 2, "tid": 0, "args": {"name": "rank 0"}},
        {
            "ph": "X",
            "name": "reward.score",
            "cat": "task",
            "pid": 2,
            "tid": 0,
            "ts": 10_500_000,
            "dur": 250_000,
            "step": 0,
            "args": {"node": "reward.score", "step": 0, "chunk": None, "versions": {}},
        },
        {"ph": "M", "name": "process_name", "pid": 3, "tid": 0, "args": {"name": "run"}},
        {
            "ph": "C",
            "name": "reward",
            "pid": 3,
            "tid": 0,
            "ts": 10_750_000,
            "step": 0,
            "args": {"value": 0.5},
        },
    ]


def test_a_killed_process_leaves_a_readable_file(tmp_path: Path) -> None:
    """Only the closing bracket is missing, which viewers supply; a half event is left out by us."""
    path = tmp_path / "trace.json"
    with TraceLog(path) as trace:
        trace.write([GENERATE])
        trace.write([SCORE])
        as_killed = path.read_text()
    assert _slices(json.loads(as_killed + "]")) == [("actor.generate", 0), ("reward.score", 0)]
    num_found = {0}
    for length in range(0, len(as_killed), 3):
        path.write_text(as_killed[:length])
        found = _slices(read_trace(path))
        assert found == [("actor.generate", 0), ("reward.score", 0)][: len(found)]
        num_found.add(len(found))
    assert num_found == {0, 1}


@pytest.mark.parametrize("killed", [False, True])
def test_a_resumed_run_goes_on_where_its_checkpoint_was(tmp_path: Path, killed: bool) -> None:
    path = tmp_path / "trace.json"
    with TraceLog(path) as trace:
        trace.write([_span(0), _span(1), _span(2, rank=1)])
        trace.write_counters(2, 2.5, {"reward": 1.0})
        as_killed = path.read_text()
    if killed:
        path.write_text(as_killed + ',\n{"ph": "X", "na')
    with TraceLog(path, first_step=2) as trace:
        trace.write([_span(2), _span(2, rank=1), _span(2, group="critic")])
    events = json.loads(path.read_text())
    assert [event["args"]["step"] for event in events if event["ph"] == "X"] == [0, 1, 2, 2, 2]
    assert [event for event in events if event["ph"] == "C"] == []
    tracks = [(e["name"], e["pid"], e["tid"], e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert tracks == [
        ("process_name", 1, 0, "actor"),
        ("thread_name", 1, 0, "rank 0"),
        ("thread_name", 1, 1, "rank 1"),
        ("process_name", 2, 0, "run"),
        ("process_name", 3, 0, "critic"),
        ("thread_name", 3, 0, "rank 0"),
    ]


def test_a_trace_without_a_task_is_valid(tmp_path: Path) -> None:
    with TraceLog(tmp_path / "trace.json") as trace:
        trace.write([])
    assert json.loads(trace.path.read_text()) == []
    with TraceLog(trace.path, first_step=1) as trace:
        trace.write([_span(1)])
    assert _slices(json.loads(trace.path.read_text())) == [("actor.train", 1)]


@given(times=st.lists(st.floats(1.7e9, 1.9e9), min_size=3, max_size=3, unique=True))
def test_tasks_that_follow_each_other_do_not_overlap(
    tmp_path_factory: pytest.TempPathFactory, times: list[float]
) -> None:
    start_s, middle_s, end_s = sorted(times)
    with TraceLog(tmp_path_factory.mktemp("trace") / "trace.json") as trace:
        trace.write([TaskSpan("a", 0, None, "g", 0, start_s, middle_s)])
        trace.write([TaskSpan("b", 0, None, "g", 0, middle_s, end_s)])
    first, second = [event for event in read_trace(trace.path) if event["ph"] == "X"]
    assert first["ts"] + first["dur"] == second["ts"]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('{"traceEvents": []}\n', 1),
        ('{"ph": "X", "args": {}}', 1),
        ('[\n{"name": "a"}\n', 2),
        ('[\n{"ph": "X", "na\n{"ph": "X", "args": {}}\n', 2),
    ],
)
def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path, content: str, line: int) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(
        ConfigError, match=rf"trace\.json:{line}: expected one trace event per line"
    ):
        TraceLog(path, first_step=1)
    assert path.read_text() == content
