"""Which processes can stand in for each other."""

from __future__ import annotations

import pytest
from penstock.dataflow.runtime.placement import DeviceGroup
from penstock.workers.executors.on_ray.backend import RayBackend
from penstock.workers.executors.rank_group import GroupProcesses


def key(group: DeviceGroup, hosted: bytes, *, threads: int = 1) -> object:
    return GroupProcesses(RayBackend(), group, threads, 60.0, hosted).key


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_process_that_shares_no_model_can_take_on_another(num_ranks: int):
    group = DeviceGroup("rollout", num_ranks=num_ranks)
    assert key(group, b"one model") == key(group, b"another")
    assert key(group, b"one model") != key(group, b"one model", threads=2)
    assert key(group, b"one model") != key(DeviceGroup("judges"), b"one model")


def test_processes_that_share_a_model_stay_with_it():
    group = DeviceGroup("rollout", tensor_parallel=2)
    assert key(group, b"one model") == key(group, b"one model")
    assert key(group, b"one model") != key(group, b"another")
