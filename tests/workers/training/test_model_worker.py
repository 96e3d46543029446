"""A trainer whose device memory was away is the trainer it was."""

from __future__ import annotations

import pytest
import torch
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.dataflow.runtime.call_context import call_scope
from penstock.workers.engines.roles import PolicyWorker
from penstock.workers.training.host_memory import HostCopy
from penstock.workers.training.optimizer import OptimizerSpec
from torch_models import make_batch, make_policy

OPTIMIZER = OptimizerSpec(lr=1e-3)


def train(policy: PolicyWorker, step: int) -> None:
    with call_scope(step, 0):
        policy.train(ClippedPolicyLoss(), make_batch(make_policy()), num_minibatches=2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_goes_on_bit_for_bit_where_memory_was_taken_away(dtype: str) -> None:
    expected, policy = (make_policy(optimizer=OPTIMIZER, dtype=dtype) for _ in range(2))
    for step in range(2):
        train(expected, step)
    train(policy, 0)
    states = 2 if dtype == "float32" else 3
    tensors = policy.device_tensors()
    assert len(tensors) == 2 + states
    kept = HostCopy(tensors, device="cpu")
    assert kept.num_bytes == sum(tensor.nbytes for tensor in tensors)
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    kept.restore()
    train(policy, 1)
    assert policy.weights_sha256() == expected.weights_sha256()


def test_memory_that_tensors_share_is_moved_once() -> None:
    whole = torch.arange(8.0)
    kept = HostCopy([whole, whole[2:4]], device="cpu")
    assert kept.num_bytes == 32
    kept.restore()
    assert whole.tolist() == list(range(8))


def test_host_memory_stays_where_it_is() -> None:
    policy = make_policy(optimizer=OPTIMIZER)
    before = policy.weights_sha256()
    policy.sleep()
    policy.sleep()
    assert policy.weights_sha256() == before
    policy.wake()
    policy.wake()


@pytest.mark.gpu
def test_a_gpu_is_free_while_its_tensors_are_away() -> None:
    tensor = torch.randn(1 << 20, device="cuda")
    before, there = tensor.cpu(), torch.cuda.memory_allocated()
    kept = HostCopy([tensor])
    assert torch.cuda.memory_allocated() <= there - tensor.nbytes
    kept.restore()
    assert torch.equal(tensor.cpu(), before)
