"""The cluster that Ray reports, as the planner sees it; and runs that are planned for all of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from penstock.configs.schema import ExecutorConfig
from penstock.dataflow.errors import ConfigError
from penstock.launch.placement.machine import reported_cluster
from penstock.launch.placement.place import make_executor
from penstock.planner.report.plan_texts import cluster_text
from penstock.workers.executors.assignment import Machine
from penstock.workers.executors.on_ray import executor
from penstock.workers.executors.registry import EXECUTORS

from ...workers.executors.on_ray.two_nodes import two_nodes
from ..conftest import Penstock

NAME = "ray.io/accelerator-type"


def gpus(number: int, *devices: str) -> Machine:
    labels = {NAME: devices[-1]} if devices else {}
    total = {"GPU": float(number), "CPU": 8.0}
    return Machine(str(number), "", total, total, labels, devices)


def text(*machines: Machine, device: str = "cuda") -> str:
    found = reported_cluster(machines, device)
    assert found is not None
    return cluster_text(found)


def test_gpus_are_known_by_name() -> None:
    head = Machine("head", "", {"CPU": 16.0}, {})
    assert text(head, gpus(8, "H100"), gpus(8, "H100")) == (
        "joined cluster: 2 nodes x 8 h100 = 16 devices"
    )
    assert reported_cluster([gpus(8, "H100"), gpus(4, "L4")], "cuda") is None
    assert reported_cluster([head], "cuda") is None


def test_kinds_of_gpu_are_told_apart_by_their_label() -> None:
    found = reported_cluster([gpus(8, "H100"), gpus(4, "A100-80G", "A100")], "cuda")
    assert found is not None
    assert (
        cluster_text(found) == "joined cluster: 1 node x 8 h100 + 1 node x 4 a100-80g = 12 devices"
    )
    assert [dict(group.labels) for group in found.node_groups] == [{NAME: "H100"}, {NAME: "A100"}]
    assert found.between.bytes_per_s == 3.1e9  # the slower of the two


def test_cores_and_memory_are_shared_out() -> None:
    large = Machine("a", "", {"CPU": 32.0, "memory": 64e9}, {})
    small = Machine("b", "", {"CPU": 2.0, "memory": 8e9}, {})
    found = reported_cluster([large, small], "cpu")
    assert found is not None
    assert cluster_text(found) == "joined cluster: 1 node x 8 cpu + 1 node x 2 cpu = 10 devices"
    first, second = (group.device for group in found.node_groups)
    assert (first.memory_bytes, second.memory_bytes) == (8 * 10**9, 4 * 10**9)
    assert first.flops("float32") == 4 * second.flops("float32")


def test_a_device_that_no_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = (Machine("a", "", {"CPU": 4.0}, {}), Machine("b", "", {"CPU": 4.0}, {}))
    far = replace(EXECUTORS["ray"], machines=lambda: machines)
    monkeypatch.setattr(executor, "RAY", far)
    with pytest.raises(ConfigError) as raised:
        make_executor(ExecutorConfig(kind="ray", device="cuda"))
    assert str(raised.value) == (
        "'executor.device' is 'cuda', but none of the 2 nodes of the cluster that was joined has a "
        "GPU\n    set executor.device=cpu"
    )


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with two_nodes((2, 2), num_cpus=2, gpu="H100") as address:
        yield address


@pytest.mark.nightly
def test_a_run_is_planned_for_all_that_ray_has(address: str, penstock: Penstock) -> None:
    """This process has no GPU; the nodes that Ray reports do."""
    said = penstock("run", "--dry-run", "executor=ray")
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert lines[1] == "cluster  joined cluster: 2 nodes x 2 h100 = 4 devices"
    assert lines[2].startswith("placement: {actor, reward} on ")
    said = penstock("run", "--dry-run", "executor=ray", "executor.device=cpu")
    assert said.out.splitlines()[1] == "cluster  joined cluster: 2 nodes x 2 cpu = 4 devices"


@pytest.mark.slow
def test_a_plan_for_more_than_ray_has_is_refused(address: str, penstock: Penstock) -> None:
    made = penstock(
        *("plan", "algorithm=grpo", "model=tiny", "cluster=h100", "cluster.devices_per_node=4"),
        *(
            "engine=torch",
            "rollout=same",
            "output=plan.json",
            "workload.prompt=8",
            "workload.response=8",
            "plan.pins.num_devices.actor=4",
        ),
    )
    assert made.code == 0, made.err
    said = penstock("run", "executor=ray", "placement=plan.json")
    host = address.partition(":")[0]
    assert said.code == 2
    assert said.err.endswith(
        "penstock: node 0 of the plan needs 4 GPUs, which no node has\n"
        f"    {host}: 2 GPUs\n"
        f"    {host}: 2 GPUs\n"
        "    start Ray on more or larger nodes, or plan for those that there are: placement=auto\n"
    )
