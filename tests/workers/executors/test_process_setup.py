"""Threads are set for all that compute, whatever the environment says."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from penstock.dataflow.runtime.placement import DeviceGroup
from penstock.workers.executors import rank_process
from penstock.workers.executors.rank_process import RankProcess

_SCRIPT = """
import numpy, torch
from threadpoolctl import threadpool_info
from penstock.workers.executors.process_setup import threads_within, use_threads

def found():
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}

print(*found(), torch.get_num_threads())
for num_threads in (1, None):
    with threads_within(num_threads):
        print(*found(), torch.get_num_threads())
    print(*found(), torch.get_num_threads())
use_threads(1)
print(*found(), torch.get_num_threads())
"""


@pytest.mark.slow
def test_numpy_and_torch_have_as_many_threads_as_they_are_given() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == ["2 2", "1 1", "2 2", "2 2", "2 2", "1 1"], done.stderr


_GROUPS = """
import torch, torch.distributed as dist
from penstock.workers.executors.process_setup import bound_groups

default = dist.distributed_c10d._get_default_timeout
for deadline_s in (60.0, 12000.0):
    bound_groups(deadline_s)
    print(default("gloo"), default("nccl") >= default("gloo"))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(dist.new_group([0])._get_backend(torch.device("cpu")).options._timeout)
"""


@pytest.mark.slow
def test_groups_that_libraries_make_wait_as_long_as_a_call_may_take() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _GROUPS], capture_output=True, text=True, timeout=60
    )
    expected = ["0:30:00 False", "3:20:00 True", "3:20:00"]
    assert done.stdout.splitlines() == expected, done.stderr


@pytest.mark.parametrize(
    ("device", "said"), [("cpu", ("gloo", None)), ("cuda", ("nccl", torch.device("cuda:0")))]
)
def test_nccl_need_not_guess_its_device(
    device: str, said: tuple[str, torch.device | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[str, torch.device | None]] = []

    def init(backend: str, *, device_id: torch.device | None, **others: object) -> None:
        found.append((backend, device_id))

    monkeypatch.setattr(rank_process, "meet", lambda *given: None)  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(rank_process, "bound_groups", lambda *given: None)  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(torch.distributed, "init_process_group", init)
    process = RankProcess.__new__(RankProcess)
    limits = {"_deadline_s": 1.0, "_start_s": 1.0}
    group, home = DeviceGroup("train", 2, device), SimpleNamespace(host="here")
    vars(process).update(_listener=None, _home=home, _group=group, _process=1, **limits)
    process.join(("here", 1))
    assert found == [said]
