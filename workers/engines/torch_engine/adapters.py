"""Adapters of linear maps (Hu et al. 2021, "LoRA"), computed beside the frozen map they add to.

Adapters are trained in float32. Where the model has 16 bits on a CUDA device, two products of 16
bits for all maps that are computed as one add to their output in place: of all A below each other,
and of all B as the blocks of a matrix that is else zero. `AdapterCopies` renews those matrices.

Shapes: N tokens, r rank of an adapter, R of all adapters of maps that are computed as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...training.flat_parameters import FlatParameters


@dataclass(frozen=True)
class LowRank:
    """An adapter of one linear map: `scale * B A x`."""

    down: Tensor  # A, f32[r, in]
    up: Tensor  # B, f32[out, r]
    scale: float  # Alpha over the rank
    drop: Callable[[Tensor], Tensor] = nn.Identity()  # The dropout of x

    def __call__(self, x: Tensor) -> Tensor:
        """[N, out] of [N, in], in the precision of `x`."""
        narrow = F.linear(self.drop(x), self.down.to(x.dtype))
        return F.linear(narrow, (self.up * self.scale).to(x.dtype))


@dataclass
class Adapters:
    """Adapters of linear maps that are computed as one."""

    parts: tuple[LowRank | int, ...]  # Or the width of a map without one
    joined: tuple[Tensor, Tensor] | None = None  # [R, in] and [all outs, R], in 16 bits

    def blocks(self, down: Tensor, up: Tensor) -> list[tuple[LowRank, Tensor, Tensor]]:
        """Each adapter with the parts of joined matrices that are its own."""
        found: list[tuple[LowRank, Tensor, Tensor]] = []
        out = rank = 0
        for one in self.parts:
            if isinstance(one, int):
                out += one
                continue
            outs, ranks = slice(out, out + len(one.up)), slice(rank, rank + len(one.down))
            found.append((one, down[ranks], up[outs, ranks]))
            out, rank = outs.stop, ranks.stop
        return found

    def added(self, x: Tensor) -> Tensor:
        """Outputs that they add to those of the maps, [N, all outs]."""
        parts = [a(x) if isinstance(a, LowRank) else x.new_zeros(len(x), a) for a in self.parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def joined_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`F.linear` of a frozen weight and what joined adapters add to it, [N, all outs]."""
        own = [one for one in self.parts if isinstance(one, LowRank)]
        leaves = [leaf for one in own for leaf in (one.down, one.up)]
        out: Tensor = _JoinedLinear.apply(x, weight, bias, self, *leaves)  # type: ignore[assignment]
        return out


def adapters_of(linears: Sequence[Any]) -> Adapters | None:
    """Adapters of linear maps that are computed as one; None if none of them has any."""
    found: list[LowRank | int] = []
    for linear in linears:
        if not hasattr(linear, "lora_A"):
            found.append(linear.out_features)
            continue
        (name,) = linear.lora_A
        down, up = linear.lora_A[name].weight, linear.lora_B[name].weight
        found.append(LowRank(down, up, linear.scaling[name], linear.lora_dropout[name]))
    has = any(isinstance(one, LowRank) for one in found)
    return Adapters(tuple(found)) if has else None


class AdapterCopies:
    """Joined matrices of 16 bits of all adapters of a model, which lie in one buffer."""

    devices = frozenset({"cuda"})
    """Where there are any; nowhere, for a comparison."""

    def __init__(
        self, flat: FlatParameters, adapters: Sequence[Adapters], dtype: torch.dtype
    ) -> None:
        self._flat, self._adapters, self._dtype = flat, adapters, dtype
        self._copy: Tensor | None = None
        self._data: Tensor | None = None
        self._from: list[Tensor] = []
        self._to: list[Tensor] = []

    def renew(self) -> None:
        """Copy what the adapters are now, in few passes over all of them."""
        data = self._flat.data
        if data.device.type not in AdapterCopies.devices or self._flat.borrowed:
            self._data = None
            for each in self._adapters:
                each.joined = None
            return
        if self._data is not data:
            self._join(data)
        assert self._copy is not None
        self._copy.copy_(data)
        copy_each: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        copy_each(self._to, self._from)

    def _join(self, data: Tensor) -> None:
        self._data, self._copy = data, torch.empty_like(data, dtype=self._dtype)
        self._from, self._to = [], []
        for each in self._adapters:
            own = [one for one in each.parts if isinstance(one, LowRank)]
            outs = sum(one if isinstance(one, int) else len(one.up) for one in each.parts)
            rank = sum(len(one.down) for one in own)
            down = self._copy.new_empty(rank, own[0].down.shape[1])
            each.joined = down, self._copy.new_zeros(outs, rank)
            for one, *blocks in each.blocks(*each.joined):
                self._to += blocks
                for leaf in (one.down, one.up):
                    begin = leaf.storage_offset() - data.storage_offset()
                    self._from.append(self._copy[begin : begin + leaf.numel()].view(leaf.shape))


class _JoinedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, given: Adapters, *leaves: Tensor
    ) -> Tensor:
        assert given.joined is not None
        down, up = given.joined
        (ctx.scale,) = {one.scale for one in given.parts if isinstance(one, LowRank)}
        narrow = x @ down.t()
        ctx.save_for_backward(x, weight, narrow)
        ctx.given, ctx.joined = given, given.joined
        return F.linear(x, weight, bias).addmm_(narrow, up.t(), alpha=ctx.scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, narrow = ctx.saved_tensors
        down, up = ctx.joined
        to_narrow, to_x = grads[0] @ up, None
        if ctx.needs_input_grad[0]:
            to_x = (grads[0] @ weight).addmm_(to_narrow, down, alpha=ctx.scale)
        found = ctx.given.blocks(to_narrow.t() @ x, grads[0].t() @ narrow)
        to_leaves = [part.float().mul_(ctx.scale) for _, *own in found for part in own]
        return to_x, None, None, None, *to_leaves
