"""Adapters in a network of this engine: beside frozen weights, which several roles may share.

A role with adapters trains them alone. Its frozen weights are those of its model, so a reference
that is the model as it was needs no copy of its own: both take them from here.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....dataflow.runtime.worker_protocol import WorkerContext
from ...models.heads import Head
from ...models.spec import ModelSpec
from ...training.flat_parameters import FlatParameters


class FrozenWeights:
    """A model whose weights nobody changes.

    Args:
        module: The model.
        flat: Its weights.
    """

    def __init__(self, module: nn.Module, flat: FlatParameters) -> None:
        self.module = module
        self.flat = flat
        flat.freeze()

    def shared(self) -> nn.Module:
        """A model of the same weights, not of copies of them, to which modules may be added."""
        kept = [*self.module.parameters(), *self.module.buffers()]
        return copy.deepcopy(self.module, {id(tensor): tensor for tensor in kept})


_SHARED: weakref.WeakValueDictionary[str, FrozenWeights] = weakref.WeakValueDictionary()


def frozen_weights(
    model: ModelSpec,
    context: WorkerContext,
    head: Head,
    fused: Callable[[nn.Module, Head], Sequence[tuple[str, ...]]],
) -> FrozenWeights:
    """A model's frozen weights; those of a language model are loaded once in a process.

    Args:
        model: The model.
        context: Where the worker lives.
        head: What it ends in. A scalar head is a role's own, so nothing is shared then.
        fused: Of a model, the names of parameters to lay side by side.
    """
    key = f"{model!r} on {context.device}"
    found = None if head.is_scalar else _SHARED.get(key)
    if found is None:
        module = head.whole_model(model, context, context.device)
        found = FrozenWeights(module, FlatParameters(module, fused(module, head)))
        model.check_weights({"weights": found.flat.data}, context)
        if not head.is_scalar:
            _SHARED[key] = found
    return found


@dataclass(frozen=True)
class LowRank:
    """An adapter of one linear map: `scale * B A x`.

    Attributes:
        down: A, f32[rank, in].
        up: B, f32[out, rank].
        scale: Alpha over the rank.
    """

    down: Tensor
    up: Tensor
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        """[N, out] of [N, in], in the precision of `x`."""
        narrow = F.linear(x, self.down.to(x.dtype))
        return F.linear(narrow, (self.up * self.scale).to(x.dtype))


Adapters = tuple[LowRank | int, ...]
"""Of linear maps that are computed as one: each one's adapter, or how wide it is without."""


def _low_rank(linear: Any) -> LowRank | None:
    if not hasattr(linear, "lora_A"):
        return None
    (name,) = linear.lora_A
    return LowRank(linear.lora_A[name].weight, linear.lora_B[name].weight, linear.scaling[name])


def adapters_of(linears: Sequence[Any]) -> Adapters | None:
    """Adapters of linear maps that are computed as one; None if none of them has any."""
    found = [_low_rank(linear) for linear in linears]
    if all(adapter is None for adapter in found):
        return None
    return tuple(
        linear.out_features if adapter is None else adapter
        for linear, adapter in zip(linears, found, strict=True)
    )


def added(x: Tensor, adapters: Adapters) -> Tensor:
    """What adapters of maps computed as one add to their outputs, [N, all outs]."""
    parts = [a(x) if isinstance(a, LowRank) else x.new_zeros(len(x), a) for a in adapters]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
