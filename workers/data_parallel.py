"""Collectives of a data-parallel group; with one rank each of them is a no-op.

Rank order is row order: rank 0 holds the batch's first rows. Every rank must join every call,
rows or no rows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["RankGroup"]


@dataclass(frozen=True)
class RankGroup:
    """The ranks a worker group spans: torch.distributed's default group.

    Attributes:
        rank: This process.
        num_ranks: Size of the group.
        device: Where tensors must lie to be sent.
    """

    rank: int
    num_ranks: int
    device: torch.device

    @property
    def alone(self) -> bool:
        """True if there is nobody to talk to."""
        return self.num_ranks == 1

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add up over ranks, in place."""
        if not self.alone:
            dist.all_reduce(tensor)
        return tensor

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """Overwrite with rank 0's, in place."""
        if not self.alone:
            dist.broadcast(tensor, src=0)
        return tensor

    def gather(self, values: Tensor) -> list[Tensor]:
        """Every rank's i64[n] (n may differ), in rank order, on the CPU."""
        if self.alone:
            return [values.cpu()]
        sizes = torch.zeros(self.num_ranks, dtype=torch.int64, device=self.device)
        sizes[self.rank] = len(values)
        dist.all_reduce(sizes)
        longest = int(sizes.max())
        padded = torch.zeros(longest, dtype=torch.int64, device=self.device)
        padded[: len(values)] = values.to(self.device)
        parts = [torch.empty_like(padded) for _ in range(self.num_ranks)]
        dist.all_gather(parts, padded)
        return [part[:size].cpu() for part, size in zip(parts, sizes.tolist(), strict=True)]

    def union(self, names: list[str]) -> list[str]:
        """All names known to any rank, sorted; sent as JSON text, never pickled."""
        if self.alone:
            return sorted(names)
        text = torch.tensor(list(json.dumps(names).encode()), dtype=torch.int64)
        known: set[str] = set()
        for part in self.gather(text):
            known.update(json.loads(bytes(part.tolist()).decode()))
        return sorted(known)
