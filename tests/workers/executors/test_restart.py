"""Replicas that keep nothing survive the death of a process, and the run is none the worse."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.runtime.engine import Engine, StepResult
from penstock.dataflow.runtime.executor import Completion, Executor, Program, Restart
from penstock.dataflow.runtime.host import Host
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.messages import work
from penstock.dataflow.runtime.placement import DeviceGroup, Placement, one_group
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.workers.executors import supervisor
from penstock.workers.executors.supervisor import Supervisor
from penstock.workers.weight_sync.channel import CHANNELS, DEFAULT_TRANSPORT, Transport

from ...algorithms import runs
from ...dataflow import counter
from .backends import Backend
from .mortal import MortalSpec

pytestmark = pytest.mark.slow


def finish(
    run: runs.Run,
    placement: Placement,
    executor: Executor,
    max_lag: int,
    num_offers: list[int] | None = None,
    **workers: Any,
) -> tuple[dict[str, str], list[StepResult]]:
    engine = Engine(
        run.graph,
        placement,
        workers={**run.workers, **workers},
        executor=executor,
        schedule=Schedule(max_lag=max_lag),
    )
    steps: list[StepResult] = []
    with engine:
        for step in engine.run(run.sources, 4):
            steps.append(step)
            if isinstance(executor, Supervisor) and num_offers is not None:
                num_offers.append(executor.num_offers)
        return {role: engine.call(role, "weights_sha256") for role in run.trained}, steps


IN_SHORT = ("spawned", "object_store"), ("on_ray", "object_store"), ("spawned", "cuda_ipc")
"""Each backend and each channel once; the others take minutes and show no more."""

WAYS = [
    pytest.param(*way, marks=() if way in IN_SHORT else pytest.mark.nightly)
    for way in itertools.product(("spawned", "on_ray"), CHANNELS)
]


@pytest.mark.parametrize(("backend", "transport"), WAYS, indirect=["backend"])
def test_a_rollout_process_that_dies_loses_nothing_and_adds_nothing(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    backend: Backend,
    transport: Transport,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What shares a GPU's memory shares a CPU's if it is not refused.
    monkeypatch.setattr(supervisor, "check_transport", _not_refused)
    check_that_nothing_is_lost(tmp_path, caplog, backend, transport, ())


def test_nor_does_one_that_shares_a_device(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spawned: Backend
) -> None:
    check_that_nothing_is_lost(tmp_path, caplog, spawned, DEFAULT_TRANSPORT, (0,))


def _not_refused(transport: Transport, routes: object) -> None:
    del transport, routes


def check_that_nothing_is_lost(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    backend: Backend,
    transport: Transport,
    main: tuple[int, ...],
) -> None:
    run = runs.make("grpo")
    here = replace(one_group(run.graph), num_chunks=2)
    expected, plain = finish(run, here, InProcess(), max_lag=1)

    rollout = DeviceGroup("rollout", 2, devices=(0, 1))
    apart = run.apart(rollout, DeviceGroup("main", devices=main), num_chunks=2)
    mortal = MortalSpec(run.workers["actor"], str(tmp_path), "generate", (1, 4), replica=1)
    executor = backend.executor(transport=transport)
    num_offers: list[int] = []
    found, steps = finish(run, apart, executor, max_lag=1, num_offers=num_offers, actor=mortal)

    assert found == expected
    assert [step.num_rows for step in steps] == [step.num_rows for step in plain]
    assert any(num_offers)
    assert max(num_offers) <= 2  # older snapshots are given up
    assert len(list(tmp_path.iterdir())) == 6  # of four steps, two again
    told = [r.getMessage() for r in caplog.records if r.name == "penstock.executor"]
    assert len(told) == 2
    assert all(text.startswith("rank 1 of group 'rollout' died: ") for text in told)


@dataclass(frozen=True)
class DozerSpec:
    """A counter that takes its time to fall asleep where it trains."""

    folder: str
    takes_s: float

    def build(self, context: WorkerContext) -> Dozer:
        takes_s = self.takes_s if "train" in context.methods else 0.0
        if not takes_s:
            (Path(self.folder) / "built").write_text(str(time.monotonic()))
        return Dozer(Path(self.folder) / "slept", takes_s)


class Dozer(counter.Counter):
    def __init__(self, file: Path, takes_s: float) -> None:
        super().__init__()
        self.file, self.takes_s, self.is_awake = file, takes_s, False

    def pid(self) -> int:
        return os.getpid()

    def wait(self) -> None:
        time.sleep(600)

    def wake(self) -> None:
        self.is_awake = True

    def sleep(self) -> None:
        if self.takes_s and self.is_awake:
            time.sleep(self.takes_s)
            self.file.write_text(str(time.monotonic()))


@pytest.fixture
def dozers(spawned: Backend, tmp_path: Path) -> Iterator[Supervisor]:
    """A group "main" that trains and one "rollout" that samples, on the same device."""
    placed = counter.apart(counter.COUNT, model__sample="rollout")
    groups = tuple(replace(group, devices=(0,)) for group in placed.groups)
    programs = {"main": Program(counter.COUNT, replace(placed, groups=groups))}
    executor = spawned.executor()
    executor.start(programs, {"model": DozerSpec(str(tmp_path), takes_s=5.0)}, 0, 60.0)
    yield executor
    executor.stop()


def ask(executor: Supervisor, group: str, method: str, rank: int = 0) -> None:
    executor.submit(0, "main", group, rank, work(Host.call_method, "model", method))


def heard(executor: Supervisor, count: int = 1) -> list[Completion | Restart]:
    found: list[Completion | Restart] = []
    end_s = time.monotonic() + 60
    while len(found) < count and time.monotonic() < end_s:
        found += [one for one in executor.wait(1.0) if not is_sign(one)]
    assert len(found) == count
    return found


def is_sign(one: Completion | Restart) -> bool:
    """Whether it says only that a rank is on its way."""
    return isinstance(one, Restart) and not one.is_over


def answer_of(executor: Supervisor, group: str, method: str, rank: int = 0) -> Any:
    ask(executor, group, method, rank)
    (answer,) = heard(executor)
    assert isinstance(answer, Completion)
    assert answer.report is not None
    return answer.report.answer


@pytest.fixture
def pair(spawned: Backend, tmp_path: Path) -> Iterator[Supervisor]:
    """A group "main" that trains and two replicas that sample."""
    placed = counter.apart(counter.COUNT, model__sample="rollout")
    groups = tuple(replace(g, num_ranks=2 if g.name == "rollout" else 1) for g in placed.groups)
    executor = spawned.executor()
    programs = {"main": Program(counter.COUNT, replace(placed, groups=groups))}
    executor.start(programs, {"model": DozerSpec(str(tmp_path), takes_s=0.0)}, 0, 60.0)
    yield executor
    executor.stop()


def kill_the_second(executor: Supervisor) -> list[int]:
    """Kill a replica, and have it noticed; the processes that there were."""
    before = [answer_of(executor, "rollout", "pid", rank) for rank in range(2)]
    os.kill(before[1], signal.SIGKILL)
    ask(executor, "rollout", "pid", 1)
    end_s = time.monotonic() + 60
    while not any(is_sign(one) for one in executor.wait(1.0)):
        assert time.monotonic() < end_s
    return before


def test_the_other_replicas_go_on(pair: Supervisor, spawned: Backend) -> None:
    """One is killed: it alone is another process afterwards, and the other works meanwhile."""
    before = kill_the_second(pair)
    assert pair.died() == ""
    assert answer_of(pair, "rollout", "pid", 0) == before[0]
    ask(pair, "rollout", "pid", 1)  # it is given more, which it does after what it owes
    restart, *answers = heard(pair, 3)
    assert isinstance(restart, Restart)
    assert (restart.group, restart.ranks) == ("rollout", (1,))
    pids = [one.report.answer for one in answers if isinstance(one, Completion) and one.report]
    assert len(pids) == 2
    assert pids[0] == pids[1] != before[1]
    assert len(spawned.pids()) == 3


@pytest.mark.nightly
def test_a_run_that_goes_back_meanwhile_starts_them_all(pair: Supervisor) -> None:
    """What the one that is on its way owes is forgotten, and its next death is one like any."""
    before = kill_the_second(pair)
    assert pair.revive(()) == {"rollout"}
    after = [answer_of(pair, "rollout", "pid", rank) for rank in range(2)]
    assert not {*after} & {*before}
    kill_the_second(pair)
    restart, _ = heard(pair, 2)
    assert isinstance(restart, Restart)
    assert answer_of(pair, "rollout", "pid", 0) == after[0]


def test_it_is_not_built_before_the_other_has_given_up_the_device(
    dozers: Supervisor, tmp_path: Path
) -> None:
    pid = answer_of(dozers, "rollout", "pid")
    answer_of(dozers, "main", "pid")
    ask(dozers, "rollout", "wait")  # It waits for "main" to fall asleep.
    os.kill(pid, signal.SIGKILL)
    (restart,) = heard(dozers)
    assert isinstance(restart, Restart)
    assert restart.group == "rollout"
    built, slept = (float((tmp_path / name).read_text()) for name in ("built", "slept"))
    assert built > slept


def test_who_has_died_has_given_up_its_device(dozers: Supervisor) -> None:
    pids = [answer_of(dozers, group, "pid") for group in ("main", "rollout")]
    ask(dozers, "rollout", "wait")
    ask(dozers, "main", "pid")  # It waits for "rollout" to have done its work.
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    failed, restart = sorted(heard(dozers, 2), key=lambda one: isinstance(one, Restart))
    assert isinstance(failed, Completion)
    assert str(failed.error).startswith("rank 0 of group 'main' died: ")
    assert isinstance(restart, Restart)
    assert 0 < restart.took_s < 60
