"""The Ray executor with real Ray, real process groups and the real torch engine."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from penstock.dataflow.engine import Engine, StepResult
from penstock.dataflow.errors import ConfigError, WorkerError
from penstock.dataflow.executor import Executor, InProcess
from penstock.dataflow.placement import DeviceGroup, Placement, one_group
from penstock.dataflow.role import Role
from penstock.dataflow.schedule import Schedule
from penstock.dataflow.spans import TaskSpan
from penstock.dataflow.worker import WorkerContext, WorkerSpec
from penstock.launch.checkpoint import CheckpointStore
from penstock.workers.ray_executor import RayExecutor, connect_ray, shutdown_ray
from penstock.workers.torch_policy import TorchPolicy, TorchPolicySpec
from safetensors.torch import load_file

from ..algorithms import runs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    connect_ray()
    yield
    shutdown_ray()


def split(run: runs.Run, **groups: tuple[str, ...]) -> Placement:
    """A placement with the named nodes (or roles) on groups of their own; the rest on 'main'."""
    chosen = {name: group for group, names in groups.items() for name in names}
    nodes = {
        node.name: chosen.get(node.name) or chosen.get(node.role or "") or "main"
        for node in run.graph.nodes
        if node.name not in run.graph.sources
    }
    return Placement((DeviceGroup("main"), *map(DeviceGroup, groups)), nodes)


def finish(
    run: runs.Run,
    placement: Placement,
    executor: Executor,
    *,
    num_steps: int = 3,
    workers: Mapping[str, WorkerSpec] | None = None,
    **options: Any,
) -> tuple[dict[str, str], list[StepResult]]:
    """Weights hashes of the trained roles, and every step's result."""
    engine = Engine(
        run.graph, placement, workers=workers or run.workers, executor=executor, **options
    )
    with engine:
        steps = list(engine.run(run.sources, num_steps))
        return {role: engine.ask(role, "weights_sha256") for role in run.trained}, steps


def test_in_process_and_ray_end_with_the_same_weights() -> None:
    run = runs.make("ppo")
    here, _ = finish(run, one_group(run.graph), InProcess())
    apart = split(run, actor=("actor",), critic=("critic",), judges=("ref", "reward"))
    there, steps = finish(run, apart, RayExecutor(num_threads=1))
    assert there == here
    assert {span.group for span in steps[0].spans} == {"main", "actor", "critic", "judges"}
    moved = sum(step.controller_bytes for step in steps)
    assert 0 < moved < 40_000  # reports and prompts; one step's columns alone are as much


@dataclass(frozen=True)
class DelayedSpec:
    """Sleeps before each call of the worker it wraps: a set time, and a random, unseeded one."""

    spec: Any
    least_s: float = 0.0
    random_s: float = 0.05

    def build(self, context: WorkerContext) -> Role:
        worker = self.spec.build(context)
        for name in ("generate", "score", "train", "logprob"):
            if hasattr(worker, name):
                setattr(worker, name, self._delayed(name, getattr(worker, name)))
        return worker

    def _delayed(self, name: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            least_s = self.least_s if name == "generate" else 0.0
            time.sleep(least_s + random.SystemRandom().random() * self.random_s)
            return method(*args, **kwargs)

        return call


def versions(steps: list[StepResult]) -> list[tuple[str, int, Any]]:
    """Which weights each task read: the schedule."""
    return sorted((span.node, span.step, span.versions) for step in steps for span in step.spans)


def test_one_step_off_is_reproducible_whatever_the_timing() -> None:
    run = runs.make("grpo")
    apart = replace(split(run, rollout=("actor.generate", "reward")), num_chunks=2)
    late = {name: DelayedSpec(spec, least_s=0.2) for name, spec in run.workers.items()}

    def once(order: Literal["step", "arrival"]) -> tuple[dict[str, str], list[StepResult]]:
        schedule, executor = Schedule(max_lag=1, order=order), RayExecutor(num_threads=1)
        return finish(run, apart, executor, num_steps=6, workers=late, schedule=schedule)

    (first, first_steps), (second, second_steps) = once("step"), once("step")
    assert first == second
    assert versions(first_steps) == versions(second_steps)
    read = {s.step: s.versions for r in first_steps for s in r.spans if s.node == "actor.generate"}
    assert read == {step: (("actor", max(0, step - 1)),) for step in range(6)}
    check_overlap([span for step in first_steps for span in step.spans])

    here = replace(one_group(run.graph), num_chunks=2)
    schedule = Schedule(max_lag=1)
    assert finish(run, here, InProcess(), num_steps=6, schedule=schedule)[0] == first

    # The control: whatever weights are there. A step's second chunk waits for its first, and by
    # then the step before has been trained on.
    control, control_steps = once("arrival")
    assert versions(control_steps) != versions(first_steps)
    assert control != first


def check_overlap(spans: list[TaskSpan]) -> None:
    """Generation of the next step ran while this one was being trained on."""
    together = {
        (train.step, roll.step)
        for train in spans
        for roll in spans
        if (train.node, roll.node) == ("actor.train", "actor.generate")
        and train.start_s < roll.end_s
        and roll.start_s < train.end_s
    }
    assert together
    assert all(roll == train + 1 for train, roll in together)


def test_two_ranks_sample_the_same_tokens_and_train_to_the_same_weights(tmp_path: Path) -> None:
    run = runs.make("grpo")
    engines = {
        1: Engine(run.graph, one_group(run.graph), workers=run.workers),
        2: Engine(run.graph, one_group(run.graph, 2), workers=run.workers, executor=RayExecutor(1)),
    }
    weights: dict[int, dict[str, torch.Tensor]] = {}
    metrics: dict[int, list[StepResult]] = {}
    for num_ranks, engine in engines.items():
        with engine:
            metrics[num_ranks] = list(engine.run(run.sources, 3))
            path = tmp_path / str(num_ranks)
            engine.ask("actor", "save_pretrained", path)
        weights[num_ranks] = load_file(path / "model.safetensors")
    for name, one in weights[1].items():
        torch.testing.assert_close(weights[2][name], one, rtol=0, atol=1e-5)
    fingerprints = {step[0].metrics["reward.score/fingerprint"] for step in metrics.values()}
    assert len(fingerprints) == 1, "the first step's tokens differ"
    assert metrics[2][0].num_rows["actor.generate"] == runs.PROMPTS_PER_STEP * 4


class BrokenPolicy(TorchPolicy):
    """Fails in one step, in the way asked for."""

    def __init__(self, how: str, *args: Any) -> None:
        super().__init__(*args)
        self.how, self.calls = how, 0

    def generate(self, prompt: Any, prompt_id: Any, sampling: Any) -> Any:
        self.calls += 1
        if self.calls == 2 and self.how == "raise":
            raise ZeroDivisionError("on purpose")
        if self.calls == 2 and self.how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.calls == 2 and self.how == "hang":
            time.sleep(600)
        return super().generate(prompt, prompt_id, sampling)


@dataclass(frozen=True)
class BrokenSpec:
    how: str
    spec: TorchPolicySpec

    def build(self, context: WorkerContext) -> BrokenPolicy:
        return BrokenPolicy(self.how, self.spec, context)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("raise", ["actor.generate step 1", "ZeroDivisionError: on purpose", "in generate"]),
        ("die", ["actor.generate step 1", "rank 0 of group 'all' died"]),
        ("hang", ["actor.generate of step 1 has run for", "on all[0]", "actor@1"]),
    ],
)
def test_failures_name_the_node_and_end_the_run(how: str, expected: list[str]) -> None:
    run = runs.make("grpo")
    actor = run.workers["actor"]
    assert isinstance(actor, TorchPolicySpec)
    workers = {**run.workers, "actor": BrokenSpec(how, actor)}
    schedule = Schedule(deadline_s=6.0 if how == "hang" else 120.0)
    with pytest.raises(WorkerError) as raised:
        finish(run, one_group(run.graph), RayExecutor(1), workers=workers, schedule=schedule)
    for text in expected:
        assert text in str(raised.value)


def test_resume_on_ray_continues_bit_for_bit(tmp_path: Path) -> None:
    run = runs.make("grpo")
    apart = split(run, rollout=("actor.generate", "reward"))
    schedule = Schedule(max_lag=1)
    here = one_group(run.graph)
    whole, _ = finish(run, here, InProcess(), num_steps=6, schedule=schedule)
    store = CheckpointStore(tmp_path)
    with Engine(
        run.graph, apart, workers=run.workers, executor=RayExecutor(1), schedule=schedule
    ) as engine:
        stream = engine.run(run.sources, 6, checkpoint_every=2, checkpoints=store)
        taken = [next(stream).step for _ in range(5)]
    assert taken == [0, 1, 2, 3, 4]
    with Engine(
        run.graph, apart, workers=run.workers, executor=RayExecutor(1), schedule=schedule
    ) as engine:
        rest = [
            step.step for step in engine.run(run.sources, 6, checkpoint_every=2, checkpoints=store)
        ]
        assert rest == [4, 5]
        assert engine.ask("actor", "weights_sha256") == whole["actor"]


def test_a_live_worker_is_refused() -> None:
    run = runs.make("grpo")
    live = {**run.workers, "reward": runs.LengthReward()}
    engine = Engine(run.graph, one_group(run.graph), workers=live, executor=RayExecutor(1))
    with pytest.raises(ConfigError) as raised:
        engine.start()
    assert str(raised.value) == (
        "role 'reward' is given as a live LengthReward; on Ray it must be built where it runs: "
        "give a WorkerSpec"
    )
