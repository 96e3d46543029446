"""Attention over packed tokens (training, evaluation, prompts) and over a cache (decoding).

The plain matmul-softmax-matmul form is used wherever a row's result must not depend on its
neighbors: `F.scaled_dot_product_attention` on the CPU splits its work over threads by batch
size and then differs in the last bit; batched matrix products do not.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .packing import Block, Pack

__all__ = ["attend_cache", "attend_packed", "attend_plain"]


class _Repack(torch.autograd.Function):
    """Rows gathered by `index`, whose gradient is a gather by `inverse` instead of a scatter-add.

    Every row of `x` must be gathered at `inverse[row]`; further copies must have zero gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None


def attend_packed(query: Tensor, key: Tensor, value: Tensor, pack: Pack, scale: float) -> Tensor:
    """Attention of every packed token over its row.

    Args:
        query: [N, H, E].
        key: [N, K, E], K dividing H.
        value: [N, K, E].
        pack: Says who attends to whom.
        scale: Multiplies the scores.

    Returns:
        [N, H * E].
    """
    training = torch.is_grad_enabled()
    slots: Tensor = _Repack.apply(query.flatten(1), pack.query, pack.slot)  # type: ignore[assignment]
    outputs: list[Tensor] = []
    begin = 0
    both = torch.cat([key, value], dim=1).flatten(1)
    for block in pack.blocks:
        size = block.query.numel()
        q = slots[begin : begin + size].view(*block.query.shape, -1, query.shape[-1])
        kv = F.embedding(block.key, both).view(*block.key.shape, 2, key.shape[1], key.shape[2])
        k, v = kv.unbind(2)
        heads = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        mix = _attend_sdpa if training else attend_plain
        outputs.append(mix(*heads, block, scale).transpose(1, 2).reshape(size, -1))
        begin += size
    mixed: Tensor = _Repack.apply(torch.cat(outputs), pack.slot, pack.query)  # type: ignore[assignment]
    return mixed


def _attend_sdpa(q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=block.mask, is_causal=block.causal, scale=scale, enable_gqa=True
    )


def attend_plain(q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> Tensor:
    """The same as three plain steps; [B, H, Q, E] over [B, K, T, E]."""
    batch, heads, width, size = q.shape
    keys = k.shape[1]
    # The query heads that share a key head become further rows of one matrix product.
    grouped = (q * scale).reshape(batch * keys, heads // keys * width, size)
    scores = torch.bmm(grouped, k.reshape(batch * keys, -1, size).transpose(1, 2))
    scores = scores.view(batch, heads, width, -1).float()
    mask = block.mask
    if mask is None:
        mask = torch.ones(width, width, dtype=torch.bool, device=q.device).tril()
    weight = scores.masked_fill(~mask, -math.inf).softmax(-1).to(v.dtype)
    mixed = torch.bmm(
        weight.view(batch * keys, heads // keys * width, -1), v.reshape(batch * keys, -1, size)
    )
    return mixed.view(batch, heads, width, size)


def attend_cache(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    """One query per row over its cache.

    Args:
        query: [M, H, E].
        key: [M, K, S, E]; a view of the cache will do.
        value: [M, K, S, E].
        bias: f32[M, 1, S]; 0 where the row may look, -inf elsewhere.
        scale: Multiplies the scores.

    Returns:
        [M, H * E].
    """
    rows, heads, size = query.shape
    keys = key.shape[1]
    grouped = (query * scale).view(rows * keys, heads // keys, size)
    scores = torch.bmm(grouped, key.flatten(0, 1).transpose(1, 2))
    weight = (scores.view(rows, heads, -1).float() + bias).softmax(-1).to(value.dtype)
    mixed = torch.bmm(weight.view(rows * keys, heads // keys, -1), value.flatten(0, 1))
    return mixed.view(rows, -1)
