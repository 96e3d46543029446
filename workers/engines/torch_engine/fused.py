"""The pieces of a decoder layer between its matrix products, with backward passes of their own.

Autograd would keep every intermediate result of them, some in float32, and add up their gradients
through buffers of zeros. These keep what they were given, and compute the rest again.

Shapes: N packed tokens, D hidden size, E head size, I feed-forward size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)`, [N, D] (Zhang and Sennrich 2019, equation 4)."""
    out: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[assignment]
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        normed, scale = _normed(x, ctx.eps)
        return *_before_norm(grads[0], normed, scale, weight, ctx.needs_input_grad[1]), None


def _normed(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x / sqrt(mean(x^2) + eps)` in float32, and what `x` was multiplied by."""
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return x * scale, scale


def _before_norm(
    upstream: Tensor, normed: Tensor, scale: Tensor, weight: Tensor, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of a norm's input and, if needed, weight; `normed` is overwritten."""
    dtype = upstream.dtype
    upstream = upstream.float()
    to_weight = (upstream * normed).sum(0).to(weight.dtype) if needs_weight else None
    upstream = upstream * weight
    along = (upstream * normed).sum(-1, keepdim=True).div_(normed.shape[-1])
    return upstream.sub_(normed.mul_(along)).mul_(scale).to(dtype), to_weight


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear(rms_norm(x, norm, eps), weight, bias)`, which keeps `x` alone."""
    out: Tensor = _NormLinear.apply(x, norm, eps, weight, bias)  # type: ignore[assignment]
    return out


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, norm, weight)
        ctx.eps = eps
        return F.linear(F.rms_norm(x, (x.shape[-1],), norm, eps), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, norm, weight = ctx.saved_tensors
        needs_norm, needs_weight, needs_bias = (ctx.needs_input_grad[i] for i in (1, 3, 4))
        normed, scale = _normed(x, ctx.eps)
        to_weight = grads[0].t() @ (normed * norm).to(x.dtype) if needs_weight else None
        to_bias = grads[0].sum(0) if needs_bias else None
        to_x, to_norm = _before_norm(grads[0] @ weight, normed, scale, norm, needs_norm)
        return to_x, to_norm, None, to_weight, to_bias


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in Hugging Face's half-split order.

    Args:
        x: [N, heads, E].
        cos: [N, 1, E / 2].
        sin: Likewise.
    """
    out: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[assignment]
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, sin, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    out = torch.empty_like(x)
    left, right = x.chunk(2, dim=-1)
    to_left, to_right = out.chunk(2, dim=-1)
    torch.mul(left, cos, out=to_left).addcmul_(right, sin, value=-sign)
    torch.mul(right, cos, out=to_right).addcmul_(left, sin, value=sign)
    return out


def gated(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of [N, 2 * I], the gate first (Shazeer 2020, "GLU variants", SwiGLU)."""
    out: Tensor = _Gated.apply(gate_up)  # type: ignore[assignment]
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _product(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        return _before_product(grads[0], gate_up)


def _product(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _before_product(upstream: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    change = torch.empty_like(gate_up)
    to_gate, to_up = change.chunk(2, dim=-1)
    torch.mul(upstream, F.silu(gate), out=to_up)
    backward: Any = torch.ops.aten.silu_backward.grad_input
    backward(upstream * up, gate, grad_input=to_gate)
    return change


def gated_linear(gate_up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear(gated(gate_up), weight, bias)`, which keeps `gate_up` alone."""
    out: Tensor = _GatedLinear.apply(gate_up, weight, bias)  # type: ignore[assignment]
    return out


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        return F.linear(_product(gate_up), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, weight = ctx.saved_tensors
        to_weight = grads[0].t() @ _product(gate_up) if ctx.needs_input_grad[1] else None
        to_bias = grads[0].sum(0) if ctx.needs_input_grad[2] else None
        return _before_product(grads[0] @ weight, gate_up), to_weight, to_bias
