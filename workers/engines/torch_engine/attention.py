"""Attention over packed tokens (training, evaluation, prompts) and over a cache (decoding).

On CUDA devices in 16 bits it is a kernel for sequences of any length (`varlen.py`). Elsewhere it is
two batched matrix products and a softmax, in pieces, and nothing but queries, keys, values and the
result is kept for the backward pass, which computes the rest again. On the CPU the pieces stay in
the cache; `F.scaled_dot_product_attention` is several times slower there at the lengths of
responses, and differs in the last bit with the rows that share its batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .packing import Block, Pack
from .varlen import attend_sequences, has_kernel

MOST_SCORES = 1 << 20
"""Scores computed at once on a CPU, which are 4 MiB: about what a core's cache holds."""
_MOST_ON_DEVICE = 1 << 27
"""The same on other devices, half a gigabyte: a launch costs more there than memory."""
_ADDED_AT_ONCE, _ADDED_AT_ONCE_16_BITS = 128, 1024
"""Positions of a cache whose values one product on the CPU adds up. Of more, it adds up parts whose
bounds depend on their number: a row's result would depend on how far the longest row goes."""
_LEAST_QUERIES = 16
"""Queries of one row that are computed together, whatever the number of scores."""


def attend_packed(query: Tensor, key: Tensor, value: Tensor, pack: Pack, scale: float) -> Tensor:
    """Attention of every packed token over its row.

    Shapes: `query` [N, H, E]; `key` [N, K, E], K dividing H; `value` [N, K, E]. Returns [N, H * E].
    """
    if has_kernel(query):
        return attend_sequences(query, key, value, pack.places, scale)
    mixed: Tensor = _Attend.apply(query, key, value, pack, scale)  # type: ignore[assignment]
    return mixed


class _Attend(torch.autograd.Function):
    """See `attend_packed`. Heads are gathered with their tokens, so nothing is transposed.

    Shapes in here: b rows of a block, g = H / K queries of a key, Q queries and T keys of a row.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, pack: Pack, scale: float
    ) -> Tensor:
        heads, size = query.shape[1:]
        rows = pack.head_rows(heads, key.shape[1])
        queries = (query * scale).reshape(-1, size)
        keys, values = key.reshape(-1, size), value.reshape(-1, size)
        outputs: list[Tensor] = []
        for block, (of_query, of_key) in zip(pack.blocks, rows.blocks, strict=True):
            q, k, v = _at(queries, of_query), _at(keys, of_key), _at(values, of_key)
            mixed = torch.empty_like(q)
            for piece in _pieces(block, heads):
                weight = _weights(q[piece.query], k[piece.key], piece)
                mixed[piece.query] = _matmul(weight.to(v.dtype), v[piece.key])
            outputs.append(mixed.view(-1, size))
        mixed = torch.cat(outputs).index_select(0, rows.slot).view(len(query), -1)
        ctx.save_for_backward(query, key, value, mixed)
        ctx.pack, ctx.scale = pack, scale
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, mixed = ctx.saved_tensors
        pack: Pack = ctx.pack
        heads, size = query.shape[1:]
        rows = pack.head_rows(heads, key.shape[1])
        queries = (query * ctx.scale).reshape(-1, size)
        keys, values = key.reshape(-1, size), value.reshape(-1, size)
        upstream = grads[0].reshape(-1, size)
        along = (upstream.float() * mixed.view(-1, size)).sum(-1, keepdim=True)
        changes: tuple[list[Tensor], ...] = ([], [], [])
        for block, (of_query, of_key) in zip(pack.blocks, rows.blocks, strict=True):
            q, k, v = _at(queries, of_query), _at(keys, of_key), _at(values, of_key)
            up, dot = _at(upstream, of_query), _at(along, of_query)
            dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
            for piece in _pieces(block, heads):
                near, part, sent = k[piece.key], q[piece.query], up[piece.query]
                weight = _weights(part, near, piece)
                dv[piece.key] += _matmul_t(weight.to(v.dtype), sent)
                change = _matmul(sent, v[piece.key].transpose(-1, -2)).float()
                change = change.sub_(dot[piece.query]).mul_(weight).to(k.dtype)
                dq[piece.query] = _matmul(change, near)
                dk[piece.key] += _matmul_t(change, part)
            for found, change in zip(changes, (dq, dk, dv), strict=True):
                found.append(change.view(-1, size))
        dq = torch.cat(changes[0]).index_select(0, rows.slot).mul_(ctx.scale)
        dk, dv = (rows.added_up(parts).view_as(key) for parts in changes[1:])
        return dq.view_as(query), dk, dv, None, None


@dataclass(frozen=True)
class _Piece:
    """Some queries of some rows of a block, computed at once."""

    query: tuple[slice, ...]  # Where they are in [B, K, g, Q, E]
    key: tuple[slice, ...]  # The keys that they may look at, in [B, K, T, E]
    hidden: Tensor  # bool[b or 1, 1, 1, Q, T]; those of them that they may not


def _pieces(block: Block, heads: int) -> Iterator[_Piece]:
    """A block in pieces of about as many scores as there may be: rows, or some queries of one.

    How a row is cut depends on its own length alone.
    """
    count, num_queries = block.query.shape
    num_keys = block.key.shape[1]
    limit = MOST_SCORES if block.query.device.type == "cpu" else _MOST_ON_DEVICE
    each = heads * num_queries * num_keys
    at_once = max(1, limit // each)
    most = max(_LEAST_QUERIES, limit // (heads * num_keys))
    step = num_queries if each <= limit else most
    every = slice(None)
    for first in range(0, count, at_once):
        rows = slice(first, first + at_once)
        for begin in range(0, num_queries, step):
            end = min(begin + step, num_queries)
            width = num_keys - num_queries + end
            queries = slice(begin, end)
            yield _Piece(
                (rows, every, every, queries),
                (rows, every, slice(0, width)),
                block.hidden(rows, queries, width),
            )


def _at(x: Tensor, index: Tensor) -> Tensor:
    """[*index, E] of [rows, E]."""
    return x.index_select(0, index.reshape(-1)).view(*index.shape, x.shape[-1])


def _weights(q: Tensor, k: Tensor, piece: _Piece) -> Tensor:
    """f32[b, K, g, Q, T]: how much each query looks at each key."""
    scores = _matmul(q, k.transpose(-1, -2)).float()
    return scores.masked_fill_(piece.hidden, -math.inf).softmax(-1)


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    """[b, K, g, Q, x] of [b, K, g, Q, y] and [b, K, y, x]: the rows of a key's g queries as one."""
    flat = left.reshape(-1, left.shape[2] * left.shape[3], left.shape[4])
    return torch.bmm(flat, right.flatten(0, 1)).view(*left.shape[:4], -1)


def _matmul_t(left: Tensor, right: Tensor) -> Tensor:
    """[b, K, T, E] of [b, K, g, Q, T] and [b, K, g, Q, E], summed over the queries."""
    shape = (-1, left.shape[2] * left.shape[3])
    flat = left.reshape(*shape, left.shape[4]).transpose(1, 2)
    return torch.bmm(flat, right.reshape(*shape, right.shape[4])).view(
        *left.shape[:2], -1, right.shape[4]
    )


def attend_cache(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    """One query per row over its cache.

    Shapes: `query` [M, H, E]; `key` and `value` [M, K, S, E], views of the cache will do; `bias`
    f32[M, 1, S], 0 where the row may look, -inf elsewhere. Returns [M, H * E].
    """
    rows, heads, size = query.shape
    keys = key.shape[1]
    grouped = (query * scale).view(rows * keys, heads // keys, size)
    scores = torch.bmm(grouped, key.flatten(0, 1).transpose(1, 2))
    weight = (scores.view(rows, heads, -1).float() + bias).softmax(-1).to(value.dtype)
    mixed = _added_up(weight.view(rows * keys, heads // keys, -1), value.flatten(0, 1))
    return mixed.view(rows, -1)


def _added_up(weight: Tensor, value: Tensor) -> Tensor:
    """[n, g, E] of [n, g, S] and [n, S, E]; positions of no weight change no bit on the CPU."""
    _, queries, span = weight.shape
    is_float32 = value.dtype == torch.float32
    at_once = _ADDED_AT_ONCE if is_float32 else _ADDED_AT_ONCE_16_BITS
    # One query's float32 product adds one value after another. Of two or three, processors with AMX
    # add up parts, and those without do not.
    is_one = queries == 1 and is_float32
    if weight.device.type != "cpu" or is_one or span <= at_once:
        return torch.bmm(weight, value)
    parts = zip(weight.split(at_once, 2), value.split(at_once, 1), strict=True)
    total = torch.bmm(*next(parts)).float()
    for part in parts:
        total += torch.bmm(*part)
    return total.to(value.dtype)
