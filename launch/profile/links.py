"""Links between ranks: how long a message takes, how long a sum over several ranks.

The same is measured twice: among the ranks of each node, and among the first ranks of all nodes,
the second ones, and so on. Neighbors (0 and 1, 2 and 3, ...) send to each other all at once,
because a link's figure is what one device gets while all of them use it. From a short and a long
message follow latency and bandwidth, from a short and a long sum what collectives reach of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field

from ...planner.cost.calibration import Constants
from ...planner.inputs.cluster import LinkSpec

_LONG_BYTES = {"cpu": 2**27, "cuda": 2**28}  # gradients of a model do not stay in a cache
_SHORT_BYTES = 64
_TRIPS = 20  # short messages there and back in one measurement

_REPEATS = 9


class LinkTimes(BaseModel):
    """Seconds, medians over repeats, of the slowest rank of a part."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_ranks: int = Field(ge=2)  # that took part in the sums
    long_bytes: int  # size of a long message or sum
    short_message_s: float  # A few bytes, one way
    long_message_s: float  # `long_bytes`, one way
    short_sum_s: float  # adding up a few bytes over all ranks
    long_sum_s: float  # adding up `long_bytes` over all ranks


def within_nodes(nodes: Sequence[int]) -> list[list[int]]:
    """The ranks of each node."""
    ranks = range(len(nodes))
    return [[rank for rank in ranks if nodes[rank] == node] for node in sorted(set(nodes))]


def across_nodes(nodes: Sequence[int]) -> list[list[int]]:
    """The first rank of every node, then the second of every node that has one, and so on."""
    by_node = within_nodes(nodes)
    most = max(map(len, by_node))
    return [[ranks[i] for ranks in by_node if i < len(ranks)] for i in range(most)]


def link_times(
    parts: Sequence[Sequence[int]],
    rank: int,
    device: str,
    once_s: Callable[[Callable[[], object]], float],
) -> LinkTimes | None:
    """Measure in all parts at once; every rank of the default group must call this at that time."""
    if all(len(part) == 1 for part in parts):
        return None
    backend = "nccl" if device.startswith("cuda") else "gloo"
    # Each rank must make all groups, also those of others.
    groups: list[Any] = [dist.new_group(list(part), backend=backend) for part in parts]
    number = next(i for i, part in enumerate(parts) if rank in part)
    group, part = groups[number], parts[number]
    size = _LONG_BYTES[device.partition(":")[0]]
    long, short = (torch.zeros(n // 4, device=device) for n in (size, _SHORT_BYTES))
    place = part.index(rank)
    # A last rank without a partner waits for the others.
    partner = part[place ^ 1] if place ^ 1 < len(part) else None

    def there_and_back(message: torch.Tensor, trips: int) -> None:
        for _ in range(trips if partner is not None else 0):
            if place % 2:
                dist.recv(message, partner, group=group)
                dist.send(message, partner or 0, group=group)
            else:
                dist.send(message, partner or 0, group=group)
                dist.recv(message, partner, group=group)

    def added_up(message: torch.Tensor) -> None:
        if len(part) > 1:
            dist.all_reduce(message, group=group)

    def median_s(body: Callable[[], object]) -> float:
        once_s(body)
        return statistics.median(once_s(body) for _ in range(_REPEATS))

    times = {
        "short_message_s": median_s(lambda: there_and_back(short, _TRIPS)) / (2 * _TRIPS),
        "long_message_s": median_s(lambda: there_and_back(long, 1)) / 2,
        "short_sum_s": median_s(lambda: added_up(short)),
        "long_sum_s": median_s(lambda: added_up(long)),
    }
    if len(part) == 1:
        return None
    # One without a partner has sent nothing, and must not speak for its part.
    slowest = torch.tensor(list(times.values()), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    found = dict(zip(times, slowest.tolist(), strict=True))
    return LinkTimes(num_ranks=len(part), long_bytes=size, **found)


def link_constants(times: LinkTimes, start: Constants) -> tuple[LinkSpec, Constants]:
    """The link, and what collectives make of it, such that both predict what was measured.

    A sum over n ranks is 2 (n - 1) hops of 1/n of the bytes each (`collectives` in `planner/cost`).
    Where sums are faster than messages, the link is as fast as sums show it to be.
    """
    latency_s = times.short_message_s
    sent_s = max(times.long_message_s - latency_s, 1e-9)
    sum_rate = _sum_rate(times)
    rate = max(times.long_bytes / sent_s, sum_rate)
    hop_s = max(times.short_sum_s / _hops(times) - latency_s, 0.0)
    constants = start.replaced(network_efficiency=sum_rate / rate, hop_s=hop_s, stage_s=hop_s)
    return LinkSpec(bytes_per_s=rate, latency_s=latency_s), constants


def link_of(times: LinkTimes, constants: Constants) -> LinkSpec:
    """Another link, such that the constants of the first predict the sums that it was measured by.

    There is one share of bandwidth that is reached, and one software's part of a hop, for all links
    of a cluster.
    """
    latency_s = max(times.short_sum_s / _hops(times) - constants.hop_s, 0.0)
    rate = _sum_rate(times) / constants.network_efficiency
    return LinkSpec(bytes_per_s=rate, latency_s=latency_s)


def _hops(times: LinkTimes) -> int:
    return 2 * (times.num_ranks - 1)


def _sum_rate(times: LinkTimes) -> float:
    summed_s = max(times.long_sum_s - times.short_sum_s, 1e-9)
    return _hops(times) / times.num_ranks * times.long_bytes / summed_s
