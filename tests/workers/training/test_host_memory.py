"""What is sent to a device is known on the host, and found there what is found on the CPU."""

from __future__ import annotations

import gc

import pytest
import torch
from penstock.workers.training import host_memory
from penstock.workers.training.host_memory import derived, masked, on_host, sent, spread
from torch import Tensor

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
