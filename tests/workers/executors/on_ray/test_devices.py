"""On a real Ray of two nodes every process is where the plan has it, and runs never deadlock."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from penstock.dataflow.errors import PlanError
from penstock.dataflow.graph.role import Role
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.executor import Executor
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.placement import ClusterNode, DeviceGroup, Placement, one_group
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.planner.plan.plan import GroupPlan, Plan
from penstock.workers.executors.on_ray.backend import RayBackend
from penstock.workers.executors.on_ray.devices import RayDevices
from penstock.workers.executors.on_ray.executor import RayExecutor
from ray.util.placement_group import placement_group_table

from ....algorithms import runs
from ....planner.hand_made import h100
from .two_nodes import places, two_nodes

pytestmark = pytest.mark.slow

RESERVE_S = 60.0


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with two_nodes((3, 4)) as address:
        yield address


def group(name: str, devices: dict[int, int], device: str = "cuda", tensor: int = 1) -> DeviceGroup:
    """Devices of a group -> the node of each."""
    num_ranks = len(devices) // tensor
    where = tuple(map(ClusterNode, devices.values()))
    return DeviceGroup(name, num_ranks, device, tensor, devices=tuple(devices), nodes=where)


def num_reserved() -> int:
    table = placement_group_table()
    return sum(one["state"] == "CREATED" for one in table.values())


def give_back(groups: list[DeviceGroup], devices: RayDevices) -> None:
    for one in groups:
        devices.release(one.name)
    end_s = time.monotonic() + 20
    while num_reserved() and time.monotonic() < end_s:
        time.sleep(0.05)
    assert num_reserved() == 0


def test_gpu_ranks_are_on_their_nodes_in_the_order_of_their_gpus(address: str) -> None:
    """Node 0 of the plan needs 4 GPUs, so it is the larger of Ray's, whichever is the driver's."""
    train = group("train", {0: 0, 1: 0, 2: 0, 4: 1}, tensor=2)
    rollout = group("rollout", {2: 0, 3: 0, 5: 1})
    groups = [train, rollout]
    devices = RayBackend().reserve(groups, RESERVE_S, {"train"})
    assert num_reserved() == 3  # what trains, and two replicas; one more has a device of `train`
    try:
        found = places(groups, devices)
    finally:
        give_back(groups, devices)
    of_train = [found["train", process] for process in range(4)]
    of_rollout = [found["rollout", process] for process in range(3)]
    first, second = of_train[0].node, of_train[3].node
    assert first != second
    assert [at.node for at in of_train] == [first, first, first, second]
    assert [at.node for at in of_rollout] == [first, first, second]
    indices = [at.gpus[0] for at in of_train[:3]]
    assert indices == sorted(set(indices))
    assert of_rollout[0].gpus == of_train[2].gpus  # they share device 2
    assert of_rollout[1].gpus[0] not in indices
    assert of_rollout[2].gpus != of_train[3].gpus


def test_what_is_given_back_apart_is_a_replicas_own(address: str) -> None:
    """A warm group keeps its nodes, and the next run's node 1 is where it is."""
    train, rollout = group("train", {0: 0, 1: 0}), group("rollout", {4: 1, 5: 1})
    devices = RayBackend().reserve([train, rollout], RESERVE_S, {"train"})
    warm = places([rollout], devices)["rollout", 0].node
    devices.release("train")
    other = group("train", {3: 1, 0: 0})
    again = RayBackend().reserve([other], RESERVE_S, {"train"}, [devices])
    try:
        found = places([other], again)
        assert found["train", 0].node == warm
        assert found["train", 1].node != warm
    finally:
        again.release("train")
        give_back([rollout], devices)


def test_what_ray_has_not_is_refused_at_once(address: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(PlanError) as raised:
        RayBackend().reserve([group("all", {i: i // 4 for i in range(8)})], RESERVE_S)
    assert time.monotonic() - began_s < RESERVE_S / 4
    host = address.partition(":")[0]
    assert str(raised.value) == (
        "node 1 of the plan needs 4 GPUs, which no node has\n"
        f"    {host}: 3 GPUs\n"
        f"    {host}: 4 GPUs (is node 0 of the plan)\n"
        "    start Ray on more or larger nodes, or plan for those that there are: placement=auto"
    )


def test_what_is_not_free_in_time_is_said(address: str) -> None:
    """And a run that ends gives its GPUs to the one that waits."""
    first = group("first", {0: 0, 1: 0, 2: 0})
    held = RayBackend().reserve([first], RESERVE_S)
    second = group("second", {0: 0, 1: 0, 2: 0, 4: 1, 5: 1, 6: 1})
    with pytest.raises(PlanError) as raised:
        RayBackend().reserve([second], 1.5)
    said = str(raised.value).splitlines()
    assert said[0] == "node 1 of the plan needs 3 GPUs, which no node has free"
    assert said[-1] == (
        "    it was not free within 1.5 s; wait until other runs have ended, or plan for fewer "
        "devices"
    )
    timer = threading.Timer(1.0, held.release, ["first"])
    timer.start()
    devices = RayBackend().reserve([second], RESERVE_S)
    timer.join()
    give_back([second], devices)


@dataclass(frozen=True)
class Telling:
    """Writes down on which node a worker is built, in a file called after its role and rank."""

    spec: Any
    folder: Path

    def build(self, context: WorkerContext) -> Role:
        node = ray.get_runtime_context().get_node_id()
        (self.folder / f"{context.role}-{context.replica}-{context.num_replicas}").write_text(node)
        return self.spec.build(context)


def test_a_run_over_two_nodes_trains_as_one_process_does(address: str, tmp_path: Path) -> None:
    run = runs.make("grpo")
    train, rollout = (
        GroupPlan(name="train", devices=(8,)),
        GroupPlan(name="rollout", devices=(0, 9)),
    )
    generates = {"actor.generate": "rollout"}
    plan = Plan(groups=(train, rollout), nodes=generates, cluster=h100(2))
    workers = {role: Telling(spec, tmp_path) for role, spec in run.workers.items()}

    def finish(placement: Placement, executor: Executor, workers: Mapping[str, Any]) -> Any:
        engine = Engine(run.graph, placement, workers=workers, executor=executor)
        with engine:
            for _ in engine.run(run.sources, 2):
                pass
            return engine.call("actor", "weights_sha256")

    here = finish(one_group(run.graph), InProcess(), run.workers)
    assert finish(plan.placement(run.graph), RayExecutor(1), workers) == here
    where = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert where["actor-0-1"] == where["actor-1-2"] == where["reward-0-1"]
    assert where["actor-0-2"] != where["actor-0-1"]


RUN = """
import os, sys, time
from penstock.dataflow.runtime.placement import ClusterNode, DeviceGroup
from penstock.workers.executors.on_ray.backend import RayBackend
from penstock.workers.executors.on_ray.executor import connect_ray, shutdown_ray
connect_ray()
nodes = [ClusterNode(i // 3) for i in range(6)]
group = DeviceGroup("all", 6, "cuda", devices=tuple(range(6)), nodes=tuple(nodes))
print("ready", flush=True)
sys.stdin.readline()
devices = RayBackend().reserve([group], 120.0)
print("has", time.time(), flush=True)
time.sleep(1.0)
print("ends", time.time(), flush=True)
devices.release("all")
shutdown_ray()
"""


@pytest.mark.nightly
def test_two_runs_at_once_both_end(address: str) -> None:
    """There is room for one of them at a time."""
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", RUN],
            env={**os.environ, "RAY_ADDRESS": address},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        for run in runs:
            assert run.stdout is not None
            assert run.stdout.readline() == "ready\n"
        for run in runs:
            assert run.stdin is not None
            run.stdin.write("\n")
            run.stdin.flush()
        said = [run.communicate(timeout=150)[0].split() for run in runs]
    finally:
        for run in runs:
            run.kill()
    held = sorted((float(words[1]), float(words[3])) for words in said)
    assert held[0][1] < held[1][0]
