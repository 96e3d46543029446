"""Runs whose trainers die go back, compute the same again, and hand every step out once."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.errors import WorkerError
from penstock.dataflow.runtime.engine import Engine, StepResult
from penstock.dataflow.runtime.executor import Executor, Recovered, Recovery, Restart
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.ledger import Ledger, check
from penstock.dataflow.runtime.placement import Placement, one_group
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.launch.run_dir.checkpoint import CheckpointStore

from ...algorithms import runs
from .backends import Backend
from .mortal import MortalSpec

pytestmark = pytest.mark.slow

NUM_STEPS = 6
EVERY = 2


@dataclass
class Finished:
    """How a run has ended."""

    weights: dict[str, str]
    steps: list[StepResult]
    told: list[Recovered]


def finish(
    run: runs.Run,
    placement: Placement,
    executor: Executor,
    max_lag: int = 0,
    folder: Path | None = None,
    every: int = EVERY,
    mirror: Path | None = None,
    recovery: Recovery | None = None,
    streaming: int = 0,
    segment_tokens: int = 0,
    **workers: Any,
) -> Finished:
    told: list[Recovered | Restart] = []
    engine = Engine(
        run.graph,
        placement,
        workers={**run.workers, **workers},
        executor=executor,
        schedule=Schedule(max_lag=max_lag, streaming=streaming, segment_tokens=segment_tokens),
        recovery=recovery or Recovery(pause_s=0.0),
        recovered=told.append,
    )
    ledger = Ledger(run.graph, lambda _: None)
    with engine:
        steps = list(
            engine.run(
                run.sources,
                NUM_STEPS,
                checkpoint_every=every,
                checkpoints=CheckpointStore(folder) if folder else None,
                mirror=CheckpointStore(mirror, keep=1) if mirror else None,
                ledger=ledger,
            )
        )
        weights = {role: engine.call(role, "weights_sha256") for role in run.trained}
    check([*ledger.lines.values()], NUM_STEPS)
    assert not any(line.unseen for line in ledger.lines.values())
    return Finished(weights, steps, [one for one in told if isinstance(one, Recovered)])


def apart(run: runs.Run, ranks: int = 1) -> Placement:
    """Rollouts on two ranks of their own, all else on `ranks` of another group."""
    return run.apart(2, ranks, num_chunks=2)


def undisturbed(run: runs.Run, **options: Any) -> Finished:
    return finish(run, replace(one_group(run.graph), num_chunks=2), InProcess(), **options)


_DEATHS = [(0, (0,)), (1, (3, 6)), (0, (5,)), (1, (0,))]
"""How far generation runs ahead, and which train calls are fatal."""


def _some(backend: str, often: int) -> list[Any]:
    """One of them in `make test`, the others in `make test-all`."""
    return [
        pytest.param(backend, *case, marks=[] if number == often else pytest.mark.nightly)
        for number, case in enumerate(_DEATHS)
    ]


@pytest.mark.parametrize(
    ("backend", "max_lag", "fatal"),
    [*_some("spawned", 1), *reversed(_some("on_ray", 0))],
    indirect=["backend"],
)
def test_a_trainer_that_dies_changes_nothing(
    tmp_path: Path, backend: Backend, max_lag: int, fatal: tuple[int, ...]
) -> None:
    run = runs.make("grpo")
    plain = undisturbed(run, max_lag=max_lag)
    # Rollouts of the next step, where there are any, end while the trainer is started again.
    mortal = MortalSpec(run.workers["actor"], str(tmp_path), "train", fatal, rollout_s=0.5)
    found = finish(
        run, apart(run), backend.executor(), max_lag, tmp_path / "checkpoints", actor=mortal
    )
    assert found.weights == plain.weights
    assert [step.step for step in found.steps] == list(range(NUM_STEPS))
    for again, once in zip(found.steps, plain.steps, strict=True):
        # Of the step that a checkpoint had begun, what was made before it is not counted.
        assert {**once.num_rows, **again.num_rows} == once.num_rows
        assert max_lag or again.num_rows == once.num_rows
    assert [told.number for told in found.told] == list(range(1, len(fatal) + 1))
    assert all("rank 0 of group 'main' died" in told.said for told in found.told)
    # A checkpoint that was being written when the trainer died is none.
    assert all(told.completed - told.step < 2 * EVERY for told in found.told)


@pytest.mark.parametrize("max_lag", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_with_a_mirror_one_step_at_most_is_done_again(
    tmp_path: Path, spawned: Backend, max_lag: int
) -> None:
    run = runs.make("ppo")
    plain = undisturbed(run, max_lag=max_lag)
    mortal = MortalSpec(run.workers["critic"], str(tmp_path), "train", (3, 5))
    found = finish(
        run,
        apart(run),
        spawned.executor(),
        max_lag,
        tmp_path / "checkpoints",
        NUM_STEPS,
        tmp_path / "mirror",
        critic=mortal,
    )
    assert found.weights == plain.weights
    assert [step.step for step in found.steps] == list(range(NUM_STEPS))
    assert [told.source for told in found.told] == ["mirror", "mirror"]
    # What was being written when the trainer died is not there.
    assert all(told.completed - told.step <= 1 for told in found.told)
    assert sum(step.mirrored_bytes for step in found.steps) > 0


def test_a_fault_that_comes_again_each_time_ends_the_run(tmp_path: Path, spawned: Backend) -> None:
    run = runs.make("grpo")
    mortal = MortalSpec(run.workers["actor"], str(tmp_path), "train", tuple(range(2, 99)))
    with pytest.raises(WorkerError) as raised:
        finish(
            run,
            apart(run),
            spawned.executor(),
            folder=tmp_path / "checkpoints",
            recovery=Recovery(max_repeats=2, pause_s=0.0),
            actor=mortal,
        )
    said = str(raised.value)
    # A death before the checkpoint is complete goes back to the start.
    died = r"actor\.train step [0-2] failed on main\[0\]\n    WorkerError: rank 0 of group 'main' d"
    assert re.search(died, said)
    assert "starting again does not fix it (recovery.max_repeats)" in said
    assert len(list(tmp_path.glob("train-*"))) == 5  # two steps, then three deaths
