"""A step of ragged rows, and the shapes that attention has in it."""

from __future__ import annotations

from typing import Any

import torch
from penstock.algorithms.roles import PolicyBatch
from penstock.workers.engines.torch_engine import attention
from penstock.workers.engines.torch_engine.packing import Pack, pack_rows
from penstock.workers.engines.torch_engine.varlen import has_kernel
from penstock.workers.training.host_memory import sent
from penstock.workers.training.microbatch import micro_batches, take_rows
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def ragged_rows() -> PolicyBatch:
    """512 rows: 64 prompts of 300 tokens, 8 responses each of up to 900."""
    random = torch.Generator().manual_seed(0)
    length = torch.randint(1, 901, (512,), generator=random)
    tokens = torch.randint(3, 50, (512, 1200), generator=random)
    tokens[:, :300] = tokens[:64, :300].repeat_interleave(8, 0)
    place = torch.arange(1200)
    tokens[place >= 300 + length[:, None]] = -1
    zeros = torch.zeros(tokens.shape)
    return PolicyBatch(
        tokens=tokens, mask=(place >= 300) & (tokens >= 0), behavior_logprob=zeros, advantage=zeros
    )


def packs(batch: PolicyBatch, micro_batch_tokens: int, device: str = "meta") -> list[Pack]:
    """All micro-batches of the step, on a device."""
    made: list[Pack] = []
    every = torch.arange(len(batch.tokens))
    for part in micro_batches(batch, every, "row", micro_batch_tokens, sort_by_length=False):
        rows = take_rows(batch, part)
        reads = torch.zeros_like(rows.mask)
        reads[:, :-1] = rows.mask[:, 1:]
        shared = torch.full((len(part),), 300)
        made.append(pack_rows(sent(rows.tokens, torch.device(device)), reads, shared))
    return made


class Shapes(TorchDispatchMode):
    """The different shapes of what some operations are given, and the longest sequences."""

    def __init__(self, *operations: str) -> None:
        super().__init__()
        self.operations = operations
        self.found: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name: str = func.overloadpacket.__name__
        if name in self.operations:
            self.found.add(tuple(tuple(x.shape) if isinstance(x, Tensor) else x for x in args))
        return func(*args, **(kwargs or {}))


def attend(pack: Pack, dtype: torch.dtype) -> None:
    """Forward and backward, with 4 query heads on 2 key heads."""

    def leaf(heads: int) -> Tensor:
        shape = (len(pack.tokens), heads, 64)
        return torch.zeros(shape, dtype=dtype, device=pack.tokens.device, requires_grad=True)

    query, key, value = leaf(4), leaf(2), leaf(2)
    assert has_kernel(query) == (dtype == torch.bfloat16)
    attention.attend_packed(query, key, value, pack, 0.125).sum().backward()
