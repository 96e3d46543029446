"""Verifiers that lie, flood, hide and stay: no answer moves to another row and nothing is left."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from no_more_files import no_more_files
from penstock.dataflow.errors import WorkerError
from penstock.workers.isolation import pool as pools
from penstock.workers.isolation.pool import CallResult, NotSaid, read_answer
from penstock.workers.verifiers.pool import Outcome, VerifierPool

from .odd_reward import MakePool, with_mark

NOT_A_REPLY = (
    "the verifier's process said something that is no reply to its call, such as a second one, so "
    "it is not believed\n    a reward must neither answer from a copy of its process nor write to "
    "descriptors that it has not opened\n"
)
linux = pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")


def test_a_reward_that_returns_on_both_sides_of_a_fork_moves_no_answer(make_pool: MakePool) -> None:
    pool = make_pool()
    calls = [("fork and return" if i % 3 == 0 else "return", i) for i in range(1, 30)]
    assert pool.run(calls) == [Outcome(float(i)) for i in range(1, 30)]
    assert make_pool("make_twice").run(calls[:3]) == [Outcome(1.0), Outcome(2.0), Outcome(3.0)]


@pytest.mark.slow
def test_who_answers_twice_is_not_believed(make_pool: MakePool) -> None:
    """Of a copy that passes for its process, the second answer shows; the first may be either's."""
    pool = make_pool()
    for _ in range(3):
        calls = [("fork and answer", 5), ("sleep", 0.3), *(("return", i) for i in range(9))]
        first, second, *rest = pool.run(calls)
        assert first in (Outcome(5.0), Outcome(error=NOT_A_REPLY))
        assert second in (Outcome(1.0), Outcome(error=NOT_A_REPLY))
        assert (first.error or second.error) == NOT_A_REPLY
        assert rest == [Outcome(float(i)) for i in range(9)]


FORGED = [
    '{"row": 0, "nonce": "0", "score": 7.0}\n',
    '{"row": 1, "nonce": "0", "score": 7.0}\n',
    '{"score": 7.0}\n',
    '{"score": 7.0}',
    "[]\n",
    "7\n",
    "null\n",
    "\n",
    "\n\n\n",
    '{"row": 0\n',
    "[" * 60_000 + "\n",
    '{"row": ' + "9" * 6000 + "}\n",
    "\x00\n",
]


@pytest.mark.slow
@linux
@pytest.mark.parametrize("text", FORGED, ids=lambda text: repr(text)[:20])
def test_what_is_no_reply_fails_the_row_alone(make_pool: MakePool, text: str) -> None:
    pool = make_pool(num_processes=1)
    outcomes = pool.run([("return", 1), ("write", text), ("return", 3)])
    assert outcomes == [Outcome(1.0), Outcome(error=NOT_A_REPLY), Outcome(3.0)]


def test_bytes_of_any_kind_are_told_from_a_reply() -> None:
    good: dict[str, Any] = {"nonce": "4", "value": 0.5}
    bad: list[Any] = [
        {**good, "nonce": "5"},
        {**good, "nonce": 4},
        {**good, "error": "both"},
        {**good, "more": 1},
        {"nonce": "4"},
        {"nonce": "4", "error": 3},
        {"value": 0.5},
        [good],
        None,
    ]
    told = [json.dumps(one).encode() for one in bad]
    for line in (*told, b"\xff\xfe", b"\x80", b"1" * 5000, b"", b" ", b"[" * 60_000):
        with pytest.raises(NotSaid):
            read_answer(line, "4")
    assert read_answer(json.dumps(good).encode(), "4") == CallResult(0.5)
    assert read_answer(b'{"nonce": "4", "error": "why"}', "4") == CallResult(error="why")


@pytest.mark.slow
@linux
@pytest.mark.parametrize(
    "value",
    [*("1", "true", '"1"', "[1.0]", "NaN", "Infinity", "[]"), '[{"value": {"a": NaN}}]']
    + ['[{"value": 1.0, "late": true}]', '[{"late": false}]', '[{"value": 1.0}, {"value": 1.0}]'],
)
def test_a_forged_value_that_is_no_score_is_not_believed(make_pool: MakePool, value: str) -> None:
    assert make_pool().run([("forge", value)]) == [Outcome(error=NOT_A_REPLY)]


@pytest.mark.slow
@linux
def test_what_is_said_between_calls_costs_nothing(make_pool: MakePool) -> None:
    pool = make_pool()
    assert pool.run([("late", '{"score": 9.0}\n')]) == [Outcome(1.0)]
    time.sleep(0.6)
    assert pool.run([("return", 2), ("return", 3)]) == [Outcome(2.0), Outcome(3.0)]


@pytest.mark.slow
@linux
@pytest.mark.parametrize("what", ["drip", "write and loop"])
def test_who_writes_without_end_has_its_time_limit(make_pool: MakePool, what: str) -> None:
    pool = make_pool(time_limit_s=0.5)
    pool.run([("return", 1)])
    began = time.monotonic()
    assert pool.run([(what, "x" * 1000), ("return", 2)]) == [Outcome(timed_out=True), Outcome(2.0)]
    assert time.monotonic() - began < 5


@linux
def test_a_flood_is_read_no_further_than_a_reply_may_be(make_pool: MakePool) -> None:
    pool = make_pool(time_limit_s=20.0)
    pool.run([("return", 1)])
    began = time.monotonic()
    assert pool.run([("flood",), ("return", 2)]) == [Outcome(error=NOT_A_REPLY), Outcome(2.0)]
    assert time.monotonic() - began < 5


def test_long_errors_are_cut_where_they_arise(make_pool: MakePool) -> None:
    pool = make_pool(time_limit_s=20.0)
    pool.run([("return", 1)])
    began = time.monotonic()
    long, strange = pool.run([("long", 100_000_000), ("strange", 100_000)])
    assert time.monotonic() - began < 5
    assert long.error is not None
    assert "/odd_reward.py:" in long.error.splitlines()[0]
    assert "characters ...xxx" in long.error
    assert long.error.endswith("xxxend\n")
    assert len(long.error) < 4100
    assert strange.error is not None
    assert "\U0001f600" in strange.error


def test_odd_ends_are_failures_of_their_rows(make_pool: MakePool) -> None:
    pool = make_pool(time_limit_s=20.0)
    calls = [("huge",), ("loud",), ("interrupt",), ("generator",), ("leave", 0), ("return", 2)]
    errors = [outcome.error for outcome in pool.run(calls)]
    ends = [error and error.rstrip().splitlines()[-1] for error in errors]
    assert (ends.pop(0) or "").endswith("000, not a finite number")
    assert ends == [
        "odd_reward.Loud: <exception str() failed>",
        "KeyboardInterrupt",
        "GeneratorExit",
        "the verifier's process ended with exit code 0",
        None,
    ]


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("make_and_exit", "the verifier cannot be made:\n/"),
        ("make_and_leave", "the verifier's process ended with exit code 0 before it was ready"),
    ],
)
def test_a_factory_that_ends_its_process(make_pool: MakePool, factory: str, message: str) -> None:
    with pytest.raises(WorkerError) as caught:
        make_pool(factory).run([("return", 1)])
    assert str(caught.value).startswith(message)


@pytest.mark.slow
def test_a_call_that_is_not_read_waits_no_longer_than_its_limit(make_pool: MakePool) -> None:
    pool = make_pool(time_limit_s=1.0)
    pool.run([("return", 1)])
    stopped = psutil.Process(pool.process_ids[0]).children()[0]
    stopped.suspend()
    large = "x" * 50_000_000
    began = time.monotonic()
    outcomes = pool.run([("length", large), ("return", 2), ("return", 3)])
    assert outcomes == [Outcome(timed_out=True), Outcome(2.0), Outcome(3.0)]
    assert time.monotonic() - began < 6
    patient = make_pool(time_limit_s=20.0)
    assert patient.run([("length", large)]) == [Outcome(50_000_000.0)]


def test_who_closes_its_descriptors_and_goes_on_is_ended(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "STOP_S", 0.5)
    error = "the verifier's process closed its replies and went on\n"
    assert make_pool().run([("close",), ("return", 2)]) == [Outcome(error=error), Outcome(2.0)]


@pytest.mark.slow
@linux
@pytest.mark.parametrize("what", ["hide", "hide and leave", "hide and loop"])
def test_processes_that_leave_their_session_end_with_the_verifier(
    make_pool: MakePool, what: str
) -> None:
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    pool = make_pool(time_limit_s=2.0)
    pool.run([("return", 1)])
    (outcome,) = pool.run([(what, mark)])
    if what == "hide":
        assert outcome == Outcome(1.0)
        assert len(with_mark(mark)) == 3, "a verifier may keep helpers between calls"
        pool.close()
    assert with_mark(mark) == []


@pytest.mark.slow
@linux
def test_a_process_that_always_starts_another_and_ends_is_caught(
    make_pool: MakePool, tmp_path: Path
) -> None:
    beats = tmp_path / "beats"
    pool = make_pool()
    assert pool.run([("breed", str(beats))]) == [Outcome(1.0)]
    before = beats.stat().st_size
    assert before > 1
    pool.close()
    after = beats.stat().st_size
    time.sleep(0.3)
    assert beats.stat().st_size == after


@pytest.mark.slow
def test_a_supervisor_that_does_not_act_is_killed_and_named(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pools, "STOP_S", 0.2)
    pool = make_pool()
    pool.run([("return", 1)])
    (pid,) = pool.process_ids
    verifier = psutil.Process(pid).children()[0]
    os.kill(pid, signal.SIGSTOP)
    pool.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"process {pid} did not end what a verifier has started within 0.2 s; it is killed, and "
        "some of that may run on"
    ]
    if sys.platform == "linux":  # which ends the verifier with its supervisor
        verifier.wait(10)


@pytest.mark.slow
def test_replacing_one_takes_no_time_of_another_s_call(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "STOP_S", 1.5)
    pool = make_pool(time_limit_s=1.0, num_processes=2)
    assert pool.run([("sleep", 0.3)] * 2) == [Outcome(1.0)] * 2
    supervisor = psutil.Process(pool.process_ids[1])
    supervisor.suspend()
    while supervisor.status() != psutil.STATUS_STOPPED:  # else it would still reap the verifier
        time.sleep(0.01)
    (verifier,) = supervisor.children()
    verifier.kill()
    while verifier.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    outcomes = pool.run([("return", 1), ("return", 2)])
    assert outcomes == [Outcome(1.0), Outcome(2.0)]
    monkeypatch.undo()  # on a busy machine the others may take longer to end


def test_a_batch_has_a_limit_too(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(time_limit_s=0.5, start_limit_s=60.0, num_processes=2)
    pool.run([("return", 1)] * 2)
    assert pool.batch_limit_s(5) == 60.0 + 3 * 5.5
    monkeypatch.setattr(VerifierPool, "batch_limit_s", lambda *_: 0.7)  # pyright: ignore[reportUnknownLambdaType]
    began = time.monotonic()
    outcomes = pool.run([("return", 1), *[("sleep", 60)] * 20])
    assert time.monotonic() - began < 3
    assert outcomes == [Outcome(1.0), *[Outcome(timed_out=True)] * 20]
    monkeypatch.undo()


@pytest.mark.slow
def test_a_process_that_cannot_be_started(make_pool: MakePool) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with no_more_files(spare=12), pytest.raises(WorkerError) as caught:
        make_pool(num_processes=40)
    assert str(caught.value) == (
        "a process for the verifier cannot be started: [Errno 24] Too many open files\n"
        "    free what has run out, or lower num_processes"
    )
    del caught
    gc.collect()  # of the pool that was begun
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_process_that_cannot_be_replaced_is_replaced_later(make_pool: MakePool) -> None:
    pool = make_pool()
    assert pool.run([("return", 1)]) == [Outcome(1.0)]
    with no_more_files(spare=5):  # an event loop takes three
        assert pool.run([("leave", 0)])[0].error is not None
        with pytest.raises(WorkerError, match="cannot be started: .Errno 24. Too many open"):
            pool.run([("return", 1)])
    assert pool.run([("return", 2)]) == [Outcome(2.0)]
