"""On a real Ray of two nodes with eight GPUs each, and a head without one."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import ray
from penstock.configs.schema import ExecutorConfig
from penstock.dataflow.errors import PlanError
from penstock.dataflow.runtime.placement import DeviceGroup
from penstock.launch.placement.place import make_executor
from penstock.workers.executors.on_ray.backend import RayBackend
from ray.util.placement_group import placement_group_table

from .two_nodes import two_nodes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with two_nodes((0, 8, 8), num_cpus=8) as address:
        yield address


def held() -> list[set[str]]:
    """The nodes of each placement group that is there."""
    return [
        set(one["bundles_to_node_id"].values())
        for one in placement_group_table().values()
        if one["state"] != "REMOVED"
    ]


def test_what_shares_matrices_is_on_one_node_and_no_run_holds_half(address: str) -> None:
    """The plan says of neither group on which node it is."""
    first = DeviceGroup("first", 1, "cuda", tensor_parallel=8)
    later = DeviceGroup("later", 2, "cuda", tensor_parallel=8)
    devices = RayBackend().reserve([first], 120.0, {"first"})
    try:
        (nodes,) = held()
        assert len(nodes) == 1
        assert ray.get_runtime_context().get_node_id() not in nodes, "the head has no GPU"
        with pytest.raises(PlanError) as raised:
            RayBackend().reserve([later], 1.0)
        said = str(raised.value).splitlines()
        host = address.partition(":")[0]
        assert said[0] == "rank 1 of 'later' needs 8 GPUs, which no node has free"
        assert said[1:4] == [f"    {host}: 0 GPUs free"] * 3
        assert held() == [nodes], "of the sixteen that it needs it has none"
    finally:
        devices.release("first")
    end_s = time.monotonic() + 20
    while held() and time.monotonic() < end_s:
        time.sleep(0.05)
    assert held() == []


def test_a_head_without_a_gpu_starts_a_run_on_the_others(address: str) -> None:
    del address
    make_executor(ExecutorConfig(kind="ray", device="cuda"))
