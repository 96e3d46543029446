"""Collectives of a data-parallel group; with one rank each of them is a no-op.

Rank order is row order: rank 0 holds the batch's first rows. Every rank must join every call,
rows or no rows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from ...dataflow.runtime.placement import DeviceGroup
from ...dataflow.runtime.worker_protocol import WorkerContext


@dataclass(frozen=True)
class RankGroup:
    """Data-parallel ranks that hold the same part of a model."""

    rank: int  # This process
    num_ranks: int  # Size of the group
    device: torch.device  # Where tensors must lie to be sent
    # torch.distributed's group of them; its default group if None
    group: dist.ProcessGroup | None = None

    @property
    def alone(self) -> bool:
        return self.num_ranks == 1

    def sum_(self, tensor: Tensor) -> Tensor:
        if not self.alone:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def max_(self, tensor: Tensor) -> Tensor:
        if not self.alone:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tensor

    def broadcast_(self, tensor: Tensor) -> Tensor:
        if not self.alone:
            dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor

    def gather(self, values: Tensor) -> list[Tensor]:
        """Every rank's i64[n] (n may differ), in rank order, on the CPU."""
        if self.alone:
            return [values.cpu()]
        sizes = torch.zeros(self.num_ranks, dtype=torch.int64, device=self.device)
        sizes[self.rank] = len(values)
        dist.all_reduce(sizes, group=self.group)
        longest = int(sizes.max())
        padded = torch.zeros(longest, dtype=torch.int64, device=self.device)
        padded[: len(values)] = values.to(self.device)
        parts = [torch.empty_like(padded) for _ in range(self.num_ranks)]
        dist.all_gather(parts, padded, group=self.group)
        return [part[:size].cpu() for part, size in zip(parts, sizes.tolist(), strict=True)]

    def gather_floats(self, column: Tensor) -> list[float]:
        """All ranks' numbers in row order, sent as integers of the same bits."""
        gathered = self.gather(column.detach().double().cpu().view(torch.int64))
        return [value for part in gathered for value in part.view(torch.float64).tolist()]

    def union(self, names: list[str]) -> list[str]:
        """All names known to any rank, sorted; sent as JSON text, never pickled."""
        if self.alone:
            return sorted(names)
        text = torch.tensor(list(json.dumps(names).encode()), dtype=torch.int64)
        known: set[str] = set()
        for part in self.gather(text):
            known.update(json.loads(bytes(part.tolist()).decode()))
        return sorted(known)


def sum_over(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Add up over a group, by default the whole; one of a single process need not start NCCL."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, group=group)


def worker_group(context: WorkerContext) -> DeviceGroup:
    return DeviceGroup(
        context.role,
        context.num_ranks,
        tensor_parallel=context.tensor_parallel,
        pipeline_parallel=context.pipeline_parallel,
    )


def rank_group(context: WorkerContext, device: torch.device) -> RankGroup:
    """The data-parallel ranks of a worker; all processes of its group must ask."""
    sizes = (context.tensor_parallel, context.num_ranks, context.pipeline_parallel)
    several = context.num_ranks > 1 and context.num_ranks < context.num_processes
    # None is torch's default group, of all processes.
    made = _groups(*sizes, context.places) if several else {}
    group = made[context.tensor_rank, context.stage] if several else None
    return RankGroup(context.rank, context.num_ranks, device, group)


@lru_cache
def _groups(
    tensor: int, data: int, stages: int, places: tuple[int, ...]
) -> dict[tuple[int, int], dist.ProcessGroup]:
    """(Tensor-parallel rank, stage) -> its data-parallel ranks; made once per process."""
    made: dict[tuple[int, int], dist.ProcessGroup] = {}
    for stage in range(stages):
        for at in range(tensor):
            ranks = [at + tensor * (rank + data * stage) for rank in range(data)]
            # torch has every process make every group, in one order, also those that it is not in.
            group = dist.new_group([places[rank] for rank in ranks] if places else ranks)
            if isinstance(group, dist.ProcessGroup):  # a number for those that are not in it
                made[at, stage] = group
    return made
