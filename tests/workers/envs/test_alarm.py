"""The time limit of steps, and the one around it that goes on meanwhile."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from penstock.dataflow.runtime.call_context import DeadlineExceeded, deadline
from penstock.workers.envs.group import StepAlarm, StepTooLong
from penstock.workers.envs.spec import EnvSpec

from .acting import env_worker, roll
from .toys import Counting, register

# SIGALRM, which pytest-timeout otherwise takes, is what is tested.
pytestmark = pytest.mark.timeout(60, method="thread")

SLEEP_S = 2.0
"""How long what hangs takes: far longer than the limit it is under."""

LIMIT_S = 0.1


class Slow(Counting):
    def __init__(self, where: str) -> None:
        super().__init__(length=100)
        self._where = where
        self._hang("make")

    def _hang(self, where: str) -> None:
        if where == self._where:
            time.sleep(SLEEP_S)

    def step(self, action: Any) -> Any:
        self._hang("step")
        return super().step(action)

    def reset(self, **options: Any) -> Any:
        self._hang("reset")
        return super().reset(**options)


class ClosesSlowly(Counting):
    """One in the process fails once, and then does not let itself be closed."""

    failed = False

    def step(self, action: Any) -> Any:
        if self._steps == 2 and not ClosesSlowly.failed:
            ClosesSlowly.failed = self._hangs = True
            raise RuntimeError("out of coffee")
        return super().step(action)

    def close(self) -> None:
        if getattr(self, "_hangs", False):
            time.sleep(SLEEP_S)


register(Slow=Slow, ClosesSlowly=ClosesSlowly)


def interrupted(kind: type[BaseException], body: Callable[[], object]) -> None:
    """Require that the body is interrupted by exactly this, long before it would be over."""
    begun_s = time.monotonic()
    with pytest.raises(kind) as raised:
        body()
    assert type(raised.value) is kind
    assert time.monotonic() - begun_s < SLEEP_S / 2


def test_a_call_that_lasts_too_long_is_interrupted() -> None:
    def body() -> None:
        with StepAlarm(LIMIT_S) as alarm:
            alarm.arm()
            time.sleep(SLEEP_S)

    interrupted(StepTooLong, body)


def test_every_call_has_the_whole_time() -> None:
    with StepAlarm(LIMIT_S) as alarm:
        for _ in range(5):
            alarm.arm()
            time.sleep(0.6 * LIMIT_S)
        alarm.disarm()
        time.sleep(2 * LIMIT_S)

        def body() -> None:
            alarm.arm()
            time.sleep(SLEEP_S)

        begun_s = time.monotonic()
        interrupted(StepTooLong, body)
        assert time.monotonic() - begun_s > 0.9 * LIMIT_S
        interrupted(StepTooLong, body)


def test_a_call_that_takes_the_timer_away_does_so_for_no_longer_than_the_limit() -> None:
    with StepAlarm(LIMIT_S) as alarm:
        alarm.arm()
        signal.setitimer(signal.ITIMER_REAL, 0)
        time.sleep(1.5 * LIMIT_S)

        def body() -> None:
            alarm.arm()
            time.sleep(SLEEP_S)

        interrupted(StepTooLong, body)


@pytest.mark.parametrize("calls", [(), ("arm",), ("arm", "disarm")], ids=str)
def test_a_limit_around_it_goes_on_meanwhile(calls: tuple[str, ...]) -> None:
    def body() -> None:
        with deadline(LIMIT_S), StepAlarm(SLEEP_S * 2) as alarm:
            for call in calls:
                getattr(alarm, call)()
            time.sleep(SLEEP_S)

    interrupted(DeadlineExceeded, body)


def test_afterwards_the_limit_around_it_has_the_time_that_is_left() -> None:
    def body() -> None:
        with deadline(2 * LIMIT_S):
            with StepAlarm(SLEEP_S) as alarm:
                alarm.arm()
            time.sleep(SLEEP_S)

    interrupted(DeadlineExceeded, body)


@pytest.mark.parametrize("where", ["make", "reset", "step"])
def test_the_deadline_of_a_call_holds_whatever_its_environments_do(where: str) -> None:
    worker = env_worker(
        EnvSpec(id="toys/Slow-v0", options={"where": where}, step_limit_s=SLEEP_S * 2)
    )

    def body() -> None:
        with deadline(2 * LIMIT_S):
            roll(worker, 0, num_envs=1, group_size=1, horizon=1)

    interrupted(DeadlineExceeded, body)


def test_one_that_fails_and_does_not_let_itself_be_closed_is_replaced() -> None:
    ClosesSlowly.failed = False
    worker = env_worker(EnvSpec(id="toys/ClosesSlowly-v0", step_limit_s=LIMIT_S))
    begun_s = time.monotonic()
    roll(worker, 0)
    assert time.monotonic() - begun_s < SLEEP_S / 2
    assert worker.metrics["env_restarts"].value == 1
