"""Points of curves and the end of a timeline: real lines, without reading all of a file."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.dataflow.runtime.messages import TaskSpan
from penstock.launch.run_dir.step_logs import MetricsLog, TraceLog
from penstock.launch.watch.log_files import Gone, appended, metric_names, sampled

from .conftest import Ask
from .folders import BEGUN_S, add_steps, new_run, value_at, write_many_steps

METRIC = "reward/mean"


def test_a_short_file_is_shown_whole(tmp_path: Path) -> None:
    add_steps(tmp_path, range(10))
    points = sampled(tmp_path, [METRIC, "train/loss", "none"])
    assert points.steps == list(range(10))
    assert points.seconds == [step / 2 for step in range(10)]
    assert points.columns[METRIC] == [value_at(step) for step in range(10)]
    assert points.columns["none"] == [None] * 10
    assert (points.is_whole, points.num_damaged) == (True, 0)
    assert points.offset == (tmp_path / "metrics.jsonl").stat().st_size


def test_a_long_file_is_sampled_evenly_with_both_ends(tmp_path: Path) -> None:
    write_many_steps(tmp_path, 20_000)
    points = sampled(tmp_path, [METRIC], num_points=500)
    assert (points.steps[0], points.steps[-1]) == (0, 19_999)
    assert 450 < len(points.steps) <= 501
    gaps = [b - a for a, b in zip(points.steps, points.steps[1:], strict=False)]
    assert min(gaps) > 0
    assert max(gaps) < 60
    assert points.columns[METRIC] == [value_at(step) for step in points.steps]
    assert not points.is_whole


def test_only_a_part_of_a_long_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_many_steps(tmp_path, 20_000)
    size_bytes, pread, read = (tmp_path / "metrics.jsonl").stat().st_size, os.pread, [0]

    def counted(descriptor: int, num_bytes: int, offset: int) -> bytes:
        found = pread(descriptor, num_bytes, offset)
        read[0] += len(found)
        return found

    monkeypatch.setattr(os, "pread", counted)
    assert len(sampled(tmp_path, [METRIC], num_points=100).steps) == 100
    assert 0 < read[0] < size_bytes / 4
    read[0] = 0
    points = sampled(tmp_path, [METRIC], first_step=12_345, last_step=12_400)
    assert points.steps == list(range(12_345, 12_401))
    assert 0 < read[0] < size_bytes / 10


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (None, 4, [0, 2, 4]),
        (3, None, [4, 6, 8]),
        (3, 6, [4, 6]),
        (0, 100, [0, 2, 4, 6, 8]),
        (9, None, []),
        (5, 5, []),
        (6, 2, []),
    ],
)
def test_a_range_of_steps_is_found(
    tmp_path: Path, first: int | None, last: int | None, expected: list[int]
) -> None:
    add_steps(tmp_path, range(0, 10, 2))
    assert sampled(tmp_path, [METRIC], first_step=first, last_step=last).steps == expected


@given(
    gaps=st.lists(st.integers(1, 50), min_size=1, max_size=120),
    paddings=st.lists(st.integers(0, 3000), min_size=1, max_size=7),
    num_points=st.integers(2, 40),
    torn=st.integers(0, 40),
    bounds=st.tuples(st.integers(0, 3000), st.integers(0, 3000)),
)
def test_points_are_lines_of_the_file_and_include_the_ends(
    gaps: list[int], paddings: list[int], num_points: int, torn: int, bounds: tuple[int, int]
) -> None:
    steps = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    lines = [
        json.dumps(
            {"step": step, "wall_time_s": step, "m": i, "pad": "x" * paddings[i % len(paddings)]}
        )
        for i, step in enumerate(steps)
    ]
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        text = "".join(f"{line}\n" for line in lines) + lines[-1][:torn]
        (home / "metrics.jsonl").write_text(text)
        index = {step: i for i, step in enumerate(steps)}
        points = sampled(home, ["m"], num_points=num_points)
        assert [index[step] for step in points.steps] == points.columns["m"]
        assert points.steps == sorted(set(points.steps))
        assert (points.steps[0], points.steps[-1]) == (steps[0], steps[-1])
        first, last = min(bounds), max(bounds)
        within = [step for step in steps if first <= step <= last]
        found = sampled(home, ["m"], num_points=num_points, first_step=first, last_step=last).steps
        assert set(found) <= set(within)
        assert (found[:1], found[-1:]) == (within[:1], within[-1:])
        assert not points.is_whole or points.steps == steps


def test_a_line_that_is_still_written_does_not_count(tmp_path: Path) -> None:
    add_steps(tmp_path, range(3))
    file = tmp_path / "metrics.jsonl"
    with file.open("a") as log:
        log.write('{"step": 3, "wall_t')
    points = sampled(tmp_path, [METRIC])
    assert points.steps == [0, 1, 2]
    with file.open("a") as log:
        log.write(f'ime_s": {BEGUN_S + 9}, "{METRIC}": 0.5}}\n')
    more = appended(tmp_path, [METRIC], points.offset, points.mark)
    assert more is not None
    assert (more.steps, more.seconds, more.columns) == ([3], [9.0], {METRIC: [0.5]})


def test_what_was_written_since_is_all_that_comes(tmp_path: Path) -> None:
    add_steps(tmp_path, range(3))
    points = sampled(tmp_path, [METRIC])
    nothing = appended(tmp_path, [METRIC], points.offset, points.mark)
    assert nothing is not None
    assert (nothing.steps, nothing.offset, nothing.mark) == ([], points.offset, points.mark)
    with (tmp_path / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({"step": 3, "wall_time_s": BEGUN_S, METRIC: None}) + "\n")
    more = appended(tmp_path, [METRIC], points.offset, points.mark)
    assert more is not None
    assert (more.steps, more.columns) == ([3], {METRIC: [None]})


def test_a_rewound_file_is_not_taken_for_the_one_that_was_seen(tmp_path: Path) -> None:
    add_steps(tmp_path, range(10))
    points = sampled(tmp_path, [METRIC])
    add_steps(tmp_path, range(4, 6))  # resumed at step 4: shorter
    assert appended(tmp_path, [METRIC], points.offset, points.mark) is None
    again = sampled(tmp_path, [METRIC])
    assert again.steps == list(range(6))
    with MetricsLog(tmp_path / "metrics.jsonl", first_step=2) as log:  # resumed again: longer
        for step in range(2, 40):
            log.write(step, {METRIC: 0.0}, BEGUN_S + 1000 + step)
    assert appended(tmp_path, [METRIC], again.offset, again.mark) is None


def test_what_is_gone_says_so(tmp_path: Path) -> None:
    for read in (lambda: sampled(tmp_path, []), lambda: appended(tmp_path, [], 0, "")):
        with pytest.raises(Gone, match=r"metrics\.jsonl: there is none"):
            read()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(Gone, match=r"metrics\.jsonl: it is a folder where a file belongs"):
        metric_names(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(Gone, match="it is a FIFO"):
        sampled(tmp_path, [METRIC])


@pytest.mark.slow
@pytest.mark.timeout(20)
@pytest.mark.parametrize("at_end", [True, False])
def test_a_hole_is_not_searched_through(tmp_path: Path, at_end: bool) -> None:
    """A sparse file of 50 GB takes no room on the disk, and hours to read."""
    add_steps(tmp_path, range(3))
    path = tmp_path / "metrics.jsonl"
    os.truncate(path, 50 << 30)
    if not at_end:
        with path.open("ab") as file:
            file.write(b'{"step": 3, "wall_time_s": 0.0}\n')
    for read in (
        lambda: sampled(tmp_path, [METRIC]),
        lambda: metric_names(tmp_path),
    ):
        with pytest.raises(Gone, match="the file is damaged: no line ends within 64 MiB"):
            read()


@pytest.mark.parametrize(
    "text", ["", "\n", "{}\n", "\n\n\n", "[1]\n", "\x00\x00\n", "[" * 100_000 + "\n"]
)
def test_a_file_without_a_step_has_no_points(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    points = sampled(tmp_path, [METRIC], first_step=1, last_step=5)
    assert points.steps == []
    assert metric_names(tmp_path) == []


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    add_steps(tmp_path, range(5))
    file = tmp_path / "metrics.jsonl"
    lines = file.read_text().splitlines()
    lines[2] = "damaged"
    lines.insert(4, '{"step": "4", "wall_time_s": 0}')
    lines.insert(0, '{"step": true, "wall_time_s": 0}')
    lines.append('{"step": 5, "wall_time_s": 1e999}')
    lines.append(
        json.dumps({"step": 6, "wall_time_s": BEGUN_S, METRIC: "text", "train/loss": 10**400})
    )
    file.write_text("\n".join(lines) + "\n")
    points = sampled(tmp_path, [METRIC, "train/loss"])
    assert points.steps == [0, 1, 3, 4, 6]
    assert points.num_damaged == 4
    assert points.columns[METRIC][-1] is None
    assert points.columns["train/loss"][-1] is None


def test_rare_metrics_of_evaluations_are_found_in_a_long_file(tmp_path: Path) -> None:
    write_many_steps(tmp_path, 5000)
    file = tmp_path / "metrics.jsonl"
    lines = file.read_text().splitlines()
    (tmp_path / "evaluations").mkdir()
    for step in (0, 1234, 4321):
        lines[step] = json.dumps({**json.loads(lines[step]), "evaluation/accuracy": step / 10_000})
        (tmp_path / "evaluations" / f"step-{step:08d}.json").write_text("{}")
    (tmp_path / "evaluations" / "step-x.json").write_text("{}")
    file.write_text("\n".join(lines) + "\n")
    assert "evaluation/accuracy" in metric_names(tmp_path)
    points = sampled(tmp_path, ["evaluation/accuracy"], num_points=50)
    column = points.columns["evaluation/accuracy"]
    found = {
        step: value for step, value in zip(points.steps, column, strict=True) if value is not None
    }
    assert found == {0: 0.0, 1234: 0.1234, 4321: 0.4321}
    assert points.steps == sorted(points.steps)


def test_names_are_those_of_the_lines(tmp_path: Path) -> None:
    add_steps(tmp_path, range(3))
    assert metric_names(tmp_path) == ["reward/mean", "run/lag_max", "train/loss"]


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


@pytest.mark.slow
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
