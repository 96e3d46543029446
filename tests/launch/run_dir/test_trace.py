"""The timeline: tracks, slices and counters as a viewer reads them, whole or cut short."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.executor import TaskSpan
from penstock.launch.run_dir.trace import TraceLog, read_trace

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
