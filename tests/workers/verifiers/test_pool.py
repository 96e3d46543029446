"""The pool: order, time limits, crashes, and that nothing is left running."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from killer import killing
from penstock.dataflow.errors import ConfigError, WorkerError
from penstock.workers.verifiers.pool import Outcome, VerifierPool, VerifierSpec

from .odd_reward import MakePool, with_mark


def test_outcomes_come_in_order(make_pool: MakePool) -> None:
    pool = make_pool(num_processes=3)
    calls = [("return", i / 7) for i in range(200)]
    assert pool.run(calls) == [Outcome(score=i / 7) for i in range(200)]
    assert pool.run([]) == []


@pytest.mark.slow
def test_a_call_that_never_ends_is_killed_and_costs_one_row(make_pool: MakePool) -> None:
    pool = make_pool(time_limit_s=1.0)
    before = pool.process_ids
    started = time.monotonic()
    outcomes = pool.run([("return", 1), ("loop",), ("return", 2), ("sleep", 60), ("return", 3)])
    assert time.monotonic() - started < 30
    assert [o.score for o in outcomes] == [1, None, 2, None, 3]
    assert [o.timed_out for o in outcomes] == [False, True, False, True, False]
    assert all(o.error is None for o in outcomes)
    assert not any(psutil.pid_exists(pid) for pid in before)
    assert len(pool.process_ids) == 1


def test_what_a_killed_verifier_started_ends_too(make_pool: MakePool) -> None:
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    pool = make_pool(time_limit_s=0.5)
    assert pool.run([("spawn and loop", mark)])[0].timed_out
    deadline = time.monotonic() + 10
    while with_mark(mark):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_failures_are_described(make_pool: MakePool) -> None:
    pool = make_pool()
    calls = [("raise", "odd"), ("exit", 3), ("die",), ("leave", 7), ("return", None)]
    calls += [("return", "1"), ("return", float("nan")), ("return", True)]
    outcomes = pool.run(calls)
    assert [outcome.score for outcome in outcomes] == [None] * 7 + [1]
    errors = [outcome.error or "" for outcome in outcomes]
    assert errors[0].endswith("ValueError: odd\n")
    assert "/odd_reward.py:" in errors[0]
    assert errors[1].endswith("SystemExit: 3\n")
    assert errors[2:] == [
        "the verifier's process ended by signal 9\n",
        "the verifier's process ended with exit code 7\n",
        "",
        "the verifier returned '1', not a finite number\n",
        "",
        "",
    ]


def test_printing_and_long_texts_do_no_harm(make_pool: MakePool) -> None:
    pool = make_pool()
    outcomes = pool.run([("print",), ("length", "é\n" * 500_000), ("print",)])
    assert [o.score for o in outcomes] == [1, 1_000_000, 1]


def test_a_process_imports_nothing_heavy(make_pool: MakePool) -> None:
    assert make_pool().run([("modules",)])[0] == Outcome(score=0.0)


def test_a_process_that_died_while_idle_costs_nothing(make_pool: MakePool) -> None:
    pool = make_pool()
    assert pool.run([("return", 1)])[0].score == 1
    os.kill(pool.process_ids[0], signal.SIGKILL)
    deadline = time.monotonic() + 20
    while pool.process_ids:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert pool.run([("return", 1), ("return", 2)]) == [Outcome(score=1), Outcome(score=2)]


def test_a_verifier_that_cannot_be_made(make_pool: MakePool) -> None:
    pool = make_pool("fail")
    for _ in range(2):
        with pytest.raises(WorkerError, match="(?s)cannot be made:.*RuntimeError: no license"):
            pool.run([("return", 1)])
    slow = make_pool("make_slowly", start_limit_s=0.5)
    with pytest.raises(WorkerError) as caught:
        slow.run([("return", 1)])
    assert str(caught.value) == (
        "the verifier's process was not ready after 0.5 s\n"
        "    see what the reward's module does when it is imported"
    )


def test_threads_take_turns(make_pool: MakePool) -> None:
    pool = make_pool(num_processes=2)
    results: dict[int, list[Outcome]] = {}

    def run(thread: int) -> None:
        results[thread] = pool.run([("return", thread * 100 + i) for i in range(20)])

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for thread in range(4):
        assert [o.score for o in results[thread]] == [thread * 100 + i for i in range(20)]


def test_calls_are_made_also_where_an_event_loop_is_running(make_pool: MakePool) -> None:
    pool = make_pool()

    async def run() -> list[Outcome]:
        return pool.run([("return", 1)])

    assert asyncio.run(run()) == [Outcome(score=1)]


def test_an_interrupted_run_is_not_gone_on_with(make_pool: MakePool, tmp_path: Path) -> None:
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals come to the main thread alone")
    pool, mark = make_pool(time_limit_s=60.0), tmp_path / "mark"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> None:
        while not mark.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.run([("linger", str(mark)), ("return", 1)])
    finally:
        signal.signal(signal.SIGINT, before)
        thread.join(20)
    assert pool.run([("return", 2)]) == [Outcome(score=2)]


def test_close_ends_the_processes(make_pool: MakePool) -> None:
    pool = make_pool(num_processes=2)
    pool.run([("return", 1)])
    ids = pool.process_ids
    assert len(ids) == 2
    pool.close()
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in ids)
    with pytest.raises(WorkerError, match="stopped by close"):
        pool.run([("return", 1)])


def test_a_forgotten_pool_ends_its_processes(make_pool: MakePool, tmp_path: Path) -> None:
    pool = VerifierPool(VerifierSpec(factory="odd_reward:make", arguments={}), num_processes=1)
    ids = pool.process_ids
    del pool
    assert not any(psutil.pid_exists(pid) for pid in ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [
        "loop",
        "spawn and loop",
        pytest.param(
            "spawn and hold the lock",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="only Linux can end it"),
        ),
    ],
)
def test_a_killed_parent_leaves_nothing_running(
    make_pool: MakePool, tmp_path: Path, what: str
) -> None:
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from penstock.workers.data.task import VerifierSpec\n"
        "from penstock.workers.verifiers.pool import VerifierPool\n"
        "pool = VerifierPool(VerifierSpec(factory='odd_reward:make', arguments={}), "
        "num_processes=1, time_limit_s=600)\n"
        "pool.run([('return', 1)])\nprint(pool.process_ids[0], flush=True)\n"
        f"pool.run([({what!r}, {mark!r})])"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        until = time.monotonic() + 20
        while len(with_mark(mark)) < (1 if what == "loop" else 2):  # the parent is one of them
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(0.2)  # for the call to be under way
        parent.kill()
    child.wait(timeout=20)
    until = time.monotonic() + 20
    while with_mark(mark):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_numbers_out_of_range_are_refused() -> None:
    spec = VerifierSpec(factory="odd_reward:make", arguments={})
    with pytest.raises(ConfigError) as caught:
        VerifierPool(spec, num_processes=0, time_limit_s=5)
    assert str(caught.value) == (
        "num_processes=0, time_limit_s=5\n"
        "    a verifier needs 1 to 256 processes and a time limit of 0.001 to 86400 s"
    )


@pytest.mark.parametrize("whom", ["supervisor", "verifier"])
def test_what_a_killed_process_had_another_does(
    make_pool: MakePool, tmp_path: Path, whom: str
) -> None:
    pool, mark = make_pool(time_limit_s=60.0), tmp_path / "mark"

    def find() -> list[int]:
        (supervisor,) = pool.process_ids
        children = [child.pid for child in psutil.Process(supervisor).children()]
        return [supervisor] if whom == "supervisor" else children

    with killing(find, mark.exists):
        outcomes = pool.run([("linger", str(mark)), ("return", 0.25)])
    assert outcomes == [Outcome(score=0.5), Outcome(score=0.25)]


@pytest.mark.slow
def test_a_call_that_is_made_again_takes_no_time_of_the_others(
    make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limit_s(_: VerifierPool, number: int, longest_s: float) -> float:
        return 60.0 if number == 1 else 3.0

    monkeypatch.setattr(VerifierPool, "batch_limit_s", limit_s)
    pool, mark = make_pool(time_limit_s=60.0), tmp_path / "mark"
    with killing(lambda: pool.process_ids, mark.exists):
        outcomes = pool.run([("linger", str(mark)), ("sleep", 4)])
    assert outcomes == [Outcome(score=0.5), Outcome(score=1.0)]
    monkeypatch.undo()


def test_one_that_is_killed_before_it_is_ready_is_replaced(
    make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    monkeypatch.setenv("LINGER", str(mark))
    pool = make_pool("make_later")
    with killing(lambda: pool.process_ids, mark.exists):
        assert pool.run([("return", 1)]) == [Outcome(score=1.0)]
