"""What the kernel for sequences of any length computes, a sequence at a time, in plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from penstock.workers.engines.torch_engine import varlen
from penstock.workers.engines.torch_engine.varlen import Places, UsedPositions
from torch import Tensor


def _spans(places: Places) -> Iterator[tuple[slice, slice]]:
    """Queries and keys of every sequence that has some."""
    queries, keys = (places.query_start.cpu().tolist(), places.key_start.cpu().tolist())
    assert len(queries) == len(keys)
    for (a, b), (c, d) in zip(itertools.pairwise(queries), itertools.pairwise(keys), strict=True):
        assert b - a <= places.longest_query
        assert b - a <= d - c <= places.longest_key
        if b > a:
            yield slice(a, b), slice(c, d)


def _row(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention of the last queries of a sequence, [n, H, E]: bottom right."""
    n, k = len(query), len(key)
    seen = torch.ones(n, k, dtype=torch.bool, device=query.device).tril(k - n)
    group = query.shape[1] // key.shape[1]
    q, k_, v = (
        x.float().transpose(0, 1)
        for x in (query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1))
    )
    return F.scaled_dot_product_attention(q, k_, v, attn_mask=seen, scale=scale).transpose(0, 1)


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, places: Places, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mixed = torch.full_like(query, torch.nan)  # where no sequence is nobody may look
    for queries, keys in _spans(places):
        mixed[queries] = _row(query[queries], key[keys], value[keys], scale).to(query.dtype)
    nothing = query.new_zeros(0)
    return mixed, nothing, nothing, nothing


def flash_backward(
    upstream: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixed: Tensor,
    kept: list[Tensor],
    places: Places,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    del mixed, kept
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (query, key, value))
    for queries, keys in _spans(places):
        parts = (query[queries], key[keys], value[keys])
        leaves = [part.detach().requires_grad_() for part in parts]
        with torch.enable_grad():
            found = _row(leaves[0], leaves[1], leaves[2], scale).to(query.dtype)
        for change, at, grad in zip(
            (dq, dk, dv),
            (queries, keys, keys),
            torch.autograd.grad(found, leaves, upstream[queries]),
            strict=True,
        ):
            change[at] = grad
    return dq, dk, dv


def used_forward(
    query: Tensor, key: Tensor, value: Tensor, used: UsedPositions, scale: float
) -> Tensor:
    assert used.query_start.tolist() == list(range(len(query) + 1))
    rows: list[Tensor] = []
    for row, (count, start) in enumerate(zip(used.count, used.key_start, strict=False)):
        assert 1 <= count <= used.most
        keys = slice(int(start), int(start + count))
        rows.append(_row(query[row : row + 1], key[keys], value[keys], scale))
    return torch.cat(rows).to(query.dtype)


def use_reference(patch: pytest.MonkeyPatch) -> None:
    """Have 16-bit tensors of every device but the CPU, and whoever asks, go through it."""
    patch.setattr(varlen, "flash_forward", flash_forward)
    patch.setattr(varlen, "flash_backward", flash_backward)
    patch.setattr(varlen, "used_forward", used_forward)
    patch.setattr(varlen, "most_head_size", lambda device: 256)  # pyright: ignore[reportUnknownLambdaType]
