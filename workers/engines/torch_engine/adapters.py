"""Adapters of linear maps (Hu et al. 2021, "LoRA"), computed beside the frozen map they add to.

Adapters are trained in float32. Where the model has 16 bits on a CUDA device, products read a copy
of 16 bits of all of them, which `Copies` renews, and add to the map's output in place.

Shapes: N tokens, r rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...training.flat_parameters import FlatParameters


@dataclass
class LowRank:
    """An adapter of one linear map: `scale * B A x`."""

    down: Tensor  # A, f32[r, in]
    up: Tensor  # B, f32[out, r]
    scale: float  # Alpha over the rank
    copies: tuple[Tensor, Tensor] | None = None  # Of both, in the precision of the map

    def __call__(self, x: Tensor) -> Tensor:
        """[N, out] of [N, in], in the precision of `x`."""
        narrow = F.linear(x, self.down.to(x.dtype))
        return F.linear(narrow, (self.up * self.scale).to(x.dtype))


Adapters = tuple[LowRank | int, ...]
"""Adapters of linear maps that are computed as one, or the width of a map without one."""


def adapters_of(linears: Sequence[Any]) -> Adapters | None:
    """Adapters of linear maps that are computed as one; None if none of them has any."""
    found: list[LowRank | int] = []
    for linear in linears:
        if not hasattr(linear, "lora_A"):
            found.append(linear.out_features)
            continue
        (name,) = linear.lora_A
        up = linear.lora_B[name].weight
        found.append(LowRank(linear.lora_A[name].weight, up, linear.scaling[name]))
    return tuple(found) if any(isinstance(one, LowRank) for one in found) else None


class Copies:
    """Copies of 16 bits of adapters that lie in one buffer.

    Args:
        flat: Where they lie.
        adapters: Of the whole model.
        dtype: Of the copies.
    """

    devices = frozenset({"cuda"})
    """Where there are any; nowhere, for a comparison."""

    def __init__(
        self, flat: FlatParameters, adapters: Iterable[Adapters | None], dtype: torch.dtype
    ) -> None:
        self._flat, self._dtype = flat, dtype
        every = [one for each in adapters for one in each or ()]
        self._adapters = [one for one in every if isinstance(one, LowRank)]
        self._copy: Tensor | None = None
        self._of: Tensor | None = None

    def renew(self) -> None:
        """Copy what the adapters are now, in one pass over all of them."""
        data = self._flat.data
        has = data.device.type in Copies.devices and not self._flat.borrowed
        if not has or self._copy is None or self._of is not data:
            self._copy = torch.empty_like(data, dtype=self._dtype) if has else None
            self._of = data
            for one in self._adapters:
                one.copies = None if self._copy is None else (self._at(one.down), self._at(one.up))
        if self._copy is not None:
            self._copy.copy_(data)

    def _at(self, leaf: Tensor) -> Tensor:
        assert self._copy is not None
        begin = leaf.storage_offset() - self._flat.data.storage_offset()
        return self._copy[begin : begin + leaf.numel()].view(leaf.shape)


def added(x: Tensor, adapters: Adapters) -> Tensor:
    """Outputs that adapters of maps computed as one add to theirs, [N, all outs]."""
    parts = [a(x) if isinstance(a, LowRank) else x.new_zeros(len(x), a) for a in adapters]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def have_copies(adapters: Adapters) -> bool:
    return all(isinstance(one, int) or one.copies is not None for one in adapters)


def adapted_linear(x: Tensor, weight: Tensor, bias: Tensor | None, adapters: Adapters) -> Tensor:
    """`F.linear` of a frozen weight, and what adapters with copies add to it: [N, all outs]."""
    own = [one for one in adapters if isinstance(one, LowRank)]
    leaves = [leaf for one in own for leaf in (one.down, one.up)]
    out: Tensor = _AdaptedLinear.apply(x, weight, bias, adapters, *leaves)  # type: ignore[assignment]
    return out


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        adapters: Adapters,
        *leaves: Tensor,
    ) -> Tensor:
        out = F.linear(x, weight, bias)
        narrows: list[Tensor] = []
        begin, ctx.parts = 0, []
        for one in adapters:
            if isinstance(one, int):
                begin += one
                continue
            assert one.copies is not None
            down, up = one.copies
            narrows.append(x @ down.t())
            out[:, begin : begin + len(up)].addmm_(narrows[-1], up.t(), alpha=one.scale)
            ctx.parts.append((slice(begin, begin + len(up)), down, up, one.scale))
            begin += len(up)
        ctx.save_for_backward(x, weight, *narrows)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *narrows = ctx.saved_tensors
        to_x = grads[0] @ weight if ctx.needs_input_grad[0] else None
        to_leaves: list[Tensor] = []
        for (part, down, up, scale), narrow in zip(ctx.parts, narrows, strict=True):
            upstream = grads[0][:, part]
            to_narrow = upstream @ up
            if to_x is not None:
                to_x.addmm_(to_narrow, down, alpha=scale)
            for found in (to_narrow.t() @ x, upstream.t() @ narrow):
                to_leaves.append(found.float().mul_(scale))
        return to_x, None, None, None, *to_leaves
