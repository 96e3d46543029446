"""What is true of the channel in the memory of one GPU alone; the rest is in `test_channels`.

Without a GPU it shares host memory, in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.placement import DeviceGroup
from penstock.planner.resharding.plan_transfer import plan_transfer
from penstock.planner.resharding.sharding import unsharded
from penstock.workers.executors.process_backend import CallFailed
from penstock.workers.weight_sync.channel import ChannelEnd, Offer, Receiver, check_transport
from penstock.workers.weight_sync.packets import (
    Packet,
    WeightsError,
    pack,
    unpack_whole,
)
from penstock.workers.weight_sync.shared_device import CudaMemory, SharedDeviceChannel, open_memory
from torch import Tensor

from ..executors.spawned import SpawnedBackend
from .whole_peer import MODEL_BYTES, RECEIVERS, WholePeer

LAYOUT = unsharded({"a": (40, 30), "b": (7,)}, [0])
PLAN = plan_transfer(LAYOUT, LAYOUT.on([1]), bucket_bytes=4000)
RECEIVER: Receiver = ("rollout", 0)


class Ends:
    """Both ends of a channel in this process, over a store that keeps everything."""

    def __init__(self) -> None:
        self.stored: list[Any] = []
        self.sender, self.receiver = self._end("train"), self._end("rollout")

    def _end(self, group: str) -> SharedDeviceChannel:
        def put(value: Any) -> int:
            self.stored.append(value)
            return len(self.stored) - 1

        def get(refs: Sequence[int], timeout_s: float) -> list[Any]:
            assert timeout_s > 0
            return [self.stored[ref] for ref in refs]

        return SharedDeviceChannel(ChannelEnd(group, 0, 3.0, put, get))

    def pack(self, version: int, device: str = "cpu") -> dict[Receiver, Packet]:
        tensors = {name: tensor.to(device) for name, tensor in weights(version).items()}
        packets = pack(PLAN, 0, tensors, version, room=self.sender.room)
        return {RECEIVER: packets[1]}

    def publish(self, version: int, device: str = "cpu") -> Offer:
        return self.sender.publish(self.pack(version, device))

    def receive(self, offer: Offer, version: int) -> Mapping[str, Tensor]:
        packet = self.receiver.obtain(offer)
        assert packet is not None
        return unpack_whole(PLAN, 1, [packet], version)


def weights(version: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(version)
    return {p.name: torch.randn(p.shape, generator=random) for p in LAYOUT.params}


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.sender.close()
    made.receiver.close()


def is_of(found: Mapping[str, Tensor], version: int) -> bool:
    expected = weights(version)
    return found.keys() == expected.keys() and all(
        torch.equal(found[name].cpu(), expected[name]) for name in expected
    )


def addresses(found: Mapping[str, Tensor]) -> set[int]:
    return {tensor.data_ptr() for tensor in found.values()}


def test_two_pieces_for_each_bucket_carry_all_versions(ends: Ends) -> None:
    """Copies keep the offer that they have until they have the next one."""
    before, seen = ends.publish(0), set[int]()
    for version in range(1, 6):
        now = ends.publish(version)
        found = ends.receive(now, version)
        assert is_of(found, version)
        seen |= addresses(found)
        ends.sender.forget(before.number)
        before = now
    assert len(seen) == 2 * len(LAYOUT.params)  # each is a view of its bucket, never a copy


def test_what_is_packed_for_an_offer_that_is_never_made_is_used_for_the_next(ends: Ends) -> None:
    one = [bucket.ctypes.data for bucket in ends.pack(1)[RECEIVER].buckets]
    ends.publish(2)
    assert [bucket.ctypes.data for bucket in ends.pack(3)[RECEIVER].buckets] == one


def test_pieces_of_another_size_are_not_kept(ends: Ends) -> None:
    offer = ends.publish(1)
    ends.sender.forget(offer.number)
    other = ends.pack(2)[RECEIVER]
    small = replace(other, buckets=(other.buckets[0][:8].copy(),))
    ends.sender.publish({RECEIVER: small})
    assert ends.sender.num_bytes == 8


def test_weights_that_are_forgotten_are_refused_though_they_are_still_there(ends: Ends) -> None:
    offer = ends.publish(1)
    assert is_of(ends.receive(offer, 1), 1)
    ends.sender.forget(offer.number)
    with pytest.raises(WeightsError) as caught:
        ends.receiver.obtain(offer)
    assert str(caught.value) == (
        "the weights of process 0 of group 'train' cannot be read where they are: they are no "
        "longer there"
    )


def test_nobody_reads_what_a_sender_had_that_has_ended(ends: Ends) -> None:
    offer = ends.publish(1)
    assert is_of(ends.receive(offer, 1), 1)
    ends.sender.close()
    with pytest.raises(WeightsError, match="of group 'train' cannot be read where they are: "):
        ends.receiver.obtain(offer)


def test_another_machine_is_named(ends: Ends) -> None:
    offer = ends.publish(1)
    ends.stored[:] = [
        replace(one, machine="elsewhere") if hasattr(one, "machine") else one for one in ends.stored
    ]
    with pytest.raises(WeightsError, match="they are in memory of machine 'elsewhere', and this"):
        ends.receiver.obtain(offer)


def test_a_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(RuntimeError) as caught:
        open_memory(CudaMemory("elsewhere", 8, ()))
    assert str(caught.value).startswith("they lie on GPU elsewhere, and this process sees ")
    assert str(caught.value).endswith("; both must be on one GPU, or executor.transport another")


def group(name: str, device: str = "cuda", *devices: int) -> DeviceGroup:
    return DeviceGroup(name, device=device, devices=devices, tensor_parallel=max(len(devices), 1))


APART = "they are not on one GPU together"


@pytest.mark.parametrize(
    ("sender", "receiver", "why"),
    [
        (group("train", "cpu"), group("rollout", "cpu"), "group 'train' is on 'cpu'"),
        (group("train", "cuda", 0), group("rollout", "cpu"), "group 'rollout' is on 'cpu'"),
        (group("train"), group("rollout"), APART),
        (
            group("train", "cuda", 0),
            group("rollout", "cuda", 1),
            "they are not on one GPU together",
        ),
        (group("train", "cuda", 0, 1), group("rollout", "cuda", 0, 1), APART),
    ],
)
def test_groups_that_are_not_on_one_gpu_are_refused(
    sender: DeviceGroup, receiver: DeviceGroup, why: str
) -> None:
    check_transport("object_store", [(sender, receiver)])
    with pytest.raises(ConfigError) as caught:
        check_transport("cuda_ipc", [(sender, receiver)])
    assert str(caught.value) == (
        "'executor.transport' is 'cuda_ipc', which carries weights from 'train' to 'rollout' in "
        f"the memory of the GPU that both are on, but {why}\n"
        "    put them on one GPU, to take turns there, or leave executor.transport out"
    )


def test_groups_that_take_turns_on_a_gpu_are_not_refused() -> None:
    check_transport("cuda_ipc", [(group("train", "cuda", 3), group("rollout", "cuda", 3))])


# --- on a GPU


@pytest.mark.gpu
def test_weights_stay_on_the_gpu_between_processes_and_take_two_models_there() -> None:
    """Three receivers of two groups read one copy; nothing but numbers is stored."""
    backend = SpawnedBackend()
    try:
        peers = [("train", 0), *((name, at) for name, n in RECEIVERS.items() for at in range(n))]
        started = [
            backend.spawn(
                WholePeer, (*peer, "cuda_ipc", "cuda"), DeviceGroup(peer[0]), peer[1],
                backend.reserve([], 1.0),
            )
            for peer in peers
        ]  # fmt: skip

        def ask(process: Any, method: str, *arguments: Any) -> Any:
            (ref,) = backend.call(process, method, arguments)
            return backend.get([ref], 120.0)[0]

        sender, *receivers = started
        offer = ask(sender, "publish", 0)
        for version in range(1, 5):
            before, offer = offer, ask(sender, "publish", version)
            for receiver in receivers:
                assert ask(receiver, "take", [offer], version)
                assert ask(receiver, "taken") == {"cuda"}
            ask(sender, "forget", before.number)
            assert ask(sender, "shared_bytes") == 2 * MODEL_BYTES
        ask(sender, "forget", offer.number)
        with pytest.raises(CallFailed, match="they are no longer there"):
            ask(receivers[0], "take", [offer], 4)
        offer = ask(sender, "publish", 5)
        backend.kill(sender)
        with pytest.raises(CallFailed, match="cannot be read where they are"):
            ask(receivers[0], "take", [offer], 5)
    finally:
        backend.close()
