"""Work in this process: deadlines, what counts as time, and what is left afterwards."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError, WorkerError
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime import worker_protocol as worker
from penstock.dataflow.runtime.eager import run_eagerly
from penstock.dataflow.runtime.engine import Engine, StepResult
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.worker_protocol import WorkerContext

from ..counter import SOURCES, Counter, Key, Keys, Model, Score, apart, engine

# The deadline in this process is SIGALRM's, which pytest-timeout otherwise takes.
pytestmark = pytest.mark.timeout(120, method="thread")


@dataclass(frozen=True)
class SlowSpec:
    """A counter that takes its time to sample."""

    sample_s: float

    def build(self, context: WorkerContext) -> Counter:
        return Slow(self.sample_s)


class Slow(Counter):
    def __init__(self, sample_s: float) -> None:
        super().__init__()
        self.sample_s = sample_s

    def sample(self, key: Key) -> Score:
        time.sleep(self.sample_s)
        return super().sample(key)

    def nap(self, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"


def four_samples_step(keys: Keys, a: Model, b: Model, c: Model, d: Model) -> object:
    return a.sample(keys.key), b.sample(keys.key), c.sample(keys.key), d.sample(keys.key)


FOUR = build(four_samples_step)
ON_FOUR_GROUPS = apart(FOUR, a__sample="a", b__sample="b", c__sample="c", d__sample="d")


def slow_engine(sample_s: float, deadline_s: float, **more: Any) -> Engine:
    return engine(worker=SlowSpec(sample_s), deadline_s=deadline_s, **more)


# --- deadlines


def test_a_call_that_outlives_its_deadline_is_interrupted_and_reported() -> None:
    began_s = time.monotonic()
    with slow_engine(60, 0.5) as one, pytest.raises(WorkerError) as raised:
        list(one.run(SOURCES, 1))
    assert time.monotonic() - began_s < 30
    text = str(raised.value)
    assert "no progress within 0.5 s (Schedule.deadline_s)" in text
    assert "model.sample of step 0 has run for 0.5 s" in text
    assert "on all[0]" in text


def test_an_answer_that_does_not_come_in_time_is_reported() -> None:
    with slow_engine(0, 0.5) as one:
        with pytest.raises(WorkerError) as raised:
            one.call("model", "nap", 60)
        assert str(raised.value) == (
            "call_method on group 'all' took longer than 0.5 s (Schedule.deadline_s); rank(s) "
            "[0] did not answer"
        )
        assert one.call("model", "nap", 0) == "slept"
        assert [step.step for step in one.run(SOURCES, 2)] == [0, 1]


def test_outside_the_main_thread_a_call_takes_what_it_takes() -> None:
    steps: list[StepResult] = []

    def run() -> None:
        with slow_engine(0.4, 0.2) as one:
            steps.extend(one.run(SOURCES, 2))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert [step.step for step in steps] == [0, 1]


# --- what counts as time


@pytest.mark.slow
def test_waiting_in_line_does_not_count() -> None:
    with slow_engine(0.5, 1.5, graph=FOUR, placement=ON_FOUR_GROUPS) as one:
        assert [step.step for step in one.run(SOURCES, 1)] == [0]


@pytest.mark.slow
def test_an_answer_s_time_begins_when_those_before_it_are_there() -> None:
    """The ask below waits for samples of the next step, longer than one of them may take."""
    with slow_engine(0.5, 1.5, graph=FOUR, placement=ON_FOUR_GROUPS, max_lag=1) as one:
        next(one.run(SOURCES, 2))
        assert one.call("a", "nap", 0.5) == "slept"


class SideBySide(InProcess):
    """Says of itself what an executor with a process per rank says."""

    one_at_a_time = False


def test_the_time_that_the_receiver_of_the_steps_needs_does_not_count() -> None:
    executor = SideBySide()
    with slow_engine(
        0, 0.5, graph=FOUR, placement=ON_FOUR_GROUPS, max_lag=1, executor=executor
    ) as one:
        found: list[int] = []
        for step in one.run(SOURCES, 3):
            found.append(step.step)
            if step.step == 0:
                time.sleep(1)
    assert found == [0, 1, 2]


# --- what is left afterwards


@dataclass(frozen=True)
class ClosingSpec:
    """Builds counters that say when they are closed; or fails to build or to close."""

    closed: list[str]
    fail: str = ""

    def build(self, context: WorkerContext) -> Counter:
        if self.fail == "build":
            raise ConfigError("on purpose")
        if self.fail == "interrupt":
            raise KeyboardInterrupt("on purpose")
        return Closing(context.role, self.closed, self.fail)


class Closing(Counter):
    def __init__(self, name: str, closed: list[str], fail: str = "") -> None:
        super().__init__()
        self.name, self.closed, self.fail = name, closed, fail

    def close(self) -> None:
        if self.fail == "close":
            raise ZeroDivisionError("on purpose")
        if self.fail == "hang":
            time.sleep(60)
        self.closed.append(self.name)


def four_workers(closed: list[str], **fail: str) -> dict[str, ClosingSpec]:
    return {role: ClosingSpec(closed, fail.get(role, "")) for role in FOUR.roles}


def test_workers_built_here_are_closed_once_and_built_anew_for_the_next_start() -> None:
    closed: list[str] = []
    one = Engine(FOUR, ON_FOUR_GROUPS, workers=four_workers(closed))
    for times in (1, 2):
        with one:
            list(one.run(SOURCES, 1))
            assert closed == ["a", "b", "c", "d"] * (times - 1)
        assert closed == ["a", "b", "c", "d"] * times
    one.close()
    assert len(closed) == 8


def test_a_live_worker_is_its_owner_s_to_close() -> None:
    closed: list[str] = []
    with engine(worker=Closing("live", closed)) as one:
        list(one.run(SOURCES, 1))
    assert closed == []


@pytest.mark.parametrize(
    ("how", "error"), [("build", ConfigError), ("interrupt", KeyboardInterrupt)]
)
def test_if_a_worker_cannot_be_built_those_before_it_are_closed(
    how: str, error: type[BaseException]
) -> None:
    closed: list[str] = []
    one = Engine(FOUR, ON_FOUR_GROUPS, workers=four_workers(closed, c=how))
    with pytest.raises(error, match="on purpose"):
        one.start()
    assert closed == ["a", "b"]


def test_a_worker_that_fails_to_close_does_not_keep_the_others_open(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker, "CLOSE_S", 0.2)
    closed: list[str] = []
    with Engine(FOUR, ON_FOUR_GROUPS, workers=four_workers(closed, a="close", b="hang")):
        pass
    assert closed == ["c", "d"]
    assert [record.getMessage() for record in caplog.records] == ["closing a Closing failed"] * 2
    assert "ZeroDivisionError: on purpose" in caplog.text


def test_a_step_function_called_by_hand_closes_what_was_built_for_it() -> None:
    closed: list[str] = []
    steps = run_eagerly(four_samples_step, SOURCES, 2, workers=four_workers(closed))
    next(steps)
    assert closed == []
    list(steps)
    assert closed == ["a", "b", "c", "d"]
