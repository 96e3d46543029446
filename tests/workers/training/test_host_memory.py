"""What is sent to a device is known on the host, and found there what is found on the CPU."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from penstock.workers.training import host_memory
from penstock.workers.training.host_memory import (
    HostRoom,
    copy_in,
    derived,
    masked,
    on_host,
    sent,
    spread,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")


@pytest.mark.slow
def test_what_was_sent_is_known_as_long_as_it_lives() -> None:
    before = len(host_memory._HOST)  # pyright: ignore[reportPrivateUsage]
    tensor = torch.arange(3)
    there = sent(tensor, META)
    assert there.device == META
    assert on_host(there) is tensor
    assert sent(tensor, torch.device("cpu")) is tensor
    assert on_host(tensor) is tensor
    del there
    gc.collect()
    assert len(host_memory._HOST) == before  # pyright: ignore[reportPrivateUsage]


def test_what_is_derived_from_it_is_known_too() -> None:
    mask = torch.tensor([[False, True, True]])

    def first(mask: Tensor) -> Tensor:
        return mask.long().argmax(1)

    assert torch.equal(on_host(derived(sent(mask, META), first)), torch.tensor([1]))
    assert torch.equal(derived(mask, first), torch.tensor([1]))
    tokens = torch.tensor([[4, 5, 6]])
    picked = masked(sent(tokens, META), sent(mask, META))
    assert torch.equal(on_host(picked), torch.tensor([5, 6]))


def test_by_places_is_as_by_mask() -> None:
    """What runs on devices, run on the CPU: the same numbers and gradients."""
    random = torch.Generator().manual_seed(0)
    mask = torch.rand(3, 4, generator=random) < 0.5
    x = torch.randn(3, 4, 2, generator=random, requires_grad=True)
    places = host_memory._places(mask)  # pyright: ignore[reportPrivateUsage]
    picked = x.flatten(0, 1).index_select(0, places)
    assert torch.equal(picked, masked(x, mask))
    zero = torch.zeros(3, 4, 2)
    back = zero.flatten(0, 1).index_copy(0, places, picked).view(zero.shape)
    assert torch.equal(back, spread(masked(x, mask), mask, zero))
    assert torch.equal(back, x * mask[..., None])


class Late(TorchDispatchMode):
    """Copies that do not wait are carried out when what was marked after them is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Tensor, Tensor]] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[2:] == (True,):
            self.asked.append(args[:2])
            self.most = max(self.most, len(self.asked))
            return args[0]
        return func(*args, **(kwargs or {}))

    def mark(self) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: self._carry_out(*self.asked.pop(0)))

    def _carry_out(self, place: Tensor, data: Tensor) -> None:
        place.copy_(data)


def test_what_comes_to_a_device_goes_through_two_pieces_in_turns() -> None:
    """None of which is filled before what was sent out of it has arrived."""
    random = torch.Generator().manual_seed(0)
    shapes = ((7, 11), (3,), (90,), (0, 4), ())
    given = [torch.randn(shape, generator=random).bfloat16() for shape in shapes]
    given.append(torch.randn(6, 5, generator=random).bfloat16().t())  # in its own order
    places = [torch.zeros_like(one, memory_format=torch.contiguous_format) for one in given]
    places.append(torch.zeros(9))
    given.append(torch.arange(9).bfloat16())  # of another precision
    room, late = HostRoom(64, pinned=False), Late()
    with late:
        copy_in(zip(places, given, strict=True), device="cpu", room=room, mark=late.mark)
    assert all(
        torch.equal(place, one.to(place.dtype)) for place, one in zip(places, given, strict=True)
    )
    assert (late.most, room.num_bytes, len(room.take(128))) == (2, 128, 2)


@pytest.mark.gpu
def test_weights_come_to_a_gpu_as_they_were() -> None:
    given = [torch.randn(size, 1 << 10).bfloat16() for size in (1 << 16, 3, 1 << 15)]
    places = [torch.zeros_like(one, device="cuda") for one in given]
    copy_in(zip(places, given, strict=True))
    assert all(torch.equal(place.cpu(), one) for place, one in zip(places, given, strict=True))


@pytest.mark.gpu
def test_what_is_sent_is_pinned_in_memory_that_was_pinned_before() -> None:
    """A micro-batch sends a dozen tensors, each through pinned memory of its own, which is kept."""
    tensors, device = [torch.arange(9 * size) for size in range(1, 13)], torch.device("cuda")

    def send() -> int:
        there = [sent(tensor, device) for tensor in tensors]
        torch.cuda.synchronize()
        assert all(
            torch.equal(one.cpu(), tensor) for one, tensor in zip(there, tensors, strict=True)
        )
        return torch.cuda.host_memory_stats()["num_host_alloc"]

    send()
    assert len({send() for _ in range(20)}) == 1
