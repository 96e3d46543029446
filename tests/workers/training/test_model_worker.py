"""A trainer whose device memory was away is the trainer it was."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.dataflow.errors import WorkerError
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.roles import PolicyWorker
from penstock.workers.training import model_worker
from penstock.workers.training.host_memory import HostCopy, HostRoom
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


def test_pieces_of_host_memory_are_made_once_and_used_again() -> None:
    """They are as large as what has slept at the same time, whatever its tensors' sizes."""
    room = HostRoom(100, pinned=False)
    tensors = [torch.randn(size) for size in (7, 1, 60, 3)]
    expected = [tensor.clone() for tensor in tensors]
    made: set[int] = set()
    for _ in range(3):
        first = HostCopy(tensors[:2], device="cpu", room=room)
        second = HostCopy(tensors[2:], device="cpu", room=room)
        assert (first.num_copied_bytes, second.num_copied_bytes) == (32, 252)
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        first.restore()
        second.restore()
        assert all(map(torch.equal, tensors, expected))
        assert room.num_bytes == 100 + 300
        pieces = room.take(400)
        made |= {piece.data_ptr() for piece in pieces}
        room.give_back(pieces)
    assert len(made) == 4


def test_room_is_made_ahead_once_for_all_that_will_sleep() -> None:
    room = HostRoom(100, pinned=False)
    pieces = room.take(250)
    for thread in (room.make_ahead(301), room.make_ahead(100)):
        thread.join()
    assert room.num_bytes == 300 + 400 + 100
    room.give_back(pieces)
    assert len(room.take(800)) == 8
    assert room.num_bytes == 800


@pytest.mark.parametrize(
    ("gib", "free_gib", "said"),
    [(122, 128, "122 GiB of pinned memory of the host, which has 128 GiB (128 GiB free)"),
     (24, 20, "24.0 GiB of pinned memory of the host, which has 128 GiB (20.0 GiB free)")],
)  # fmt: skip
def test_more_than_the_host_can_pin_is_refused_before_it_is_tried(
    gib: int, free_gib: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 7B in bfloat16 with its moments and master copy; and a host that others fill."""
    memory = SimpleNamespace(total=128 << 30, available=free_gib << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    room = HostRoom()
    for ask in (room.take, room.make_ahead):
        with pytest.raises(WorkerError) as refused:
            ask(gib << 30)
        assert str(refused.value) == (
            f"what sleeps in this process needs {said}\n    at most 80 % of it may be pinned, and "
            "what is free\n    place training and generation on devices of their own, divide the "
            "model among more processes, or train adapters (model.lora.rank)"
        )
    assert room.num_bytes == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_first_sleep_makes_room_for_what_the_first_step_will_make(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, ahead = make_policy(optimizer=OPTIMIZER, dtype=dtype), list[int]()
    monkeypatch.setattr(model_worker, "pin_ahead", ahead.append)
    policy.device = torch.device("cuda")  # where nothing of it lies
    for _ in range(2):
        policy.sleep()
        policy.wake()
    policy.device = torch.device("cpu")
    train(policy, 0)
    states = policy._trainer.optimizer.buffers if policy._trainer else []  # pyright: ignore[reportPrivateUsage] - what is inside
    assert ahead == [sum(tensor.nbytes for tensor in states)]


def test_what_is_void_is_freed_and_not_copied() -> None:
    weights, gradient = torch.arange(6.0), torch.arange(6.0)
    kept = HostCopy([weights, gradient], device="cpu", void=[gradient])
    assert (kept.num_bytes, kept.num_copied_bytes) == (48, 24)
    assert gradient.untyped_storage().nbytes() == 0
    kept.restore()
    assert weights.tolist() == list(range(6))
    assert len(gradient.fill_(1.0)) == 6


def _sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that workers copy, as they go to sleep from now on."""
    sizes: list[int] = []

    class Counted(HostCopy):
        def __init__(self, tensors: Iterable[torch.Tensor], device: str, **options: Any) -> None:
            super().__init__(tensors, device, **options)
            sizes.append(self.num_copied_bytes)

    monkeypatch.setattr(model_worker, "HostCopy", Counted)
    return sizes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_is_kept_only_while_pieces_of_a_batch_wait_in_it(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = _sizes(monkeypatch)
    expected, policy = (
        make_policy(optimizer=OPTIMIZER, dtype=dtype, offload=offload) for offload in (False, True)
    )
    train(expected, 0)
    train(policy, 0)
    policy.sleep()
    policy.wake()
    gradients = policy._network.gradients()  # pyright: ignore[reportPrivateUsage] - what is inside
    held = sum(tensor.nbytes for tensor in policy.device_tensors())
    assert sum(sizes) == held - sum(tensor.nbytes for tensor in gradients)
    sizes.clear()
    for tensor in gradients:
        tensor.fill_(torch.nan)  # as it may be then
    batch = make_batch(make_policy())
    for piece in ("first", "last"):
        for worker in (expected, policy):
            with call_scope(1, 0, 0, piece):
                worker.train(ClippedPolicyLoss(), batch)
        if piece == "first":
            policy.sleep()
            policy.wake()
    assert sum(sizes) == held
    assert policy.weights_sha256() == expected.weights_sha256()


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
    tensors = [torch.randn(size, device="cuda") for size in (1 << 20, 3, 5 << 20)]
    before, there = [tensor.cpu() for tensor in tensors], torch.cuda.memory_allocated()
    room = HostRoom(1 << 22)
    for _ in range(2):
        kept = HostCopy(tensors, void=tensors[1:2], room=room)
        assert torch.cuda.memory_allocated() <= there - sum(tensor.nbytes for tensor in tensors)
        kept.restore()
        assert torch.equal(tensors[0].cpu(), before[0])
        assert torch.equal(tensors[2].cpu(), before[2])
        assert torch.cuda.memory_allocated() <= there + 1024
    assert room.num_bytes == 6 << 22
    assert all(piece.is_pinned() for piece in room.take(6 << 22))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trainer_on_a_gpu_leaves_next_to_nothing_there_and_comes_back_bit_for_bit(
    dtype: str,
) -> None:
    context = WorkerContext("actor", seed=7, device="cuda")
    policy = make_policy(optimizer=OPTIMIZER, dtype=dtype, context=context)
    for step in range(2):
        train(policy, step)
        gradients = {tensor.data_ptr() for tensor in policy._network.gradients()}  # pyright: ignore[reportPrivateUsage] - what is inside
        kept = [tensor for tensor in policy.device_tensors() if tensor.data_ptr() not in gradients]
        before, held = [tensor.cpu() for tensor in kept], torch.cuda.memory_allocated()
        moved = sum(tensor.nbytes for tensor in policy.device_tensors())
        policy.sleep()
        assert torch.cuda.memory_allocated() <= held - moved + (1 << 16)
        policy.wake()
        assert all(torch.equal(now.cpu(), old) for now, old in zip(kept, before, strict=True))
