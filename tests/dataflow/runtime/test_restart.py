"""What starting a group again takes is no sign of a worker that hangs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
from penstock.dataflow.errors import WorkerError
from penstock.dataflow.runtime import dispatcher
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.executor import Completion, Restart
from penstock.dataflow.runtime.host import Host
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.messages import RankWork

from ..counter import COUNT, SOURCES, apart, engine, seen


@dataclass(frozen=True)
class _Owed:
    """Work that is done `took_s` seconds after it was given out, on the clock of the test."""

    ticket: int
    program: str
    group: str
    work: RankWork
    took_s: float
    end_s: float


class Timed(InProcess):
    """Groups that work at the same time, for as long as the test says; the clock is the test's.

    `takes_s` says how long a call of a node, or of a worker's method, takes: others take no time.
    """

    one_at_a_time = False

    def __init__(self, takes_s: dict[str, float], dies_s: Sequence[float], start_s: float) -> None:
        super().__init__()
        self.now_s = 0.0
        self.takes_s, self.dies_s, self.start_s = takes_s, list(dies_s), start_s
        self.owed: list[_Owed] = []

    def submit(self, ticket: int, program: str, group: str, rank: int, work: RankWork) -> None:
        name = work.arguments[0].node if work.method is Host.call else ""
        name = work.arguments[1] if work.method is Host.call_method else name
        took_s = self.takes_s.get(name, 0.0)
        self.owed.append(_Owed(ticket, program, group, work, took_s, self.now_s + took_s))

    def wait(self, timeout_s: float) -> Sequence[Completion | Restart]:
        self.owed.sort(key=lambda one: (one.end_s, one.ticket))
        next_s = min([self.now_s + timeout_s, *(one.end_s for one in self.owed[:1])])
        if self.dies_s and self.dies_s[0] <= next_s:
            return [self.restart()]
        self.now_s = max(self.now_s, next_s)
        if not self.owed or self.owed[0].end_s > self.now_s:
            return []
        done = self.owed.pop(0)
        super().submit(done.ticket, done.program, done.group, 0, done.work)
        return super().wait(timeout_s)

    def restart(self) -> Restart:
        self.now_s = max(self.now_s, self.dies_s.pop(0)) + self.start_s
        self.owed = [
            replace(one, end_s=self.now_s + one.took_s) if one.group == "rollout" else one
            for one in self.owed
        ]
        return Restart("rollout", self.start_s, held_up_s=self.start_s)


def timed_engine(
    monkeypatch: pytest.MonkeyPatch,
    deadline_s: float,
    takes_s: dict[str, float],
    dies_s: Sequence[float],
    start_s: float,
    max_lag: int = 0,
) -> Engine:
    executor = Timed(takes_s, dies_s, start_s)
    monkeypatch.setattr(dispatcher, "time", SimpleNamespace(monotonic=lambda: executor.now_s))
    placement = apart(COUNT, model__sample="rollout")
    return engine(placement, max_lag=max_lag, deadline_s=deadline_s, executor=executor)


def test_starting_may_take_longer_than_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    with timed_engine(monkeypatch, 60.0, {"model.sample": 10.0}, [5.0, 120.0], 90.0) as one:
        assert seen(list(one.run(SOURCES, 3))) == [0, 1, 2]


def test_what_others_finish_meanwhile_is_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training from 0 s to 550 s, while the group that samples is away from 500 s to 620 s."""
    takes_s = {"model.train": 550.0, "model.sample": 550.0}
    with timed_engine(monkeypatch, 600.0, takes_s, [1050.0], 120.0, max_lag=1) as one:
        assert seen(list(one.run(SOURCES, 2))) == [0, 0]


def test_what_a_group_does_again_has_all_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with timed_engine(monkeypatch, 60.0, {"model.sample": 50.0}, [40.0], 5.0) as one:
        assert seen(list(one.run(SOURCES, 2))) == [0, 1]


def test_but_no_more_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        timed_engine(monkeypatch, 60.0, {"model.sample": 70.0}, [40.0], 90.0) as one,
        pytest.raises(WorkerError, match=r"model\.sample of step 0 has run for 61\.0 s"),
    ):
        list(one.run(SOURCES, 2))


def test_a_call_beside_the_run_has_all_its_time_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with timed_engine(monkeypatch, 60.0, {"count": 50.0}, [40.0], 90.0) as one:
        assert one.call("model", "count") == 0
