"""A run that pauses between steps: what may be done there, and that it changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.checkpoint import Interval, Pauses
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.executor import Program
from penstock.dataflow.runtime.placement import Placement, one_group
from penstock.launch.run_dir.checkpoint import CheckpointStore

from ..counter import COUNT, LOOK, SOURCES, apart, engine, seen

TOGETHER, APART = one_group(COUNT), apart(COUNT, model__sample="rollout")


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
