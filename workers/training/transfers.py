"""From the host to a device without waiting for it, and what the device holds known on the host.

A plain `tensor.to("cuda")` waits until the device has done all that it was given before, and so do
`tensor.cpu()`, `x[mask]` and `bool(x)`. What decides where tokens lie comes from the host anyway:
`sent` remembers it, so that indices are made there and go one way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_HOST: Any = WeakTensorKeyDictionary()
"""A tensor that was sent -> what it was made from, as long as it lives."""


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; the same one if it is there. Neither may be written to afterwards."""
    if tensor.device == device:
        return tensor
    if tensor.device.type != "cpu":
        return tensor.to(device)
    source = tensor.pin_memory() if device.type == "cuda" else tensor
    there = source.to(device, non_blocking=True)
    _HOST[there] = tensor
    return there


def on_host(tensor: Tensor) -> Tensor:
    """A tensor in host memory: itself, what it was sent from, or else a copy that is waited for."""
    if tensor.device.type == "cpu":
        return tensor
    known: Tensor | None = _HOST.get(tensor)
    return tensor.cpu() if known is None else known


def derived(tensor: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """`compute(tensor)`, made on the host if the tensor was sent from there, and known there then.

    Args:
        tensor: On any device.
        compute: The same function of it wherever it lies.
    """
    if tensor.device.type == "cpu" or tensor not in _HOST:
        return compute(tensor)
    return sent(compute(_HOST[tensor]), tensor.device)


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """`x[mask]`, differentiable, and known on the host if `x` and `mask` are."""
    if mask.device.type == "cpu":
        return x[mask]
    if x in _HOST:
        return sent(_HOST[x][on_host(mask)], x.device)
    return x.flatten(0, 1).index_select(0, _places(mask))


def spread(values: Tensor, mask: Tensor, zero: Tensor) -> Tensor:
    """`zero` with values where `mask` is True, in their order, differentiable."""
    if mask.device.type == "cpu":
        more = [1] * (values.ndim - 1)
        return zero.masked_scatter(mask.view(*mask.shape, *more), values)
    flat = zero.flatten(0, mask.ndim - 1)
    return flat.index_copy(0, _places(mask), values).view(zero.shape)


def _places(mask: Tensor) -> Tensor:
    """i64[n]: where a mask, read row by row, is True."""
    return sent(torch.nonzero(on_host(mask).flatten())[:, 0], mask.device)
