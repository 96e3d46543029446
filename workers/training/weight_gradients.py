"""Gradients of weights of 16 bits, added to their float32 buffer by the product that gives them.

Then no gradient of 16 bits exists, and a sum over micro-batches is not rounded on its way. Leaves
that say where theirs goes are those of `FlatParameters` on devices other than CPUs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_ATEN: Any = torch.ops.aten


ADDED_ON = frozenset({"cuda"})
"""Devices on which gradients are added where they are made, not by autograd; none, to compare."""


def total_of(leaf: Tensor | None) -> Tensor | None:
    """The float32 tensor of a leaf's shape that its gradient is to be added to, if any."""
    if leaf is None or leaf.device.type not in ADDED_ON:
        return None
    return getattr(leaf, "gradient", None)


def set_total(leaf: Tensor, total: Tensor | None) -> None:
    """Have the gradient of a leaf, or of a part of one, be added to a tensor."""
    any_leaf: Any = leaf
    any_leaf.gradient = total


def product_gradient(total: Tensor | None, upstream: Tensor, x: Tensor) -> Tensor | None:
    """`upstream^T x`; None if it was added to a total."""
    if total is None:
        return upstream.t() @ x
    add_product(total, upstream.t(), x)
    return None


def sum_gradient(total: Tensor | None, upstream: Tensor) -> Tensor | None:
    """The sum over rows; None if it was added to a total."""
    return add_gradient(
        total, upstream.sum(0, dtype=upstream.dtype if total is None else total.dtype)
    )


def add_gradient(total: Tensor | None, found: Tensor) -> Tensor | None:
    """A gradient; None if it was added to a total."""
    if total is None:
        return found
    total.add_(found)
    return None


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product of two matrices to a total that may have more digits, without rounding it."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.device.type == "cuda":
        _ATEN.addmm.dtype_out(total, left, right, total.dtype, out=total)
    else:
        total.add_(left.float() @ right.float())


def linear_map(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, whose weight's gradient goes where the weight says."""
    if total_of(weight) is None:
        return F.linear(x, weight, bias)
    out: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[assignment]
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.totals = total_of(weight), total_of(bias)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        to_weight = product_gradient(ctx.totals[0], grads[0], x)
        to_bias = sum_gradient(ctx.totals[1], grads[0]) if ctx.needs_input_grad[2] else None
        return grads[0] @ weight, to_weight, to_bias


def embedded(tokens: Tensor, weight: Tensor) -> Tensor:
    """`F.embedding`, whose gradient goes where the weight says, a row for each token."""
    if total_of(weight) is None:
        return F.embedding(tokens, weight)
    rows: Tensor = _Embedded.apply(tokens, weight)  # type: ignore[assignment]
    return rows


class _Embedded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.total = total_of(weight)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        (tokens,) = ctx.saved_tensors
        ctx.total.index_put_((tokens,), grads[0].to(ctx.total.dtype), accumulate=True)
        return None, None
