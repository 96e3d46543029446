"""Newer weights while a step is sampled: in one process, in several, and after one has died."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from penstock.algorithms.grpo import GRPO
from penstock.algorithms.roles import Sampling
from penstock.dataflow.errors import ConfigError, PlanError
from penstock.dataflow.graph.role import Role, Streamed
from penstock.dataflow.runtime import host
from penstock.dataflow.runtime.call_context import current_step
from penstock.dataflow.runtime.engine import Engine, StepResult
from penstock.dataflow.runtime.executor import Executor
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.placement import DeviceGroup, Placement, one_group
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.launch.run_dir.checkpoint import CheckpointStore

from ...algorithms import runs
from .backends import Backend
from .test_streaming import apart

pytestmark = pytest.mark.slow

NUM_STEPS = 4
NUM_PARTS = 4
SCHEDULE = Schedule(max_lag=1, streaming=NUM_PARTS, in_flight=True)


def grpo() -> runs.Run:
    """Responses that take a while."""
    sampling = Sampling(num_samples=2, max_new_tokens=40)
    return replace(runs.make("grpo"), cfg=GRPO(sampling=sampling))


@dataclass(frozen=True)
class WatchedSpec:
    """A worker that notes which versions sampled the tokens of each answer, and takes its time.

    It pauses after every token, not only now and then. After `fatal` answers its process dies.
    """

    spec: Any
    folder: str
    pause_s: float = 0.0
    fatal: int | None = None
    takes_weights: bool = True

    def build(self, context: WorkerContext) -> Role:
        worker = self.spec.build(context)
        worker.takes_weights = self.takes_weights
        if "train" in context.methods:
            return worker
        host.PAUSE_AFTER = 1
        stream, folder = worker.stream, Path(self.folder)

        def watched(method: str, calls: Any) -> Iterator[Streamed | None]:
            for found in stream(method, calls):
                if found is None:
                    time.sleep(self.pause_s)
                    yield None
                    continue
                count = len(list(folder.glob("answer-*")))
                if count == self.fatal:
                    (folder / f"answer-{count}-died").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                roll = found.returned
                rows = [
                    roll.version[row][mask].tolist() for row, mask in enumerate(roll.mask.bool())
                ]
                about = {"step": current_step(), "ids": roll.prompt_id.tolist(), "rows": rows}
                (folder / f"answer-{count}-{os.getpid()}").write_text(json.dumps(about))
                yield found

        worker.stream = watched
        return worker


def finish(
    run: runs.Run, placement: Placement, executor: Executor, **options: Any
) -> list[StepResult]:
    schedule, num_steps = options.pop("schedule", SCHEDULE), options.pop("num_steps", NUM_STEPS)
    workers = options.pop("workers", run.workers)
    engine = Engine(run.graph, placement, workers=workers, executor=executor, schedule=schedule)
    with engine:
        return list(engine.run(run.sources, num_steps, **options))


def check_answers(folder: Path, steps: list[StepResult], first_step: int = 0) -> int:
    """Every prompt once; versions within the bounds, and how many rows have several."""
    texts = [file.read_text() for file in folder.glob("answer-*")]
    answers = [json.loads(text) for text in texts if text]
    num_mixed = 0
    for step in range(first_step, NUM_STEPS):
        own = [answer for answer in answers if answer["step"] == step]
        ids = [prompt_id for answer in own for prompt_id in answer["ids"]]
        assert len(own) == NUM_PARTS
        assert len(ids) == 2 * len(set(ids)) == 2 * runs.PROMPTS_PER_STEP
        rows = [row for answer in own for row in answer["rows"]]
        for row in rows:
            assert row == sorted(row)
            assert max(0, step - 1) <= row[0] <= row[-1] <= step
            num_mixed += row[0] != row[-1]
        ages = [step - version for row in rows for version in row]
        metrics = steps[step - first_step].metrics
        assert metrics["actor.generate/token_lag"] == pytest.approx(sum(ages) / len(ages))
        assert metrics["actor.generate/token_lag_max"] == max(ages)
        assert steps[step - first_step].num_rows["actor.generate"] == len(rows)
    return num_mixed


def watched(run: runs.Run, folder: Path, **options: Any) -> dict[str, Any]:
    return {**run.workers, "actor": WatchedSpec(run.workers["actor"], str(folder), **options)}


@pytest.fixture(autouse=True)
def _pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker in this process changes is put back."""
    monkeypatch.setattr(host, "PAUSE_AFTER", host.PAUSE_AFTER)


def test_two_groups_in_one_process(tmp_path: Path) -> None:
    """Each does a piece of its work in turn, so weights come in the middle of responses."""
    run = grpo()
    steps = finish(run, apart(run), InProcess(), workers=watched(run, tmp_path))
    assert check_answers(tmp_path, steps) > 0


def test_groups_of_processes(tmp_path: Path, spawned: Backend) -> None:
    run = grpo()
    workers = watched(run, tmp_path, pause_s=0.02)
    steps = finish(run, apart(run, 2), spawned.executor(), workers=workers)
    assert check_answers(tmp_path, steps) > 0


def test_a_process_that_dies_gives_only_the_answers_that_are_left(
    tmp_path: Path, spawned: Backend
) -> None:
    """Under newer weights it would give others, and in another order."""
    run = grpo()
    fatal = NUM_PARTS + 2  # in the second step, with two answers given
    workers = watched(run, tmp_path, pause_s=0.01, fatal=fatal)
    steps = finish(run, apart(run), spawned.executor(), workers=workers)
    assert (tmp_path / f"answer-{fatal}-died").exists()
    check_answers(tmp_path, steps)


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """The steps that were begun before it are part of it; it is not repeated to the bit."""
    run = grpo()
    store, answers = CheckpointStore(tmp_path / "kept"), tmp_path / "answers"
    answers.mkdir()
    options: dict[str, Any] = {"checkpoint_every": 1, "checkpoints": store}
    options["workers"] = watched(run, answers)
    before = finish(run, apart(run), InProcess(), num_steps=2, **options)
    after = finish(run, apart(run), InProcess(), **options)
    assert [step.step for step in (*before, *after)] == list(range(NUM_STEPS))
    check_answers(answers, [*before, *after])


def test_segments_take_newer_weights_too(tmp_path: Path) -> None:
    run = grpo()
    schedule = Schedule(max_lag=1, segment_tokens=9, in_flight=True)
    steps = finish(run, apart(run), InProcess(), schedule=schedule)
    left = steps[-1].metrics["actor.generate/unfinished_rows"]
    ended = sum(step.num_rows.get("actor.generate", 0) for step in steps)
    assert ended + left == 2 * runs.PROMPTS_PER_STEP * NUM_STEPS


def test_a_worker_that_cannot_is_refused(tmp_path: Path) -> None:
    run = grpo()
    workers = watched(run, tmp_path, takes_weights=False)
    with pytest.raises(Exception, match="which PolicyWorker cannot") as caught:
        finish(run, apart(run), InProcess(), workers=workers)
    cause: Any = caught.value.__cause__
    assert isinstance(cause, ConfigError)
    assert "set schedule.in_flight=false" in str(cause)


def test_a_placement_where_no_weights_can_come_is_refused() -> None:
    run = grpo()
    with pytest.raises(PlanError, match="give it a group of its own"):
        finish(run, one_group(run.graph), InProcess())
    groups = (DeviceGroup("main", 1, devices=(0,)), DeviceGroup("rollout", 1, devices=(0,)))
    placement = apart(run)
    shared = Placement(groups, placement.nodes, num_chunks=1)
    with pytest.raises(PlanError, match="give it devices of its own"):
        finish(run, shared, InProcess())
