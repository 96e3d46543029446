"""The dispatcher over the real in-process executor: whose answers are whose."""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass

import pytest
from penstock.dataflow.errors import StateError, WorkerError
from penstock.dataflow.runtime.dispatcher import Dispatcher, Submission
from penstock.dataflow.runtime.executor import Program
from penstock.dataflow.runtime.host import Host
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.messages import work
from penstock.dataflow.runtime.placement import one_group
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.dataflow.scheduler.events import Load, Publish
from penstock.dataflow.scheduler.schedule import Deadline

from ..counter import COUNT, Counter


@dataclass(frozen=True)
class FragileSpec:
    def build(self, context: WorkerContext) -> Counter:
        return Fragile()


class Fragile(Counter):
    def fail(self) -> None:
        raise ZeroDivisionError("on purpose")


@pytest.fixture
def dispatcher() -> Generator[Dispatcher]:
    executor = InProcess()
    programs = {"main": Program(COUNT, one_group(COUNT))}
    executor.start(programs, {"model": FragileSpec()}, 0, 60.0)
    yield Dispatcher(executor)
    executor.stop()


EXPORT = {0: work(Host.export_weights, "model")}
FAIL = {0: work(Host.call_method, "model", "fail")}
COUNTED = {0: work(Host.call_method, "model", "count")}
FIRST, SECOND = Publish("model", 1), Load("model", 1, "all")


def done(dispatcher: Dispatcher, timeout_s: float = 1.0) -> list[Submission]:
    return [one for one in dispatcher.wait(timeout_s) if isinstance(one, Submission)]


def test_what_is_carried_is_not_handed_out_before_it_is_asked_for(dispatcher: Dispatcher) -> None:
    with dispatcher.run("main"):
        submission = dispatcher.submit(FIRST, "main", "all", EXPORT)
        submission.carried = True
    with dispatcher.run("main"):
        dispatcher.perform_now("main", "all", COUNTED, Deadline(5.0))
        assert not submission.waiting
        assert done(dispatcher, 0.0) == []


def test_a_run_gets_its_tasks_one_after_another(dispatcher: Dispatcher) -> None:
    with dispatcher.run("main"):
        dispatcher.submit(FIRST, "main", "all", EXPORT)
        dispatcher.submit(SECOND, "main", "all", FAIL)
        (first,), (second,) = done(dispatcher), done(dispatcher)
        assert (first.task, first.failed) == (FIRST, None)
        assert first.first.weights is not None
        assert second.task == SECOND
        assert isinstance(second.failed and second.failed.error, ZeroDivisionError)
        assert done(dispatcher, 0.1) == []


def test_what_is_done_beside_a_run_leaves_its_answers_for_it(dispatcher: Dispatcher) -> None:
    with dispatcher.run("main"):
        dispatcher.submit(FIRST, "main", "all", EXPORT)
        dispatcher.submit(SECOND, "main", "all", EXPORT)
        asked = dispatcher.perform_now("main", "all", COUNTED, Deadline(5.0))
        assert asked.first.report is not None
        assert asked.first.report.answer == 0
        assert [one.task for one in done(dispatcher)] == [FIRST, SECOND]


def test_a_failure_beside_a_run_is_raised_with_what_caused_it(dispatcher: Dispatcher) -> None:
    with dispatcher.run("main"):
        dispatcher.submit(FIRST, "main", "all", EXPORT)
        with pytest.raises(WorkerError) as raised:
            dispatcher.perform_now("main", "all", FAIL, Deadline(5.0))
        assert re.fullmatch(
            r"ZeroDivisionError: on purpose\nraised at test_dispatcher\.py:\d+\n"
            r'    raise ZeroDivisionError\("on purpose"\)',
            str(raised.value),
        )
        assert isinstance(raised.value.__cause__, ZeroDivisionError)
        assert [one.task for one in done(dispatcher)] == [FIRST]


def test_nobody_hears_of_what_a_run_had_out_when_it_ended(dispatcher: Dispatcher) -> None:
    with dispatcher.run("main"):
        dispatcher.submit(FIRST, "main", "all", EXPORT)
        dispatcher.submit(SECOND, "main", "all", EXPORT)
        dispatcher.perform_now("main", "all", COUNTED, Deadline(5.0))
        dispatcher.submit(SECOND, "main", "all", FAIL)
    with dispatcher.run("main"):
        assert done(dispatcher, 0.1) == []
        dispatcher.submit(FIRST, "main", "all", EXPORT)
        assert [one.task for one in done(dispatcher)] == [FIRST]


def test_one_run_at_a_time(dispatcher: Dispatcher) -> None:
    with dispatcher.run("main"):
        with (
            pytest.raises(StateError, match="a run of program 'main' is not over"),
            dispatcher.run("b"),
        ):
            pass
        dispatcher.submit(FIRST, "main", "all", EXPORT)
        assert [one.task for one in done(dispatcher)] == [FIRST]
    with dispatcher.run("b"):
        pass


def test_a_closed_dispatcher_takes_no_work(dispatcher: Dispatcher) -> None:
    dispatcher.close()
    for refused in (
        lambda: dispatcher.submit(FIRST, "main", "all", EXPORT),
        lambda: dispatcher.perform_now("main", "all", EXPORT, Deadline(5.0)),
        lambda: dispatcher.wait(0.1),
    ):
        with pytest.raises(StateError, match="its engine has been closed"):
            refused()


def test_the_oldest_work_is_what_everything_waits_for(dispatcher: Dispatcher) -> None:
    assert dispatcher.oldest() is None
    with dispatcher.run("main"):
        dispatcher.submit(FIRST, "main", "all", EXPORT)
        dispatcher.submit(SECOND, "main", "all", COUNTED)
        for task in (FIRST, SECOND):
            oldest = dispatcher.oldest()
            assert oldest is not None
            assert oldest[0] == task
            assert 0 <= oldest[1] < 60
            done(dispatcher)
        assert dispatcher.oldest() is None
