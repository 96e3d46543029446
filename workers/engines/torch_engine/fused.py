"""Functions between the matrix products of a layer, with gradients written by hand.

Each function keeps little for the backward pass, which computes the rest again. On a CUDA device
each is a kernel or two (`Compiled`) and rounds where torch's own operations on 16 bits do, which
the CPU runs: the device's results are theirs but for the order of sums. Gradients are rounded once.

Shapes: N packed tokens, D hidden size, H query heads, K key heads, E head size, I feed-forward
size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...training.compiled import Compiled
from ...training.weight_gradients import add_gradient, product_gradient, sum_gradient, total_of

_ATEN: Any = torch.ops.aten


def has_kernels(x: Tensor) -> bool:
    """Whether what is done with a tensor is compiled, and a norm's gradient is a kernel."""
    return x.device.type == "cuda"


# --- norms


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)`, [N, D] (Zhang and Sennrich 2019, equation 4)."""
    return sum_norm(x, None, weight, eps)[1]


def sum_later(x: Tensor, change: Tensor) -> tuple[Tensor, Tensor | None]:
    """Two tensors whose sum is that of these: the kernel of the next norm makes it, or it is."""
    return (x, change) if has_kernels(x) else (x + change, None)


def sum_norm(x: Tensor, change: Tensor | None, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x + change`, which alone is kept, and `rms_norm` of it."""
    found: Any = _SumNormLinear.apply(x, change, norm, eps, None, None)
    return found


def sum_norm_linear(
    x: Tensor,
    change: Tensor | None,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`x + change`, which alone is kept, and `F.linear` of `rms_norm` of it."""
    found: Any = _SumNormLinear.apply(x, change, norm, eps, weight, bias)
    return found


class _SumNormLinear(torch.autograd.Function):
    """Without a weight: the norm itself."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        change: Tensor | None,
        norm: Tensor,
        eps: float,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        if change is None:
            total, (normed, scale) = x, _norm(x, norm, eps)
        else:
            total, normed, scale = _sum_norm(x, change, norm, eps)
        ctx.save_for_backward(total, scale, norm, weight)
        ctx.set_materialize_grads(False)
        ctx.eps = eps
        ctx.totals = [total_of(one) for one in (norm, weight, bias)]
        return total, normed if weight is None else F.linear(normed, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        total, scale, norm, weight = ctx.saved_tensors
        _, has_change, needs_norm, _, needs_weight, needs_bias = ctx.needs_input_grad
        of_norm, of_weight, of_bias = ctx.totals
        after, upstream = grads
        assert upstream is not None
        to_weight = None
        asked = (ctx.eps, needs_norm, needs_weight)
        if scale is None:
            normed, scale = _normed(total, ctx.eps)
            if needs_weight:
                of_normed = (normed * norm).to(total.dtype)
                to_weight = product_gradient(of_weight, upstream, of_normed)
                del of_normed
            to_normed = upstream if weight is None else upstream @ weight
            to_total, to_norm = _before_norm(to_normed, normed, scale, norm, needs_norm)
            to_total = to_total if after is None else to_total.add_(after)
        else:
            to_normed = upstream if weight is None else upstream @ weight
            inputs = (to_normed, total, scale, norm)
            to_total, to_norm, normed = (
                _before_norm_alone(*inputs, *asked)
                if after is None
                else _before_sum_norm(*inputs, after, *asked)
            )
            if normed is not None:
                to_weight = product_gradient(of_weight, upstream, normed)
        to_bias = sum_gradient(of_bias, upstream) if needs_bias else None
        if to_norm is not None:
            to_norm = add_gradient(
                of_norm, to_norm if of_norm is not None else to_norm.to(norm.dtype)
            )
        return to_total, to_total if has_change else None, to_norm, None, to_weight, to_bias


def _norm(x: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
    """The norm, and on CUDA what each row was multiplied by."""
    if not has_kernels(x):
        return F.rms_norm(x, (x.shape[-1],), norm, eps), None
    return _ATEN._fused_rms_norm(x, [x.shape[-1]], norm, eps)


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


def _before_norm_alone(
    upstream: Tensor,
    x: Tensor,
    scale: Tensor,
    norm: Tensor,
    eps: float,
    needs_norm: bool,
    needs_normed: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of a norm's input and weight, by torch's kernel, and the norm again."""
    mask = [True, needs_norm]
    inputs = (upstream.contiguous(), x, [x.shape[-1]], scale, norm, mask)
    to_x, to_norm = _ATEN._fused_rms_norm_backward(*inputs)
    return to_x, to_norm if needs_norm else None, _norm(x, norm, eps)[0] if needs_normed else None


def _sum_norm_eager(
    x: Tensor, change: Tensor, norm: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    total = x + change
    return total, *_norm(total, norm, eps)


def _sum_norm_compiled(x: Tensor, change: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, ...]:
    """The sum, its norm, and what each row was multiplied by."""
    total = x + change
    wide = total.float()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return total, (wide * scale * norm).to(x.dtype), scale


def _before_sum_norm_eager(
    upstream: Tensor, total: Tensor, scale: Tensor, norm: Tensor, after: Tensor, *asked: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    to_total, to_norm, normed = _before_norm_alone(upstream, total, scale, norm, *asked)
    return to_total.add_(after), to_norm, normed


def _before_sum_norm_compiled(
    upstream: Tensor,
    total: Tensor,
    scale: Tensor,
    norm: Tensor,
    after: Tensor,
    eps: float,
    needs_norm: bool,
    needs_normed: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of the sum, with that of its other uses, and of the weight; and the norm again."""
    normed = total.float() * scale
    upstream = upstream.float()
    to_norm = (upstream * normed).sum(0) if needs_norm else None
    weighted = upstream * norm
    along = (weighted * normed).mean(-1, keepdim=True)
    to_total = ((weighted - normed * along) * scale + after).to(total.dtype)
    return to_total, to_norm, (normed * norm).to(total.dtype) if needs_normed else None


_sum_norm = Compiled(_sum_norm_compiled, (0, 1), _sum_norm_eager)
_before_sum_norm = Compiled(_before_sum_norm_compiled, (0, 1, 2, 4), _before_sum_norm_eager)

# --- rotary embedding


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [N, heads, E], by tables [N, 1, E / 2], in Hugging Face's half-split."""
    out: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[assignment]
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _rotated_back(grads[0], *ctx.saved_tensors), None, None


def rotate_heads(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys of [N, H + 2 K, E], rotated, and values."""
    if not has_kernels(qkv):
        # split, not slices: its gradient is one concatenation, not a sum of padded copies.
        both, value = qkv.split([heads + keys, keys], dim=1)
        query, key = rotate(both, cos, sin).split([heads, keys], dim=1)
        return query, key, value
    found: Any = _RotateHeads.apply(qkv, cos, sin, heads, keys)
    return found


class _RotateHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, keys: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        rotated = _rotated(qkv[:, : heads + keys], cos, sin)
        return rotated[:, :heads], rotated[:, heads:], qkv[:, heads + keys :]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _heads_rotated_back(*grads, *ctx.saved_tensors), None, None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    out = torch.empty_like(x)
    left, right = x.chunk(2, dim=-1)
    to_left, to_right = out.chunk(2, dim=-1)
    torch.mul(left, cos, out=to_left).addcmul_(right, sin, value=-sign)
    torch.mul(right, cos, out=to_right).addcmul_(left, sin, value=sign)
    return out


def _heads_rotated_back_eager(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    return torch.cat([*(_rotate(one, cos, sin, -1) for one in (query, key)), value], dim=1)


def _rotated_compiled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    to_left = (left * cos).float() - right.float() * sin
    to_right = (right * cos).float() + left.float() * sin
    return torch.cat([to_left.to(x.dtype), to_right.to(x.dtype)], dim=-1)


def _rotated_back_compiled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.float().chunk(2, dim=-1)
    parts = (left * cos + right * sin, right * cos - left * sin)
    return torch.cat([part.to(x.dtype) for part in parts], dim=-1)


def _heads_rotated_back_compiled(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    rotated = _rotated_back_compiled(torch.cat([query, key], dim=1), cos, sin)
    return torch.cat([rotated, value], dim=1)


def rotate_into(
    heads: tuple[Tensor, Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    caches: tuple[Tensor, Tensor],
    where: Tensor,
) -> Tensor:
    """Queries [M, H, E] of rotated ones, keys and values, which go into caches.

    Shapes: `heads` [M, H, E] and twice [M, K, E]; `caches` keys and values [M, K, S, E]; `where`
    i64[M, K], counted in vectors of a cache.
    """
    size = heads[0].shape[-1]
    keys, values = (part.view(-1, size) for part in caches)
    query: Tensor = _rotated_into(*heads, cos, sin, keys, values, where)
    return query


def _rotated_into_eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    where: Tensor,
) -> Tensor:
    keys.index_put_((where,), _rotate(key, cos, sin, 1))
    values.index_put_((where,), value)
    return _rotate(query, cos, sin, 1)


def _rotated_into_compiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    where: Tensor,
) -> Tensor:
    def rotated(x: Tensor) -> Tensor:
        # `_rotated_compiled` without a concatenation, which would be a kernel before a cache's.
        halves = x.unflatten(-1, (2, -1))
        others = halves.flip(-2).float() * (sin.unsqueeze(-2) * sign)
        return ((halves * cos.unsqueeze(-2)).float() + others).to(x.dtype).flatten(-2)

    sign = torch.arange(-1, 2, 2, device=query.device).view(2, 1)
    keys.index_put_((where,), rotated(key))
    values.index_put_((where,), value)
    return rotated(query)


_rotated = Compiled(_rotated_compiled, (0, 1, 2), partial(_rotate, sign=1))
_rotated_back = Compiled(_rotated_back_compiled, (0, 1, 2), partial(_rotate, sign=-1))
_heads_rotated_back = Compiled(
    _heads_rotated_back_compiled, (0, 1, 2, 3, 4), _heads_rotated_back_eager
)
_rotated_into = Compiled(_rotated_into_compiled, range(8), _rotated_into_eager)

# --- gated feed-forward


def gated(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of [N, 2 * I], the gate first (Shazeer 2020, "GLU variants", SwiGLU)."""
    out: Tensor = _GatedLinear.apply(gate_up, None, None)  # type: ignore[assignment]
    return out


def gated_linear(gate_up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear(gated(gate_up), weight, bias)`, which keeps `gate_up` alone."""
    out: Tensor = _GatedLinear.apply(gate_up, weight, bias)  # type: ignore[assignment]
    return out


class _GatedLinear(torch.autograd.Function):
    """Without a weight: the product itself."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        ctx.totals = total_of(weight), total_of(bias)
        product = _product(gate_up)
        return product if weight is None else F.linear(product, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, weight = ctx.saved_tensors
        of_weight, of_bias = ctx.totals
        _, needs_weight, needs_bias = ctx.needs_input_grad
        to_weight = to_bias = product = None
        if weight is None:
            return _before_product(grads[0], gate_up, False)[0], None, None
        if needs_weight and not has_kernels(gate_up):
            to_weight = product_gradient(of_weight, grads[0], _product(gate_up))
            needs_weight = False
        to_bias = sum_gradient(of_bias, grads[0]) if needs_bias else None
        change, product = _before_product(grads[0] @ weight, gate_up, needs_weight)
        if needs_weight:
            to_weight = product_gradient(of_weight, grads[0], product)
        return change, to_weight, to_bias


def _product_eager(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _before_product_eager(
    upstream: Tensor, gate_up: Tensor, needs_product: bool
) -> tuple[Tensor, Tensor | None]:
    gate, up = gate_up.chunk(2, dim=-1)
    change = torch.empty_like(gate_up)
    to_gate, to_up = change.chunk(2, dim=-1)
    torch.mul(upstream, F.silu(gate), out=to_up)
    backward: Any = _ATEN.silu_backward.grad_input
    backward(upstream * up, gate, grad_input=to_gate)
    return change, _product_eager(gate_up) if needs_product else None


def _product_compiled(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    return (wide / (1 + (-wide).exp())).to(gate.dtype) * up


def _before_product_compiled(
    upstream: Tensor, gate_up: Tensor, needs_product: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of gate and up, and their product again.

    By two kernels: one that wrote all three side by side computed every part for every number, and
    took an H200 1.35 ms for 14,784 tokens of a 1.5B, where two took an H100 about 0.75 ms.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    upstream = upstream.float()
    share = 1 / (1 + (-gate).exp())
    to_gate = upstream * up * share * (1 + gate * (1 - share))
    parts = [part.to(gate_up.dtype) for part in (to_gate, upstream * gate * share)]
    product = _product_compiled(gate_up) if needs_product else None
    return torch.cat(parts, dim=-1), product


_product = Compiled(_product_compiled, (0,), _product_eager)
_before_product = Compiled(_before_product_compiled, (0, 1), _before_product_eager)
