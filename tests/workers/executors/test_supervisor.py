"""The supervisor with real processes, real process groups and the real torch engine.

Plain processes show what it does by itself; on Ray runs what depends on the backend as well.
"""

from __future__ import annotations

import ipaddress
import os
import random
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
import torch
import torch.distributed as dist
from penstock.dataflow.errors import ConfigError, WorkerError
from penstock.dataflow.graph.role import Role
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime.engine import Engine, StepResult
from penstock.dataflow.runtime.executor import Executor
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.messages import TaskSpan
from penstock.dataflow.runtime.placement import DeviceGroup, Placement, one_group
from penstock.dataflow.runtime.worker_protocol import WorkerContext, WorkerSpec
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.launch.run_dir.checkpoint import CheckpointStore
from penstock.workers.engines.roles import PolicyWorker
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.executors.rank_process import RankProcess
from safetensors.torch import load_file

from ...algorithms import runs
from ...dataflow import counter
from .backends import ON_RAY_AT_NIGHT, Backend

pytestmark = pytest.mark.slow


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
        return {role: engine.call(role, "weights_sha256") for role in run.trained}, steps


def test_in_one_process_and_in_several_it_ends_with_the_same_weights(backend: Backend) -> None:
    run = runs.make("ppo")
    here, _ = finish(run, one_group(run.graph), InProcess())
    apart = split(run, actor=("actor",), critic=("critic",), judges=("ref", "reward"))
    there, steps = finish(run, apart, backend.executor())
    assert there == here
    assert {span.group for span in steps[0].spans} == {"main", "actor", "critic", "judges"}
    moved = sum(step.controller_bytes for step in steps)
    assert 0 < moved < 40_000  # reports and prompts; one step's columns alone are as much


@ON_RAY_AT_NIGHT
def test_kept_columns_come_through_the_controller_which_counts_them(backend: Backend) -> None:
    run = runs.make("grpo")
    names = ["actor.generate", "reward.score"]
    apart = split(run, rollout=("actor.generate",), judge=("reward",))
    found: list[list[StepResult]] = []
    for placement, executor, keep in (
        (one_group(run.graph), InProcess(), names),
        (apart, backend.executor(), names),
        (apart, backend.executor(), []),
    ):
        with Engine(run.graph, placement, workers=run.workers, executor=executor) as engine:
            found.append(list(engine.run(run.sources, 2, keep=keep)))
    here, there, without = found
    for one, other in zip(here, there, strict=True):
        for name in ("tokens", "mask", "behavior_logprob"):
            column = getattr(one.kept["actor.generate"], name)
            assert torch.equal(column, getattr(other.kept["actor.generate"], name))
        assert torch.equal(one.kept["reward.score"], other.kept["reward.score"])
    more = [a.controller_bytes - b.controller_bytes for a, b in zip(there, without, strict=True)]
    size_bytes = [int(step.kept["actor.generate"].mask.sum()) * 4 for step in there]
    assert all(m > s for m, s in zip(more, size_bytes, strict=True)), "one column alone is as much"


def test_groups_give_each_other_the_weights_of_several_roles(spawned: Backend) -> None:
    """Point to point: main sends two roles to a group from which it receives a third."""
    run = runs.make("ppo")
    here, _ = finish(run, one_group(run.graph), InProcess())
    both = split(run, rollout=("actor.generate", "critic.train"), judges=("ref", "reward"))
    there, _ = finish(run, both, spawned.executor(transport="object_store"))
    assert there == here


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


def test_one_step_off_is_reproducible_whatever_the_timing(spawned: Backend) -> None:
    run = runs.make("grpo")
    apart = replace(split(run, rollout=("actor.generate", "reward")), num_chunks=2)
    late = {name: DelayedSpec(spec, least_s=0.2) for name, spec in run.workers.items()}

    def once(order: Literal["step", "arrival"]) -> tuple[dict[str, str], list[StepResult]]:
        schedule, executor = Schedule(max_lag=1, order=order), spawned.executor()
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


@ON_RAY_AT_NIGHT
def test_two_ranks_sample_the_same_tokens_and_train_to_the_same_weights(
    tmp_path: Path, backend: Backend
) -> None:
    run = runs.make("grpo")
    engines = {
        1: Engine(run.graph, one_group(run.graph), workers=run.workers),
        2: Engine(
            run.graph, one_group(run.graph, 2), workers=run.workers, executor=backend.executor()
        ),
    }
    weights: dict[int, dict[str, torch.Tensor]] = {}
    metrics: dict[int, list[StepResult]] = {}
    for num_ranks, engine in engines.items():
        with engine:
            metrics[num_ranks] = list(engine.run(run.sources, 3))
            path = tmp_path / str(num_ranks)
            engine.call("actor", "save_pretrained", path)
        weights[num_ranks] = load_file(path / "model.safetensors")
    for name, one in weights[1].items():
        torch.testing.assert_close(weights[2][name], one, rtol=0, atol=1e-5)
    fingerprints = {step[0].metrics["reward.score/fingerprint"] for step in metrics.values()}
    assert len(fingerprints) == 1, "the first step's tokens differ"
    assert metrics[2][0].num_rows["actor.generate"] == runs.PROMPTS_PER_STEP * 4


class BrokenPolicy(PolicyWorker):
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
        return BrokenPolicy(self.how, context, self.spec)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("raise", ["actor.generate step 1", "ZeroDivisionError: on purpose", "in generate"]),
        ("hang", ["actor.generate of step 1 has run for", "on all[0]", "actor@1"]),
    ],
)
def test_failures_name_the_node_and_end_the_run(
    how: str, expected: list[str], spawned: Backend
) -> None:
    check_failure(how, expected, spawned)


def test_a_process_that_dies_is_named_and_ends_the_run(backend: Backend) -> None:
    check_failure("die", ["actor.generate step 1", "rank 0 of group 'all' died: "], backend)


def check_failure(how: str, expected: list[str], backend: Backend) -> None:
    run = runs.make("grpo")
    actor = run.workers["actor"]
    assert isinstance(actor, TorchPolicySpec)
    workers = {**run.workers, "actor": BrokenSpec(how, actor)}
    schedule = Schedule(deadline_s=6.0 if how == "hang" else 120.0)
    with pytest.raises(WorkerError) as raised:
        finish(run, one_group(run.graph), backend.executor(), workers=workers, schedule=schedule)
    for text in expected:
        assert text in str(raised.value)


@ON_RAY_AT_NIGHT
def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path, backend: Backend) -> None:
    run = runs.make("grpo")
    apart = split(run, rollout=("actor.generate", "reward"))
    schedule = Schedule(max_lag=1)
    here = one_group(run.graph)
    whole, _ = finish(run, here, InProcess(), num_steps=6, schedule=schedule)
    store = CheckpointStore(tmp_path)
    with Engine(
        run.graph, apart, workers=run.workers, executor=backend.executor(), schedule=schedule
    ) as engine:
        stream = engine.run(run.sources, 6, checkpoint_every=2, checkpoints=store)
        taken = [next(stream).step for _ in range(5)]
    assert taken == [0, 1, 2, 3, 4]
    with Engine(
        run.graph, apart, workers=run.workers, executor=backend.executor(), schedule=schedule
    ) as engine:
        rest = [
            step.step for step in engine.run(run.sources, 6, checkpoint_every=2, checkpoints=store)
        ]
        assert rest == [4, 5]
        assert engine.call("actor", "weights_sha256") == whole["actor"]


def test_runs_follow_one_another_whatever_is_still_out(spawned: Backend) -> None:
    graph = counter.COUNT
    placement = counter.apart(graph, model__sample="rollout")
    with Engine(
        graph,
        placement,
        workers={"model": counter.CounterSpec()},
        executor=spawned.executor(),
        schedule=Schedule(max_lag=1),
    ) as engine:
        for step in engine.run(counter.SOURCES, 5):
            assert engine.call("model", "count") >= step.step + 1
            if step.step == 1:
                break
        trained = engine.call("model", "count")
        steps = list(engine.run(counter.SOURCES, 3))
        assert counter.seen(steps) == [trained, trained, trained + 1]
        assert engine.call("model", "count") == trained + 3


@dataclass(frozen=True)
class ClosingSpec:
    """Builds a counter that leaves a file when it is closed; or cannot be built."""

    folder: str
    broken: bool = False

    def build(self, context: WorkerContext) -> ClosingCounter:
        if self.broken:
            raise ConfigError(f"role '{context.role}' cannot be built\n    on purpose")
        return ClosingCounter(Path(self.folder) / f"{context.role}-{context.rank}")


class ClosingCounter(counter.Counter):
    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def close(self) -> None:
        self.file.touch()


@ON_RAY_AT_NIGHT
def test_workers_are_closed_before_their_processes_end(tmp_path: Path, backend: Backend) -> None:
    engine = Engine(
        counter.COUNT,
        one_group(counter.COUNT, 2),
        workers={"model": ClosingSpec(str(tmp_path))},
        executor=backend.executor(),
    )
    with engine:
        list(engine.run(counter.SOURCES, 1))
        assert len(backend.pids()) == 2
        assert not list(tmp_path.iterdir())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model-0", "model-1"]


def look_twice_step(keys: counter.Keys, model: counter.Model, judge: counter.Model) -> object:
    return model.sample(keys.key), judge.sample(keys.key)


def test_a_worker_that_cannot_be_built_keeps_its_error_and_ends_the_others(
    tmp_path: Path, backend: Backend
) -> None:
    graph = build(look_twice_step)
    workers = {role: ClosingSpec(str(tmp_path), role == "judge") for role in ("model", "judge")}
    placement = counter.apart(graph, judge__sample="other")
    engine = Engine(graph, placement, workers=workers, executor=backend.executor())
    with pytest.raises(ConfigError) as raised:
        engine.start()
    assert str(raised.value) == "role 'judge' cannot be built\n    on purpose"
    assert [file.name for file in tmp_path.iterdir()] == ["model-0"]
    end_s = time.monotonic() + 30
    while backend.pids() and time.monotonic() < end_s:
        time.sleep(0.1)
    assert backend.pids() == []


def is_loopback(text: str) -> bool:
    address = ipaddress.ip_address(text)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


class Counting(RankProcess):
    def sum_and_addresses(self) -> tuple[float, list[str]]:
        """What the processes of a group add up to, and where this one can be connected to."""
        total = torch.ones(())
        dist.all_reduce(total)
        found = psutil.Process().net_connections("tcp")
        return float(total), [c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN]


def test_ranks_meet_where_no_other_machine_can_reach_them(backend: Backend) -> None:
    group, there = DeviceGroup("pair", 2), backend.connect()
    devices = there.reserve([group], 60.0)
    ranks = [
        there.spawn(Counting, (group, rank, 1, 60.0, 120.0), group, rank, devices)
        for rank in range(2)
    ]

    def call(method: str, processes: list[Any], *arguments: Any) -> list[Any]:
        refs = [there.call(process, method, arguments)[0] for process in processes]
        return there.get(refs, 120.0)

    try:
        (meet,) = call("listen", ranks[:1])
        call("join", ranks, meet)
        for total, addresses in call("sum_and_addresses", ranks):
            assert total == 2
            assert addresses
            assert [one for one in addresses if not is_loopback(one)] == []
    finally:
        for rank in ranks:
            there.kill(rank)
        devices.release(group.name)
