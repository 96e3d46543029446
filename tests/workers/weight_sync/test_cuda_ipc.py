from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from penstock.planner.inputs.layout import Layout
from penstock.planner.resharding.plan_transfer import plan_transfer
from penstock.planner.resharding.sharding import shard
from penstock.workers.weight_sync.cuda_ipc import CudaShare, open_cuda, share_cuda
from penstock.workers.weight_sync.p2p import Ends, execute
from penstock.workers.weight_sync.version_tracker import WeightsError

from ...planner.transfers import TINY
from .transfer_engines import empty, engine, is_same

OPENER = """
import json, sys, torch
from penstock.workers.weight_sync.cuda_ipc import CudaShare, open_cuda
shares = {name: CudaShare(**fields) for name, fields in json.loads(sys.stdin.readline()).items()}
opened = open_cuda(shares)
for tensor in opened.values():
    tensor.mul_(2)
torch.cuda.synchronize()
print(json.dumps({name: tensor.double().sum().item() for name, tensor in opened.items()}))
"""


@pytest.mark.gpu
def test_another_process_sees_and_changes_the_same_memory():
    tensors = {
        "whole": torch.arange(12.0, device="cuda").view(3, 4),
        "part": torch.arange(20.0, device="cuda")[5:15:2].to(torch.bfloat16),
        "strided": torch.arange(12.0, device="cuda").view(3, 4).T[1:],
    }
    before = {name: tensor.double().sum().item() for name, tensor in tensors.items()}
    text = json.dumps({name: asdict(share) for name, share in share_cuda(tensors).items()})
    done = subprocess.run(
        [sys.executable, "-c", OPENER], input=text, capture_output=True, text=True, timeout=120,
        check=False, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    doubled = {name: 2 * total for name, total in before.items()}
    assert json.loads(done.stdout) == doubled
    assert {name: tensor.double().sum().item() for name, tensor in tensors.items()} == doubled


@pytest.mark.gpu
def test_a_plan_is_carried_out_on_a_gpu():
    source, destination = shard(TINY, Layout(tp=2), [0, 1]), shard(TINY, Layout(dp=2), [0, 1])
    plan = plan_transfer(source, destination)
    on_cpu, on_gpu = engine(source), empty(destination)
    here = {
        device: Ends(
            {name: tensor.cuda() for name, tensor in on_cpu[device].items()},
            {name: tensor.cuda() for name, tensor in on_gpu[device].items()},
        )
        for device in (0, 1)
    }
    execute(plan, here, {0: 0, 1: 0}, version=1, deadline_s=60)
    reference = {d: Ends(on_cpu[d], empty(destination)[d]) for d in (0, 1)}
    execute(plan, reference, {0: 0, 1: 0}, version=1, deadline_s=60)
    found = {d: {n: t.cpu() for n, t in here[d].destination.items()} for d in here}
    assert is_same(found, {d: dict(reference[d].destination) for d in reference})


def test_only_what_lies_on_a_gpu_can_be_shared():
    with pytest.raises(WeightsError) as caught:
        share_cuda({"w": torch.zeros(2, 3)})
    assert str(caught.value) == (
        "tensor 'w' [2, 3] is on cpu; only tensors on a CUDA device that are not empty can be "
        "opened by another process there"
    )


def test_a_gpu_that_is_not_there_is_named():
    share = CudaShare("elsewhere", "float32", (1,), (1,), 0, "", 4, 0, "", 0, "", False)
    with pytest.raises(WeightsError, match="tensor 'w' lies on GPU elsewhere; this process sees"):
        open_cuda({"w": share})
