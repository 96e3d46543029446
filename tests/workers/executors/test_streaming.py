"""Streaming inside a step: the same weights whatever the timing, the executor and who dies."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.graph.role import Role, Streamed
from penstock.dataflow.runtime.engine import Engine, StepResult
from penstock.dataflow.runtime.executor import Executor
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.placement import Placement, one_group
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.launch.run_dir.checkpoint import CheckpointStore

from ...algorithms import runs
from .backends import Backend

pytestmark = pytest.mark.slow

NUM_STEPS = 3


@dataclass(frozen=True)
class SlowSpec:
    """The worker takes its time with each answer, and may kill its process after one.

    With the last of the first step it waits until training has begun.
    """

    spec: Any
    folder: str
    seed: int
    fatal: int | None = None
    waits: bool = False

    def build(self, context: WorkerContext) -> Role:
        worker = self.spec.build(context)
        wait, mark = random.Random(f"{self.seed} {context.replica}"), Path(self.folder)

        def slow(answers: Callable[..., Iterator[Streamed]], *given: Any) -> Iterator[Streamed]:
            for answer in answers(*given):
                time.sleep(wait.choice([0.0, 0.02, 0.1]))
                count = len(list(mark.glob("answer-*")))
                (mark / f"answer-{count}").touch()
                if self.waits and count + 1 == runs.PROMPTS_PER_STEP:
                    _await(mark / "trained")
                if count == self.fatal and "train" not in context.methods:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield answer

        if "train" in context.methods:
            worker.train = partial(_noted, worker.train, mark / "trained")
        worker.stream = partial(slow, worker.stream)
        worker.stream_segment = partial(slow, worker.stream_segment)
        return worker


def _noted(train: Callable[..., Any], file: Path, *given: Any, **named: Any) -> Any:
    file.touch()
    return train(*given, **named)


def _await(file: Path) -> None:
    end_s = time.monotonic() + 100
    while not file.exists() and time.monotonic() < end_s:
        time.sleep(0.01)


def finish(
    run: runs.Run,
    placement: Placement,
    executor: Executor,
    streaming: int = runs.PROMPTS_PER_STEP,
    **options: Any,
) -> tuple[dict[str, str], list[StepResult]]:
    workers, max_lag = options.pop("workers", run.workers), options.pop("max_lag", 0)
    num_steps = options.pop("num_steps", NUM_STEPS)
    schedule = Schedule(max_lag=max_lag, streaming=streaming)
    engine = Engine(run.graph, placement, workers=workers, executor=executor, schedule=schedule)
    with engine:
        steps = list(engine.run(run.sources, num_steps, **options))
        return {role: engine.call(role, "weights_sha256") for role in run.trained}, steps


def apart(run: runs.Run, num_ranks: int = 1, trainers: int = 1) -> Placement:
    return run.apart(num_ranks, trainers, num_chunks=max(num_ranks, trainers))


@pytest.fixture(scope="module")
def here() -> dict[int, dict[str, str]]:
    """Hashes of the run in one process, by lag."""
    run = runs.make("grpo")
    return {k: finish(run, one_group(run.graph), InProcess(), max_lag=k)[0] for k in (0, 1)}


@pytest.mark.parametrize("max_lag", [0, 1])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_it_ends_with_the_same_weights_whatever_the_timing(
    tmp_path: Path, spawned: Backend, here: dict[int, dict[str, str]], num_ranks: int, max_lag: int
) -> None:
    run = runs.make("grpo")
    waits = max_lag == 0 and num_ranks == 1
    slow = SlowSpec(run.workers["actor"], str(tmp_path), seed=num_ranks, waits=waits)
    workers = {**run.workers, "actor": slow}
    found, steps = finish(
        run, apart(run, num_ranks), spawned.executor(), max_lag=max_lag, workers=workers
    )
    assert found == here[max_lag]
    parts = [span for span in steps[0].spans if span.node == "actor.train"]
    assert [span.chunk for span in parts] == list(range(runs.PROMPTS_PER_STEP))
    if waits:  # training began before the last response was there
        sampled = max(span.end_s for span in steps[0].spans if span.node == "actor.generate")
        assert parts[0].start_s < sampled


@pytest.mark.nightly
def test_on_ray_too(on_ray: Backend, here: dict[int, dict[str, str]]) -> None:
    run = runs.make("grpo")
    assert finish(run, apart(run), on_ray.executor(), max_lag=1)[0] == here[1]


def test_a_process_that_dies_gives_the_answers_that_are_left(
    tmp_path: Path, spawned: Backend, here: dict[int, dict[str, str]]
) -> None:
    run = runs.make("grpo")
    fatal = runs.PROMPTS_PER_STEP + 1  # in the second step, with one answer given
    slow = SlowSpec(run.workers["actor"], str(tmp_path), seed=0, fatal=fatal)
    workers = {**run.workers, "actor": slow}
    found, _ = finish(run, apart(run), spawned.executor(), max_lag=1, workers=workers)
    assert found == here[1]
    assert len(list(tmp_path.glob("answer-*"))) > NUM_STEPS * runs.PROMPTS_PER_STEP


def test_a_run_that_is_resumed_keeps_the_order(
    tmp_path: Path, here: dict[int, dict[str, str]]
) -> None:
    run = runs.make("grpo")
    options: dict[str, Any] = {"max_lag": 1, "checkpoint_every": 1}
    placement = one_group(run.graph)
    options["checkpoints"] = CheckpointStore(tmp_path)
    finish(run, placement, InProcess(), num_steps=NUM_STEPS, stop=_after(5), **options)
    assert finish(run, placement, InProcess(), **options)[0] == here[1]


def _after(count: int) -> Any:
    """True from the so-and-so-manieth time on that it is asked."""
    asked = iter(range(count, -1, -1))
    return lambda: next(asked, 0) == 0


def test_the_gradient_is_that_of_the_whole_batch() -> None:
    run = runs.make("grpo")
    placement = one_group(run.graph)
    _, whole = finish(run, placement, InProcess(), streaming=0)
    _, parts = finish(run, placement, InProcess())
    for name in ("loss", "grad_norm", "policy_loss"):
        expected = whole[0].metrics[f"actor.train/{name}"]
        assert parts[0].metrics[f"actor.train/{name}"] == pytest.approx(expected, abs=2e-6)


def test_two_trainers_take_one_group_each(spawned: Backend) -> None:
    run = runs.make("grpo")
    _, alone = finish(run, one_group(run.graph), InProcess())
    _, steps = finish(run, apart(run, trainers=2), spawned.executor())
    for one, two in zip(alone, steps, strict=True):
        expected = one.metrics["actor.train/grad_norm"]
        assert two.metrics["actor.train/grad_norm"] == pytest.approx(expected, rel=1e-3)
