"""Resuming with small real roles: runs that go on, and checkpoints that are refused."""

from __future__ import annotations

import errno
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError, WorkerError
from penstock.dataflow.files import WrittenFile, write_hashed
from penstock.dataflow.graph.role import WriteState
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime import checkpoint as checkpoint_module
from penstock.dataflow.runtime.checkpoint import Interval, Pauses, SavedRun, write_run_state
from penstock.dataflow.runtime.engine import Engine, StepResult
from penstock.dataflow.runtime.executor import Program
from penstock.dataflow.runtime.placement import Placement, one_group
from penstock.launch.run_dir.checkpoint import CheckpointStore, CheckpointWarning, checkpoints_in

from ..counter import (
    COUNT,
    LOOK,
    SOURCES,
    AnyLoss,
    Batch,
    Counter,
    Keys,
    Model,
    apart,
    engine,
    seen,
)


def run(one: Engine, folder: Path, num_steps: int) -> list[float]:
    """Take the steps that are left to do; returns which weights made each one's samples."""
    with one:
        store = CheckpointStore(folder)
        return seen(list(one.run(SOURCES, num_steps, checkpoint_every=2, checkpoints=store)))


def checkpoint(folder: Path, *, steps_taken: int = 3, max_lag: int = 0) -> Path:
    """Stop a run of 8 steps early; returns its newest checkpoint."""
    store = CheckpointStore(folder)
    with engine(max_lag=max_lag) as one:
        steps = one.run(SOURCES, 8, checkpoint_every=2, checkpoints=store)
        for _ in range(steps_taken):
            next(steps)
    latest = store.latest()
    assert latest is not None
    return latest


TOGETHER, APART = one_group(COUNT), apart(COUNT, model__sample="rollout")


@pytest.mark.parametrize("placement", [TOGETHER, APART], ids=["together", "apart"])
@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_a_resumed_run_samples_with_what_it_would_have_had(
    tmp_path: Path, placement: Placement, max_lag: int
) -> None:
    checkpoint(tmp_path, max_lag=max_lag)
    rest = run(engine(placement=placement, max_lag=max_lag), tmp_path, 8)
    assert rest == [float(max(0, step - max_lag)) for step in range(2, 8)]


def test_a_run_on_a_used_engine_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    one = engine(placement=APART)
    with one:
        assert seen(list(one.run(SOURCES, 5))) == [0, 1, 2, 3, 4]
        assert run(one, tmp_path, 4) == [2, 3]


@pytest.mark.parametrize("max_lag", [0, 2])
def test_a_resumed_run_reports_what_was_done_of_a_step_before_the_checkpoint(
    tmp_path: Path, max_lag: int
) -> None:
    with engine(max_lag=max_lag) as one:
        whole = list(one.run(SOURCES, 8))[2:]
    checkpoint(tmp_path, max_lag=max_lag)
    with engine(max_lag=max_lag) as one:
        store = CheckpointStore(tmp_path)
        rest = list(one.run(SOURCES, 8, checkpoint_every=2, checkpoints=store))
    assert [(s.metrics, s.num_rows, s.lag) for s in rest] == [
        (s.metrics, s.num_rows, s.lag) for s in whole
    ]


# --- refusals


def other_step(keys: Keys, model: Model) -> object:
    return model.train(AnyLoss(), Batch(score=model.sample(keys.key))), model.sample(keys.key)


@pytest.mark.parametrize(
    ("change", "num_steps", "said"),
    [
        ({"graph": build(other_step)}, 8,
         " was written by graph 'count_step', which differs from this run's 'other_step'; resume "
         "with the configuration that wrote it, or start a new run"),
        ({"seed": 1}, 8,
         " was written with seed 0, this run has seed 1; use the same seed to resume"),
        ({}, 1, ": cannot resume at step 2 of a run of 1 steps"),
        ({"max_lag": 1}, 8,
         ": cannot resume at step 2: 'model.sample step 2 chunk 0' reads weights older than the "
         "checkpoint's and is not part of it. The checkpoint is the end of a shorter run or was "
         "made with a smaller Schedule.max_lag; resume with max_lag=0, or from a checkpoint at "
         "least max_lag steps before that run's end"),
    ],
    ids=["another graph", "another seed", "past the end", "without older samples"],
)  # fmt: skip
def test_a_checkpoint_of_another_run_is_refused(
    tmp_path: Path, change: dict[str, Any], num_steps: int, said: str
) -> None:
    folder = checkpoint(tmp_path)
    with pytest.raises(ConfigError) as raised:
        run(engine(**change), tmp_path, num_steps)
    assert str(raised.value) == f"{folder}{said}"


def test_a_checkpoint_every_no_steps_is_refused(tmp_path: Path) -> None:
    with engine() as one, pytest.raises(ConfigError) as raised:
        list(one.run(SOURCES, 2, checkpoint_every=0, checkpoints=CheckpointStore(tmp_path)))
    assert str(raised.value) == "checkpoint_every must be at least 1 step, got 0"


LIMIT_S = 60.0


class Later(Counter):
    """Its state is written by another thread, which first asks `before` with the step's weight."""

    def __init__(self, before: Callable[[float, Callable[[], bool]], object]) -> None:
        super().__init__()
        self.before = before

    def take_state(self) -> WriteState:
        weight = self.weight.item()

        def write(folder: Path, is_unwanted: Callable[[], bool]) -> Mapping[str, WrittenFile]:
            self.before(weight, is_unwanted)
            name = "weight.txt"
            return {name: write_hashed(folder / name, [str(weight).encode()])}

        return write


def taken(
    worker: Counter, store: CheckpointStore, num_steps: int, every: int = 1, **more: Any
) -> list[StepResult]:
    """The steps of a whole run, whose engine is closed."""
    with engine(worker=worker) as one:
        return list(one.run(SOURCES, num_steps, checkpoint_every=every, checkpoints=store, **more))


def full(path: str) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def full_at(*steps: float) -> Later:
    """Its disk is full when it writes the checkpoints of these steps."""

    def before(weight: float, is_unwanted: object) -> None:
        if weight in steps:
            raise full("runs/w")

    return Later(before)


def weight_of(folder: Path) -> float:
    return float((folder / "model" / "weight.txt").read_text())


def test_a_run_goes_on_while_its_checkpoint_is_written(tmp_path: Path) -> None:
    gate = threading.Event()
    store = CheckpointStore(tmp_path, keep=9)
    worker = Later(lambda weight, _: gate.wait(LIMIT_S))
    with engine(worker=worker) as one:
        steps = one.run(SOURCES, 6, checkpoint_every=3, checkpoints=store)
        taken = [next(steps) for _ in range(5)]
        assert (tmp_path / "step-00000003.writing").is_dir(), "five steps, and it is not there"
        assert not checkpoints_in(tmp_path)
        gate.set()
        taken += list(steps)
    assert seen(taken) == [0, 1, 2, 3, 4, 5]
    assert {step: weight_of(path) for step, path in checkpoints_in(tmp_path).items()} == {
        3: 3.0,
        6: 6.0,
    }
    assert store.latest() == tmp_path / "step-00000006", "hashed as it was written, and verified"


def test_an_engine_that_is_closed_has_written_its_checkpoint(tmp_path: Path) -> None:
    gate = threading.Event()
    with engine(worker=Later(lambda weight, _: gate.wait(LIMIT_S))) as one:
        steps = one.run(SOURCES, 6, checkpoint_every=1, checkpoints=CheckpointStore(tmp_path))
        next(steps)
        next(steps)  # the first is taken before it
        threading.Timer(0.1, gate.set).start()
    assert list(checkpoints_in(tmp_path)) == [1]


def test_a_full_disk_costs_one_warning_and_the_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=9)
    with pytest.warns(CheckpointWarning) as caught:
        assert len(taken(full_at(2, 3), store, 5)) == 5
    assert [str(one.message) for one in caught] == [
        "the checkpoint of step 2 was not written, and that of step 1 counts. The run goes on, "
        "tries again at the next one, and says no more of it until it is written: 'runs/w': No "
        "space left on device\n    free some space, or choose another folder"
    ]
    assert list(checkpoints_in(tmp_path)) == [1, 4, 5]
    assert len(list(tmp_path.iterdir())) == 3
    assert store.num_missed == 2


def test_a_folder_that_cannot_be_made_costs_no_more(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    real = store.begin

    def begin(step: int) -> Path:
        if step == 1:
            raise full("runs/x")
        return real(step)

    store.begin = begin
    with pytest.warns(CheckpointWarning, match="there is no older one"):
        assert len(taken(Counter(), store, 2)) == 2
    assert list(checkpoints_in(tmp_path)) == [2]


def test_a_state_that_is_written_at_once_costs_no_more_either(tmp_path: Path) -> None:
    class Once(Counter):
        def save_state(self, folder: Path) -> None:
            if self.weight == 1:
                raise full("runs/y")
            super().save_state(folder)

    with pytest.warns(CheckpointWarning, match="runs/y"):
        taken(Once(), CheckpointStore(tmp_path), 2)
    assert list(checkpoints_in(tmp_path)) == [2]


def test_the_last_checkpoint_is_tried_twice(tmp_path: Path) -> None:
    tries: list[float] = []

    def before(weight: float, is_unwanted: object) -> None:
        tries.append(weight)
        if tries == [1, 2]:
            raise full("runs/w")

    with pytest.warns(CheckpointWarning, match="of step 2 was not"):
        taken(Later(before), CheckpointStore(tmp_path), 2)
    assert tries == [1, 2, 2]
    assert list(checkpoints_in(tmp_path)) == [1, 2]


def test_a_run_whose_last_checkpoint_is_not_there_has_failed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.warns(CheckpointWarning), pytest.raises(WorkerError) as raised:
        taken(full_at(2), store, 2)
    assert str(raised.value) == (
        "the last checkpoint, of step 2, was not written, and that of step 1 counts: 'runs/w': No "
        "space left on device\n    free some space, or choose another folder"
    )
    assert store.latest() == tmp_path / "step-00000001"


@pytest.mark.slow
def test_a_slow_disk_costs_checkpoints_and_one_warning(tmp_path: Path) -> None:
    gate = threading.Event()
    store = CheckpointStore(tmp_path, keep=9)

    def take(one: Engine) -> None:
        for result in one.run(SOURCES, 6, checkpoint_every=1, checkpoints=store):
            if result.step == 4:  # those of steps 2 to 4 are left out
                gate.set()
                (pending,) = tmp_path.iterdir()
                assert pending.name == "step-00000001.writing"

    slow = Later(lambda weight, _: gate.wait(LIMIT_S))
    with engine(worker=slow, deadline_s=2.0) as one, pytest.warns(CheckpointWarning) as caught:
        take(one)
    assert [str(one.message) for one in caught] == [
        "the checkpoint of step 2 was not written, and there is no older one. The run goes on, "
        "tries again at the next one, and says no more of it until it is written: that of step 1 "
        "is being written for more than 2 s; the disk is too slow"
    ]
    found = checkpoints_in(tmp_path)
    assert {1, 6} <= found.keys()
    assert not {2, 3, 4} & found.keys()
    assert all(weight_of(path) == step for step, path in found.items())


def test_what_is_no_matter_of_the_disk_ends_the_run(tmp_path: Path) -> None:
    def before(weight: float, is_unwanted: object) -> None:
        raise ValueError("no such number")

    with pytest.raises(WorkerError, match="ValueError: no such number"):
        taken(Later(before), CheckpointStore(tmp_path), 2)
    assert not checkpoints_in(tmp_path)


def test_an_interrupted_run_waits_for_nothing(tmp_path: Path) -> None:
    ended: list[bool] = []

    def before(weight: float, is_unwanted: Callable[[], bool]) -> None:
        while not is_unwanted():
            threading.Event().wait(0.01)
        ended.append(True)

    def take(one: Engine) -> None:
        for _ in one.run(SOURCES, 6, checkpoint_every=2, checkpoints=CheckpointStore(tmp_path)):
            if one.call("model", "count") == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), engine(worker=Later(before)) as one:
        take(one)
    assert ended == [True]
    assert not checkpoints_in(tmp_path)


def test_what_was_given_up_is_written_whole_when_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt fails after the ranks have begun, and they are told to give it up."""
    refused: list[Path] = []

    def write(folder: Path, saved: SavedRun) -> None:
        if folder.name.startswith("step-00000002") and not refused:
            refused.append(folder)
            raise full("runs/run.json")
        write_run_state(folder, saved)

    class Partly(Counter):
        def take_state(self) -> WriteState:
            weight = self.weight.item()

            def write(folder: Path, is_unwanted: Callable[[], bool]) -> Mapping[str, WrittenFile]:
                while refused == [folder.parent] and len(tries) == 1 and not is_unwanted():
                    threading.Event().wait(0.01)
                tries.append(folder)
                if is_unwanted():
                    return {}
                name = "weight.txt"
                return {name: write_hashed(folder / name, [str(weight).encode()])}

            return write

    tries: list[Path] = []
    monkeypatch.setattr(checkpoint_module, "write_run_state", write)
    store = CheckpointStore(tmp_path)
    with pytest.warns(CheckpointWarning, match="of step 2 was not"):
        taken(Partly(), store, 2)
    assert len(refused) == 1
    assert weight_of(tmp_path / "step-00000002") == 2.0
    assert store.num_missed == 0, "it is there after all"


def test_a_checkpoint_is_there_before_a_pause(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=9)

    def between(interval: Interval) -> bool:
        assert interval.saved
        assert list(checkpoints_in(tmp_path)) == [2]
        return True

    slow = Later(lambda weight, _: threading.Event().wait(0.3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        taken(slow, store, 6, every=2, pauses=Pauses(frozenset({2}), between))


def test_a_checkpoint_that_was_refused_is_not_taken_for_saved_in_a_pause(tmp_path: Path) -> None:
    said: list[bool] = []

    def between(interval: Interval) -> bool:
        said.append(interval.saved)
        interval.save()
        return True

    def before(weight: float, is_unwanted: object) -> None:
        if not said:
            raise full("runs/w")

    pauses, store = Pauses(frozenset({2}), between), CheckpointStore(tmp_path)
    with pytest.warns(CheckpointWarning, match="of step 2 was not"):
        taken(Later(before), store, 6, every=2, pauses=pauses)
    assert said == [False]
    assert list(checkpoints_in(tmp_path)) == [2], "the run has ended, so it is there"


# --- pauses between steps: what may be done there, and that it changes nothing


def looking(placement: Placement, max_lag: int = 0) -> Engine:
    looks = one_group(LOOK) if placement is TOGETHER else apart(LOOK, model__sample="rollout")
    return engine(placement, max_lag=max_lag, also={"look": Program(LOOK, looks)})


class Looks:
    """Between two steps runs another program; notes what its samples were made with."""

    def __init__(self, one: Engine, *, last: int = 1000) -> None:
        self.engine, self.last = one, last
        self.found: dict[int, float] = {}
        self.saved: list[int] = []

    def __call__(self, interval: Interval) -> bool:
        (looked,) = self.engine.run(SOURCES, 1, program="look")
        self.found[interval.step] = looked.metrics["model.sample/mean"]
        if interval.saved:
            self.saved.append(interval.step)
        return interval.step == self.last


@pytest.mark.parametrize("placement", [TOGETHER, APART], ids=["together", "apart"])
@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_another_program_between_steps_sees_their_weights_and_changes_nothing(
    tmp_path: Path, placement: Placement, max_lag: int
) -> None:
    with looking(placement, max_lag) as one:
        looks = Looks(one)
        pauses = Pauses(frozenset({1, 2, 5, 6}), looks)
        store = CheckpointStore(tmp_path / "checkpoints")
        steps = one.run(SOURCES, 8, checkpoint_every=4, checkpoints=store, pauses=pauses)
        assert seen(list(steps)) == [float(max(0, step - max_lag)) for step in range(8)]
        assert one.call("model", "count") == 8
    assert looks.found == {1: 1, 2: 2, 5: 5, 6: 6}
    assert looks.saved == []


@pytest.mark.parametrize("max_lag", [0, 2])
def test_a_run_resumed_at_a_pause_pauses_first(tmp_path: Path, max_lag: int) -> None:
    store = CheckpointStore(tmp_path)
    with looking(APART, max_lag) as one:
        looks = Looks(one, last=4)
        pauses = Pauses(frozenset({4}), looks)
        assert len(list(one.run(SOURCES, 8, checkpoint_every=2, checkpoints=store, pauses=pauses)))
    assert (looks.found, looks.saved) == ({4: 4}, [4])
    with looking(APART, max_lag) as one:
        looks = Looks(one)
        pauses = Pauses(frozenset({2, 4}), looks)
        steps = one.run(SOURCES, 8, checkpoint_every=2, checkpoints=store, pauses=pauses)
        assert seen(list(steps)) == [float(max(0, step - max_lag)) for step in range(4, 8)]
    assert (looks.found, looks.saved) == ({4: 4}, [4])


@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_a_checkpoint_written_at_a_pause_is_one_to_resume_from(
    tmp_path: Path, max_lag: int
) -> None:
    store = CheckpointStore(tmp_path)

    def save(interval: Interval) -> bool:
        assert not interval.saved
        interval.save()
        return True

    with looking(APART, max_lag) as one:
        pauses = Pauses(frozenset({3}), save)
        steps = one.run(SOURCES, 8, checkpoint_every=100, checkpoints=store, pauses=pauses)
        assert len(list(steps)) == 3, "it ends where it is told to"
        assert one.call("model", "count") == 3
    with looking(TOGETHER, max_lag) as one:
        steps = one.run(SOURCES, 8, checkpoint_every=100, checkpoints=store)
        assert seen(list(steps)) == [float(max(0, step - max_lag)) for step in range(3, 8)]


def test_a_run_asked_to_stop_at_a_pause_ends_after_what_begins_next(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with looking(APART, 1) as one:
        looks = Looks(one)
        steps = one.run(
            SOURCES,
            8,
            checkpoint_every=100,
            checkpoints=store,
            stop=lambda: bool(looks.found),
            pauses=Pauses(frozenset({3, 5}), looks),
        )
        assert len(list(steps)) == 4
    assert looks.found == {3: 3}
    latest = store.latest()
    assert latest is not None
    assert latest.name == "step-00000004"


@pytest.mark.parametrize("step", [0, 8, -1])
def test_a_pause_lies_between_two_steps(step: int) -> None:
    with looking(TOGETHER) as one, pytest.raises(ConfigError) as raised:
        list(one.run(SOURCES, 8, pauses=Pauses(frozenset({step}), lambda _: True)))
    assert str(raised.value) == f"cannot pause after {step} of 8 steps"
