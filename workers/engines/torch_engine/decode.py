"""Generation with a key-value cache for the families of `LeanBackbone`.

Every prompt is computed once and its cache copied to its samples; finished rows leave the batch.

A sample's tokens and log-probabilities do not depend, bit for bit, on the rows that share its
batch. On the CPU this rests on four things, all tested: the number of rows of every matrix
product is a multiple of 16 (other numbers may choose another kernel); attention is two batched
products and a softmax over a length that is a multiple of 16, and at least long enough that the
products never fall below the size at which torch switches kernels; a prompt's attention is as
wide as its own length demands; and every token has its own random number. On CUDA the same code
runs, but cuBLAS may choose kernels by the number of rows, so there only equal batches are
promised to give equal bits; other batches agree up to rounding, which can change a token whose
sample lies on a boundary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ...rollout.response_sampler import ResponseSampler
from ...rollout.responses import Responses
from .attention import attend_cache
from .network import LeanNetwork
from .packing import pack_rows

__all__ = ["decode"]

_ALIGN = 16  # rows and cache positions; see the module's docstring
_SMALL_PRODUCT = 400  # torch uses another kernel for batched products below this many multiplies
_SHRINK = 0.8  # leave finished rows in the batch until it would shrink to this fraction


def decode(network: LeanNetwork, sampler: ResponseSampler) -> Responses:
    """Sample the responses of `sampler`.

    Args:
        network: The policy.
        sampler: Its prompts, no wider than the longest, and how tokens are sampled.
    """
    state = _Decoder(network, sampler.prompt, sampler.num_samples, sampler.max_new)
    row = state.row  # which response each live row is; spare rows repeat some finished one
    live = state.live
    logits = state.prompt_logits
    for t in range(sampler.max_new):
        sampled, live = sampler.sample(logits, row, live, t)
        count = int(live.sum())
        if count == 0 or t + 1 == sampler.max_new:
            break
        if _padded(count) <= _SHRINK * len(row):
            keep = _keep(live, count)
            row, live, sampled = row[keep], live[keep], sampled[keep]
            state.keep(keep)
        logits = state.step(sampled)
    return sampler.responses()


def _padded(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN


def _keep(live: Tensor, count: int) -> Tensor:
    """Indices of the live rows, then of as many finished ones as fill a multiple of 16."""
    order = torch.argsort((~live).to(torch.int8), stable=True)
    return order[: _padded(count)]


class _Decoder:
    """Cache and positions of the rows in the batch. M rows, K key heads, S positions, E size."""

    def __init__(
        self, network: LeanNetwork, prompt: Tensor, num_samples: int, max_new: int
    ) -> None:
        self._network = network
        backbone = self._backbone = network.backbone
        device = prompt.device
        length = (prompt >= 0).sum(1)
        last = torch.arange(prompt.shape[1], device=device) == length[:, None] - 1
        pack = pack_rows(prompt, last, width_unit=_ALIGN)
        shape = (len(pack.tokens), backbone.num_key_heads, backbone.head_dim)
        dtype = backbone.embedding.dtype
        packed = [
            (
                torch.empty(shape, dtype=dtype, device=device),
                torch.empty(shape, dtype=dtype, device=device),
            )
            for _ in backbone.layers
        ]
        logits = network.head(backbone.states(pack, packed))

        rows = len(prompt) * num_samples
        spare = _padded(rows) - rows
        self.row = torch.cat(
            [
                torch.arange(rows, device=device),
                torch.zeros(spare, dtype=torch.int64, device=device),
            ]
        )
        self.live = torch.arange(len(self.row), device=device) < rows
        owner = self.row // num_samples
        self.prompt_logits = logits[pack.entry[owner]]
        self.position = length[owner]
        self._longest = int(length.max())
        self._capacity = self._span(self._longest + max_new - 1)
        cos, sin = backbone.rope(self._longest + max_new)
        self._cos, self._sin = cos, sin
        start = length.cumsum(0) - length
        column = torch.arange(prompt.shape[1], device=device)
        index = (start[:, None] + column).where(column < length[:, None], len(pack.tokens) - 1)
        self._cache = [
            (self._fill(key, index, owner), self._fill(value, index, owner))
            for key, value in packed
        ]

    def _span(self, length: int) -> int:
        """How many cache positions to attend over for rows of at most `length` tokens."""
        backbone = self._backbone
        group = backbone.num_heads // backbone.num_key_heads
        least = math.ceil(_SMALL_PRODUCT / (group * backbone.head_dim))
        return _padded(max(length, least))

    def _fill(self, packed: Tensor, index: Tensor, owner: Tensor) -> Tensor:
        """A cache [M, K, S, E] that begins with each row's prompt."""
        backbone = self._backbone
        shape = (len(owner), backbone.num_key_heads, self._capacity, backbone.head_dim)
        cache = packed.new_zeros(shape)
        cache[:, :, : index.shape[1]] = packed[index].transpose(1, 2)[owner]
        return cache

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but `rows`."""
        self.position = self.position[rows]
        self._cache = [(key[rows], value[rows]) for key, value in self._cache]

    def step(self, token: Tensor) -> Tensor:
        """Append one token to every row; the logits after it, [M, V]."""
        backbone = self._backbone
        position = self.position
        self._longest += 1
        span = self._span(self._longest)
        bias = torch.zeros(len(token), 1, span, device=token.device).masked_fill_(
            torch.arange(span, device=token.device) > position[:, None, None], -math.inf
        )
        cos, sin = self._cos[position], self._sin[position]
        heads = torch.arange(len(token) * backbone.num_key_heads, device=token.device)
        where = heads * self._capacity + position.repeat_interleave(backbone.num_key_heads)
        x = F.embedding(token, backbone.embedding)
        for layer, (key_cache, value_cache) in zip(backbone.layers, self._cache, strict=True):
            query, key, value = backbone.project(x, layer, cos, sin)
            key_cache.view(-1, backbone.head_dim)[where] = key.reshape(-1, backbone.head_dim)
            value_cache.view(-1, backbone.head_dim)[where] = value.reshape(-1, backbone.head_dim)
            mixed = attend_cache(
                query, key_cache[:, :, :span], value_cache[:, :, :span], bias, backbone.scale
            )
            x = backbone.finish(x, mixed, layer)
        self.position = position + 1
        states = F.rms_norm(x, (x.shape[-1],), backbone.final_norm, backbone.eps)
        return self._network.head(states)
