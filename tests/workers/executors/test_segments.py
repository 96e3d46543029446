"""Responses that go on in later steps: exactly once, and the same weights whatever happens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.executor import Executor
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.placement import Placement, one_group
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.launch.run_dir.checkpoint import CheckpointStore

from ...algorithms import runs
from .backends import Backend
from .test_streaming import SlowSpec, apart

pytestmark = pytest.mark.slow

NUM_STEPS = 5
SEGMENT = 2  # of at most 6 tokens


def finish(
    run: runs.Run, placement: Placement, executor: Executor, **options: Any
) -> tuple[dict[str, str], list[int], list[float]]:
    """Weights, and of every step the rows that ended in it and those left unfinished."""
    asked: dict[str, Any] = {"segment_tokens": SEGMENT, **options.pop("asked", {})}
    num_steps = options.pop("num_steps", NUM_STEPS)
    engine = Engine(
        run.graph,
        placement,
        workers=options.pop("workers", run.workers),
        executor=executor,
        schedule=Schedule(**asked),
    )
    with engine:
        steps = list(engine.run(run.sources, num_steps, **options))
        hashes = {role: engine.call(role, "weights_sha256") for role in run.trained}
    left = [step.metrics.get("actor.generate/unfinished_rows", 0.0) for step in steps]
    return hashes, [step.num_rows.get("actor.generate", 0) for step in steps], left


CASES: list[dict[str, Any]] = [
    {"max_lag": 0},
    {"max_lag": 1},
    {"max_lag": 1, "streaming": runs.PROMPTS_PER_STEP},
]


def in_process(run: runs.Run) -> Placement:
    return replace(one_group(run.graph), num_chunks=2)


@pytest.fixture(scope="module")
def here() -> list[dict[str, str]]:
    """Hashes of the run in one process, by case."""
    run = runs.make("grpo")
    return [finish(run, in_process(run), InProcess(), asked=asked)[0] for asked in CASES]


def test_every_response_ends_in_one_step() -> None:
    run = runs.make("grpo")
    _, ended, left = finish(run, in_process(run), InProcess(), num_steps=8)
    begun = 4 * runs.PROMPTS_PER_STEP  # samples of the prompts of a step
    assert ended[0] < begun
    for step in range(8):
        assert sum(ended[: step + 1]) + left[step] == begun * (step + 1)


def test_one_segment_is_a_whole_response() -> None:
    run = runs.make("grpo")
    whole = finish(run, in_process(run), InProcess(), asked={"segment_tokens": 6})
    engine = Engine(run.graph, in_process(run), workers=run.workers, executor=InProcess())
    with engine:
        list(engine.run(run.sources, NUM_STEPS))
        assert engine.call("actor", "weights_sha256") == whole[0]["actor"]


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_it_ends_with_the_same_weights_whatever_the_timing(
    tmp_path: Path, spawned: Backend, here: list[dict[str, str]], num_ranks: int, case: int
) -> None:
    run = runs.make("grpo")
    slow = SlowSpec(run.workers["actor"], str(tmp_path), seed=case)
    placement = replace(apart(run, num_ranks), num_chunks=2)
    workers = {**run.workers, "actor": slow}
    options: dict[str, Any] = {"asked": CASES[case], "workers": workers}
    assert finish(run, placement, spawned.executor(), **options)[0] == here[case]


def test_a_process_that_dies_goes_on_with_what_was_begun(
    tmp_path: Path, spawned: Backend, here: list[dict[str, str]]
) -> None:
    run = runs.make("grpo")
    slow = SlowSpec(run.workers["actor"], str(tmp_path), seed=0, fatal=5)  # in the third step
    placement = replace(apart(run), num_chunks=2)
    workers = {**run.workers, "actor": slow}
    options: dict[str, Any] = {"asked": CASES[1], "workers": workers}
    assert finish(run, placement, spawned.executor(), **options)[0] == here[1]
    assert len(list(tmp_path.glob("answer-*"))) > 2 * NUM_STEPS


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_resumed_run_goes_on_with_what_was_begun(
    tmp_path: Path, here: list[dict[str, str]], case: int
) -> None:
    run = runs.make("grpo")
    options: dict[str, Any] = {"asked": CASES[case], "checkpoint_every": 1}
    options["checkpoints"] = CheckpointStore(tmp_path)
    calls = iter(range(30))
    finish(run, in_process(run), InProcess(), stop=lambda: next(calls, 30) >= 12, **options)
    stopped = options["checkpoints"].latest()
    assert stopped is not None
    assert any("unfinished" in text for text in [(stopped / "run.json").read_text()])
    assert finish(run, in_process(run), InProcess(), **options)[0] == here[case]


def test_steps_without_a_row_are_trained_on_too() -> None:
    """Of a step with more nodes: what is left out, and what is no row for any of them."""
    run = runs.make("ppo")
    run = replace(run, cfg=replace(run.cfg, num_minibatches=1))
    schedule = Schedule(segment_tokens=1, streaming=2)
    engine = Engine(run.graph, in_process(run), workers=run.workers, schedule=schedule)
    with engine:
        steps = list(engine.run(run.sources, NUM_STEPS))
    assert steps[0].num_rows["actor.generate"] == 0
    assert steps[0].metrics["actor.train/tokens"] == 0
    assert steps[-1].metrics["critic.train/tokens"] > 0
