"""A node of a Ray cluster is removed while a run goes on, and another one is added."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.executor import Executor, Recovered, Recovery, Restart
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.placement import ClusterNode, DeviceGroup, Placement, one_group
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.launch.run_dir.checkpoint import CheckpointStore
from penstock.workers.executors.on_ray.executor import RayExecutor, connect_ray, shutdown_ray
from ray.cluster_utils import Cluster

from ....algorithms import runs
from .two_nodes import ray_folder

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

NUM_STEPS = 8


@pytest.fixture(scope="module")
def ray() -> Iterator[Cluster]:
    """One node, on which this process is. It outlives a test, as do Ray's own files in here."""
    with ray_folder() as folder:
        found = Cluster()
        try:
            found.add_node(num_cpus=3, temp_dir=folder, include_dashboard=False)
            os.environ["RAY_ADDRESS"] = str(found.address)
            try:
                connect_ray()
                yield found
            finally:
                del os.environ["RAY_ADDRESS"]
                shutdown_ray()
        finally:
            found.shutdown()


@pytest.fixture
def cluster(ray: Cluster) -> Iterator[Cluster]:
    """With a second node, which ends with the test, or whatever has come in its place."""
    ray.add_node(num_cpus=3)
    yield ray
    remove_second(ray)


def remove_second(cluster: Cluster) -> None:
    """As a machine is lost."""
    (second,) = [node for node in cluster.list_all_nodes() if node is not cluster.head_node]
    cluster.remove_node(second, allow_graceful=False)


def exchange(cluster: Cluster) -> None:
    """Remove the second node and have another one come."""
    remove_second(cluster)
    cluster.add_node(num_cpus=3)


def finish(
    run: runs.Run,
    placement: Placement,
    executor: Executor,
    max_lag: int,
    folder: Path,
    cluster: Cluster | None = None,
) -> tuple[dict[str, str], list[int], list[Recovered | Restart]]:
    """Weights, the steps that were handed out, and what was told."""
    told: list[Recovered | Restart] = []
    engine = Engine(
        run.graph,
        placement,
        workers=run.workers,
        executor=executor,
        schedule=Schedule(max_lag=max_lag),
        recovery=Recovery(pause_s=0.5),
        recovered=told.append,
    )
    steps: list[int] = []
    with engine:
        store = CheckpointStore(folder)
        for step in engine.run(run.sources, NUM_STEPS, checkpoint_every=2, checkpoints=store):
            steps.append(step.step)
            if step.step == 2 and cluster is not None:
                exchange(cluster)
        weights = {role: engine.call(role, "weights_sha256") for role in run.trained}
    return weights, steps, told


@pytest.mark.parametrize("lost", ["train", "rollout"])
@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_node_that_is_lost_changes_nothing(
    tmp_path: Path, cluster: Cluster, lost: str, max_lag: int
) -> None:
    run = runs.make("grpo")
    whole = replace(one_group(run.graph), num_chunks=2)
    plain, _, _ = finish(run, whole, InProcess(), max_lag, tmp_path / "plain")

    first, second = ClusterNode(0), ClusterNode(1)
    train, rollout = (second, (first,) * 2) if lost == "train" else (first, (second,) * 2)
    groups = (DeviceGroup("train", nodes=(train,)), DeviceGroup("rollout", 2, nodes=rollout))
    names = [node.name for node in run.graph.nodes if node.name not in run.graph.sources]
    nodes = {name: "rollout" if name == "actor.generate" else "train" for name in names}
    apart = Placement(groups, nodes, num_chunks=2)
    executor = RayExecutor(1)
    found, steps, told = finish(run, apart, executor, max_lag, tmp_path / "found", cluster)
    assert found == plain
    assert steps == list(range(NUM_STEPS))
    assert told
