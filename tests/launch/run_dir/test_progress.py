"""Progress of a run: in a log, on a terminal, for a program, and quiet; and the time left."""

from __future__ import annotations

import io
import json
import os
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.launch.run_dir.progress import (
    Left,
    ProgressMode,
    RunProgress,
    StagePlan,
    TimeLeft,
    format_duration,
    format_values,
)
from rich.console import Console
from rich.text import Text

SIGN = "steps 0 to 2, a.b: bad\n    it means no good\n    remedy: lower x"


class Clock:
    """A clock that goes on only when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _console(
    is_terminal: bool, term: str = "xterm", width: int = 200
) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    size: dict[str, Any] = {"width": width, "height": 25, "_environ": {"TERM": term}}
    return Console(file=file, force_terminal=is_terminal, color_system=None, **size), file


def two_stages(mode: ProgressMode, console: Console) -> None:
    """A run of two stages with an evaluation and a warning."""
    clock = Clock()
    plans = [StagePlan("sft", 4), StagePlan("grpo", 3, evaluated_after=(0, 3))]
    progress = RunProgress(plans, mode, console=console, every_s=5.0, clock=clock)
    progress.note("model: random [red] weights")
    with progress.stage("sft") as stage:
        for step in range(4):
            clock.now_s += 2.0
            stage.step(step, took_s=2.0, amount=128, values={"loss": 0.125})
    with progress.stage("grpo") as stage:
        stage.evaluated(0, 1.5, {"accuracy": 0.25})
        for step in range(3):
            clock.now_s += 4.0
            waits = {"training": 1.0, "generation": 2.5, "ops": 0.1}
            values = {"reward": step / 4}
            stage.step(step, took_s=4.0, amount=64, values=values, waits_s=waits)
        stage.warn("cut_off", 2, SIGN, {"node": "a.b"})
        progress.show(Text("a response"))
    progress.end("20261121-grpo: 3 steps", "runs/x", {"num_steps": 3, "accuracy": float("nan")})


PLAIN = """\
model: random [red] weights
stage 1 of 2: sft, 4 steps, 57% of the run's steps
sft (1 of 2) 1/4  64 samples/s  loss 0.125  6.0 s left (run: at least 6.0 s)
sft (1 of 2) 4/4  64 samples/s  loss 0.125
stage 2 of 2: grpo, 3 steps, 43% of the run's steps
evaluation before the first step, 1.5 s: accuracy 0.25
grpo (2 of 2) 2/3  16 samples/s  reward 0.25  waits for generation 62%, training 25%  5.5 s left
grpo (2 of 2) 3/3  16 samples/s  reward 0.5  waits for generation 62%, training 25%  1.5 s left
a response
20261121-grpo: 3 steps
"""


@pytest.mark.parametrize(
    ("mode", "is_terminal", "term"),
    [("auto", False, "xterm"), ("plain", True, "xterm"), ("auto", True, "dumb")],
)
def test_a_log_gets_occasional_plain_lines(
    mode: ProgressMode, is_terminal: bool, term: str, capsys: pytest.CaptureFixture[str]
) -> None:
    console, file = _console(is_terminal, term)
    two_stages(mode, console)
    assert file.getvalue() == PLAIN
    assert capsys.readouterr().err == f"penstock: warning: {SIGN}\n"


def test_quiet_leaves_warnings_and_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    console, file = _console(is_terminal=True)
    two_stages("quiet", console)
    assert file.getvalue() == "20261121-grpo: 3 steps\n"
    assert capsys.readouterr() == ("", f"penstock: warning: {SIGN}\n")


def test_a_program_gets_an_object_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    console, file = _console(is_terminal=True)
    two_stages("json", console)
    said = capsys.readouterr()
    assert (file.getvalue(), said.err) == ("", "")
    found: list[dict[str, Any]] = [json.loads(line) for line in said.out.splitlines()]
    kinds = [one.pop("event") for one in found]
    assert kinds == ["note", "stage", *["step"] * 4, "stage", "evaluation", *["step"] * 3] + [
        "warning",
        "end",
    ]
    assert found[1] == {
        "stage": "sft",
        "number": 1,
        "num_stages": 2,
        "first_step": 0,
        "num_steps": 4,
        "share": 4 / 7,
        "share_of": "steps",
    }
    assert found[8] == {
        "stage": "grpo",
        "number": 2,
        "num_stages": 2,
        "step": 0,
        "num_steps": 3,
        "took_s": 4.0,
        "rate": 16.0,
        "unit": "samples",
        "values": {"reward": 0.0},
        "waits": {"generation": 0.625, "training": 0.25, "ops": 0.025},
        "stage_left_s": 9.5,
        "run_left_s": 9.5,
        "run_left_is_least": False,
    }
    assert found[-2] == {
        "stage": "grpo",
        "kind": "cut_off",
        "step": 2,
        "text": SIGN,
        "node": "a.b",
    }
    assert found[-1] == {
        "text": "20261121-grpo: 3 steps",
        "run": "runs/x",
        "summary": {"num_steps": 3, "accuracy": None},
    }


def test_a_terminal_shows_where_the_run_is_and_what_is_left() -> None:
    console, file = _console(is_terminal=True)
    progress = RunProgress([StagePlan("grpo", 4)], console=console, clock=Clock())
    with progress.stage("grpo") as stage:
        stage.step(0, took_s=2.0, amount=10, values={"reward": 0.5})
        assert progress.is_live
    shown = file.getvalue().splitlines()[-2]
    assert "grpo" in shown
    assert "1/4 6.0 s left  5 samples/s  reward 0.5" in shown


def test_on_a_narrow_terminal_the_end_of_the_line_goes_and_nothing_else() -> None:
    console, file = _console(is_terminal=True, width=60)
    progress = RunProgress([StagePlan("grpo", 200)], console=console, clock=Clock())
    with progress.stage("grpo") as stage:
        stage.step(0, took_s=2.0, amount=10, values={f"metric {i}": 0.5 for i in range(9)})
    shown = file.getvalue().splitlines()[-2].removeprefix("\x1b[2K")
    assert shown.startswith("grpo ")
    assert "1/200 6 min 38 s left  5 samples/s" in shown
    assert len(shown.rstrip()) <= 60
    assert shown.rstrip().endswith("…")


def test_a_terminal_says_what_a_long_step_is_at() -> None:
    console, file = _console(is_terminal=True)
    clock = Clock()
    progress = RunProgress([StagePlan("grpo", 4)], console=console, clock=clock)
    elapsed = [35.2]
    with progress.stage("grpo") as stage:
        stage.working = lambda: ("step 4: actor.generate", elapsed[0])
        stage.step(2, took_s=2.0, amount=10, values={})
    assert "3/4 step 4: actor.generate for 35.2 s  2.0 s left" in file.getvalue()
    elapsed[0] = 0.3
    with progress.stage("grpo") as stage:
        stage.working = lambda: ("step 4: actor.generate", elapsed[0])
        evaluation = stage.evaluation()
        evaluation.__enter__()  # and it is not over when the line is drawn for the last time
        clock.now_s += 12.0
        stage.step(2, took_s=2.0, amount=10, values={})
    assert "evaluation for 12.0 s" in file.getvalue()


def test_rates_follow_the_latest_steps() -> None:
    progress = RunProgress([StagePlan("grpo", 100)], console=_console(is_terminal=False)[0])
    with progress.stage("grpo") as stage:
        assert progress.time.rate("grpo") is None
        for step in range(60):
            stage.step(step, took_s=10.0 if step < 40 else 1.0, amount=5, values={})
        assert progress.time.rate("grpo") == 5.0
        assert progress.time.left("grpo").stage_s == 40.0


@pytest.mark.parametrize("is_terminal", [False, True])
def test_nobody_needs_to_look(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setenv("FORCE_COLOR" if is_terminal else "NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with open(writer, "w", buffering=1) as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        progress = RunProgress([StagePlan("grpo", 2)], every_s=0.0)
        with progress.stage("grpo") as stage:
            assert progress.is_live == is_terminal
            for step in range(2):
                stage.step(step, took_s=1.0, amount=1, values={})
        progress.end("over")


def test_a_program_may_go_away(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        progress = RunProgress([StagePlan("grpo", 1)], "json")
        with progress.stage("grpo") as stage:
            stage.step(0, took_s=1.0, amount=1, values={})
        progress.end("over")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 s"),
        (8.12, "8.1 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.6, "1 h 00 min"),
        (11220, "3 h 07 min"),
    ],
)
def test_durations_are_read_at_a_glance(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_values_have_four_digits() -> None:
    values = {"a": 1234567.0, "b": 0.000123456, "c": float("nan"), "d": "text"}
    assert format_values(values) == "a 1.235e+06  b 0.0001235  c nan  d text"


def test_a_later_stage_of_which_nothing_is_known_makes_it_a_lower_bound() -> None:
    time = TimeLeft([StagePlan("sft", 10), StagePlan("grpo", 30)])
    assert time.left("sft") == Left(None, None, True)
    time.step("sft", 1, 2.0, 8)
    assert time.left("sft") == Left(18.0, 18.0, True)
    assert time.share("grpo") == (0.75, "steps")


def test_a_prediction_stands_in_until_steps_are_measured() -> None:
    time = TimeLeft([StagePlan("sft", 10), StagePlan("ppo", 100, step_s=0.5)])
    time.step("sft", 1, 1.0, 8)
    assert time.left("sft") == Left(9.0, 59.0, False)
    assert time.share("sft") == (10 / 60, "time")
    time.end("sft", 12.0)
    assert time.share("sft") == (12 / 62, "time")
    time.step("ppo", 1, 0.25, 8)
    assert time.left("ppo") == Left(99 * 0.25, 99 * 0.25, False)


def test_evaluations_to_come_count_as_the_ones_before_took() -> None:
    time = TimeLeft([StagePlan("grpo", 4, evaluated_after=(0, 2, 4))])
    time.evaluation("grpo", 0, 3.0)
    time.step("grpo", 1, 1.0, 8)
    assert time.left("grpo").stage_s == 3 + 2 * 3
    time.step("grpo", 2, 1.0, 8)
    time.evaluation("grpo", 2, 5.0)
    assert time.left("grpo").stage_s == 2 + 4.0
    time.step("grpo", 4, 1.0, 8)
    assert time.left("grpo").stage_s == 4.0
    time.evaluation("grpo", 4, 4.0)
    assert time.left("grpo").stage_s == 0.0


def test_a_resumed_stage_has_only_the_rest_left() -> None:
    time = TimeLeft([StagePlan("grpo", 10)])
    time.begin("grpo", 8)
    time.step("grpo", 9, 2.0, 4)
    assert time.left("grpo") == Left(2.0, 2.0, False)
    assert time.rate("grpo") == 2.0


@given(st.lists(st.integers(1, 50), min_size=1, max_size=4), st.floats(0.1, 10))
def test_shares_add_up_to_the_run(num_steps: list[int], pace_s: float) -> None:
    stages = [StagePlan(f"stage {i}", n) for i, n in enumerate(num_steps)]
    time = TimeLeft(stages)
    for stage in stages:
        shares = [time.share(other.name) for other in stages]
        assert abs(sum(part for part, _ in shares) - 1) < 1e-9
        time.step(stage.name, 1, pace_s, 1)
        time.end(stage.name, stage.num_steps * pace_s)
    assert all(time.share(stage.name)[1] == "time" for stage in stages)
