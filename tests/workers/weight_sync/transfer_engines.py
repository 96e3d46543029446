"""Engines' tensors for the tests of transfers: filled, empty, compared bit by bit."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from penstock.planner.resharding.sharding import Sharding
from torch import Tensor

from ...planner.transfers import UNWRITTEN, Tensors, logical_values

Engine = Mapping[int, dict[str, Tensor]]
"""Device -> tensor name -> tensor."""

EMPTY = 7.0


def _layout(sharding: Sharding) -> Tensors:
    made = Tensors(sharding)
    made.fill(logical_values(sharding))
    return made


def _encode(numbers: NDArray[np.int64], dtype: str, version: int) -> Tensor:
    """A value for every number; in bfloat16 all bit patterns come up, in float32 all roundings."""
    found = torch.from_numpy(numbers) + 1000 * version
    if dtype == "bfloat16":
        return (found * 257).to(torch.int16).view(torch.bfloat16)
    return (found.to(torch.float64) * 0.7391).sin().to(torch.float32)


def engine(sharding: Sharding, *, version: int = 0) -> Engine:
    """The tensors of every device, holding version `version` of the weights."""
    made: dict[int, dict[str, Tensor]] = {device: {} for device in sharding.devices}
    for (device, name), numbers in _layout(sharding).values.items():
        made[device][name] = _encode(numbers, sharding.dtype, version)
    return made


def empty(sharding: Sharding) -> Engine:
    """The tensors of every device, holding nothing yet."""
    made: dict[int, dict[str, Tensor]] = {device: {} for device in sharding.devices}
    for (device, name), numbers in _layout(sharding).values.items():
        made[device][name] = torch.full(numbers.shape, EMPTY, dtype=getattr(torch, sharding.dtype))
    return made


def bits(tensor: Tensor) -> Tensor:
    """As integers, so that a NaN equals itself and -0 is not 0."""
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def is_same(one: Engine, other: Engine) -> bool:
    """Whether all bits of two engines are equal."""
    return all(
        torch.equal(bits(tensor), bits(other[device][name]))
        for device, tensors in one.items()
        for name, tensor in tensors.items()
    )


def expected(destination: Sharding, source_dtype: str, *, version: int = 0) -> Engine:
    """What the destination must hold: the source's values, rounded; gaps between slices empty."""
    made = empty(destination)
    for (device, name), numbers in _layout(destination).values.items():
        values = _encode(numbers, source_dtype, version).to(getattr(torch, destination.dtype))
        there = torch.from_numpy(numbers != UNWRITTEN)
        filled = torch.where(there, bits(values), bits(made[device][name]))
        made[device][name] = filled.view(values.dtype)
    return made
