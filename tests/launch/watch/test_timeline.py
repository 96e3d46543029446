"""The end of a timeline, without reading the rest of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from penstock.dataflow.runtime.messages import TaskSpan
from penstock.launch.run_dir.step_logs import TraceLog

from .conftest import Ask
from .folders import BEGUN_S, new_run


def write_trace(path: Path, num_steps: int, *, close: bool = True) -> None:
    """Two groups, of two ranks and of one; a step takes a second."""
    log = TraceLog(path)
    for step in range(num_steps):
        at = BEGUN_S + step
        spans = [
            TaskSpan("actor.generate", step, chunk, "rollout", rank, at, at + 0.25 + rank / 4, ())
            for rank in (0, 1)
            for chunk in (0,)
        ]
        spans.append(TaskSpan("actor.train", step, None, "train", 0, at + 0.5, at + 1.0, ()))
        log.write(spans)
        log.write_counters(step, at, {"reward": 0.5})
    if close:
        log.close()
    else:
        log._file.close()  # pyright: ignore[reportPrivateUsage] - as a kill leaves it


def test_the_last_steps_with_predicted_and_measured_times(runs: Path, ask: Ask) -> None:
    run = new_run(runs)
    write_trace(run.trace, 10)
    run.write_summary({"nodes": {"actor.train": {"predicted_s": None, "measured_s": 0.4}}})
    said = ask("timeline", run=run.id, steps=2)
    assert said["steps"] == [8, 9]
    assert said["tracks"] == [
        {"group": "rollout", "rank": 0},
        {"group": "rollout", "rank": 1},
        {"group": "train", "rank": 0},
    ]
    assert len(said["slices"]) == 6
    assert said["slices"][0]["start_s"] == 0.0
    assert said["slices"][-1]["start_s"] == pytest.approx(1.5)
    nodes = said["nodes"]
    generated = nodes["actor.generate"]
    assert (generated["predicted_s"], generated["measured_s"]) == (0.25, None)
    assert generated["last_s"] == pytest.approx(0.5)  # of the slowest rank
    assert nodes["actor.train"] == {"predicted_s": 0.125, "measured_s": 0.4, "last_s": 0.5}
    assert (said["predicted_step_s"], said["has_graph"], said["is_cut"]) == (0.5, True, False)


def test_only_the_end_of_a_long_timeline_is_read(
    runs: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(runs)
    write_trace(run.trace, 20_000)
    pread, read = os.pread, [0]

    def counted(descriptor: int, num_bytes: int, offset: int) -> bytes:
        found = pread(descriptor, num_bytes, offset)
        read[0] += len(found)
        return found

    monkeypatch.setattr(os, "pread", counted)
    said = ask("timeline", run=run.id, steps=3)
    assert said["steps"] == [19_997, 19_998, 19_999]
    assert 0 < read[0] < run.trace.stat().st_size / 10


def test_a_timeline_that_a_kill_cut_short(runs: Path, ask: Ask) -> None:
    run = new_run(runs)
    write_trace(run.trace, 3, close=False)
    with run.trace.open("a") as file:
        file.write(',\n{"ph": "X", "na')
    assert ask("timeline", run=run.id, steps=3)["steps"] == [0, 1, 2]


def test_damaged_events_are_left_out(runs: Path, ask: Ask) -> None:
    run = new_run(runs)
    write_trace(run.trace, 2)
    text = run.trace.read_text().removesuffix("\n]\n")
    for bad in (
        '{"ph": "X"}',
        "3",
        "[]",
        '{"ph": "X", "args": {}, "ts": "x", "dur": 1}',
        "nonsense",
    ):
        text += f",\n{bad}"
    run.trace.write_text(f"{text}\n]\n")
    assert len(ask("timeline", run=run.id, steps=5)["slices"]) == 6


def test_a_run_without_a_timeline_says_so(runs: Path, ask: Ask) -> None:
    run = new_run(runs)
    assert ask("timeline", run=run.id)["error"] == "trace.json: there is none"
    run.trace.write_text("")
    assert ask("timeline", run=run.id)["slices"] == []
