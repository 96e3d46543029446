"""The progress display: plain lines in a log, a live line on a terminal, one line at the end."""

from __future__ import annotations

import io
import os
import sys

import pytest
from penstock.launch.run_dir.progress import ProgressDisplay, format_duration, format_values
from rich.console import Console


class Clock:
    """A clock that goes on only when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _console(is_terminal: bool) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=is_terminal, width=120, color_system=None), file


def test_a_log_gets_occasional_plain_lines_and_the_last_step() -> None:
    console, file = _console(is_terminal=False)
    clock = Clock()
    with ProgressDisplay("grpo", num_steps=8, console=console, every_s=5.0, clock=clock) as display:
        for step in range(8):
            clock.now_s += 2.0
            display.update(step, num_samples=128, values={"reward": step / 8, "loss": 0.125})
        display.summarize({"accuracy": "0.12 -> 0.61", "samples/s": 64.0})
    assert file.getvalue() == (
        "grpo 1/8  64 samples/s  reward 0  loss 0.125  14.0 s left\n"
        "grpo 4/8  64 samples/s  reward 0.375  loss 0.125  8.0 s left\n"
        "grpo 7/8  64 samples/s  reward 0.75  loss 0.125  2.0 s left\n"
        "grpo 8/8  64 samples/s  reward 0.875  loss 0.125\n"
        "grpo: 8 steps in 16.0 s  accuracy 0.12 -> 0.61  samples/s 64\n"
    )


def test_a_line_is_one_line_however_long_and_brackets_stay() -> None:
    console, file = _console(is_terminal=False)
    with ProgressDisplay("run [red]", num_steps=1, console=console) as display:
        display.update(0, num_samples=1, values={f"metric {i}": 1 / 3 for i in range(20)})
    assert file.getvalue().count("\n") == 1
    assert file.getvalue().startswith("run [red] 1/1")


def test_a_terminal_shows_where_the_run_is_and_what_is_left() -> None:
    console, file = _console(is_terminal=True)
    clock = Clock()
    with ProgressDisplay("grpo", num_steps=4, console=console, clock=clock) as display:
        clock.now_s += 2.0
        display.update(0, num_samples=10, values={"reward": 0.5})
    shown = file.getvalue().splitlines()[-2]
    assert "grpo" in shown
    assert "1/4 5 samples/s  reward 0.5  6.0 s left" in shown


def test_rates_follow_the_latest_steps() -> None:
    clock = Clock()
    display = ProgressDisplay("grpo", num_steps=100, clock=clock)
    assert (display.rate, display.time_left) == ("", "")
    for step in range(60):
        clock.now_s += 10.0 if step < 40 else 1.0
        display.update(step, num_samples=5, values={})
    assert (display.rate, display.time_left) == ("5 samples/s", "40.0 s left")


def test_a_resumed_run_starts_where_it_was() -> None:
    console, file = _console(is_terminal=False)
    clock = Clock()
    with ProgressDisplay(
        "grpo", num_steps=10, first_step=8, console=console, clock=clock
    ) as display:
        clock.now_s += 1.0
        display.update(8, num_samples=4, values={})
    assert file.getvalue() == "grpo 9/10  4 samples/s  1.0 s left\n"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_nobody_needs_to_look(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setenv("FORCE_COLOR" if is_terminal else "NO_COLOR", "1")
    with open(writer, "w", buffering=1) as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        with ProgressDisplay("grpo", num_steps=2, every_s=0.0) as display:
            assert display.console.is_terminal == is_terminal
            for step in range(2):
                display.update(step, num_samples=1, values={})
            display.summarize({})
        assert display.num_done == 2


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
