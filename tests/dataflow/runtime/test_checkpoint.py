"""Resuming with small real roles: runs that go on, and checkpoints that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.graph.graph import Graph
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.placement import Placement, one_group
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.launch.run_dir.checkpoint import CheckpointStore

from ..counter import COUNT, SOURCES, AnyLoss, Batch, CounterSpec, Keys, Model, apart, seen


def engine(
    graph: Graph = COUNT, *, placement: Placement | None = None, max_lag: int = 0, seed: int = 0
) -> Engine:
    return Engine(
        graph,
        placement or one_group(graph),
        workers={"model": CounterSpec()},
        schedule=Schedule(max_lag=max_lag, deadline_s=30),
        seed=seed,
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


PLACEMENTS = [one_group(COUNT), apart(COUNT, model__sample="rollout")]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=["together", "apart"])
@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_a_resumed_run_samples_with_what_it_would_have_had(
    tmp_path: Path, placement: Placement, max_lag: int
) -> None:
    checkpoint(tmp_path, max_lag=max_lag)
    rest = run(engine(placement=placement, max_lag=max_lag), tmp_path, 8)
    assert rest == [float(max(0, step - max_lag)) for step in range(2, 8)]


def test_a_run_on_a_used_engine_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    one = engine(placement=apart(COUNT, model__sample="rollout"))
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


def test_a_checkpoint_of_another_graph_is_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    with pytest.raises(ConfigError) as raised:
        run(engine(build(other_step)), tmp_path, 8)
    assert str(raised.value) == (
        f"{folder} was written by graph 'count_step', which differs from this run's 'other_step'; "
        "resume with the configuration that wrote it, or start a new run"
    )


def test_a_checkpoint_of_another_seed_is_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    with pytest.raises(ConfigError) as raised:
        run(engine(seed=1), tmp_path, 8)
    assert str(raised.value) == (
        f"{folder} was written with seed 0, this run has seed 1; use the same seed to resume"
    )


def test_a_checkpoint_past_the_end_of_the_run_is_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    with pytest.raises(ConfigError) as raised:
        run(engine(), tmp_path, 1)
    assert str(raised.value) == f"{folder}: cannot resume at step 2 of a run of 1 steps"


def test_a_checkpoint_without_the_older_weights_samples_is_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    with pytest.raises(ConfigError) as raised:
        run(engine(max_lag=1), tmp_path, 8)
    assert str(raised.value).startswith(
        f"{folder}: cannot resume at step 2: 'model.sample step 2 chunk 0' reads weights older "
        "than the checkpoint's and is not part of it."
    )


def test_a_checkpoint_every_no_steps_is_refused(tmp_path: Path) -> None:
    with engine() as one, pytest.raises(ConfigError) as raised:
        list(one.run(SOURCES, 2, checkpoint_every=0, checkpoints=CheckpointStore(tmp_path)))
    assert str(raised.value) == "checkpoint_every must be at least 1 step, got 0"
