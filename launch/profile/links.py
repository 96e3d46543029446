"""Links between ranks: how long a message takes, how long a sum over all ranks.

Neighbors (0 and 1, 2 and 3, ...) send to each other all at once, because a link's figure is what
one device gets while all of them use it. From a short and a long message follow latency and
bandwidth, from a short and a long sum what collectives reach of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field

from ...planner.cost.constants import Constants
from ...planner.inputs.cluster import LinkSpec

__all__ = ["LinkTimes", "link_constants", "link_times"]

_LONG_BYTES = {"cpu": 2**24, "cuda": 2**28}
_SHORT_BYTES = 64
_TRIPS = 20
"""Short messages there and back in one measurement."""

_REPEATS = 9


class LinkTimes(BaseModel):
    """Seconds, medians over repeats."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    num_ranks: int = Field(ge=2)
    """That took part in the sums."""
    long_bytes: int
    """Size of a long message or sum."""
    short_message_s: float
    """A few bytes, one way."""
    long_message_s: float
    """`long_bytes`, one way."""
    short_sum_s: float
    """Adding up a few bytes over all ranks."""
    long_sum_s: float
    """Adding up `long_bytes` over all ranks."""


def link_times(
    rank: int, num_ranks: int, device: str, once_s: Callable[[Callable[[], object]], float]
) -> LinkTimes:
    """Measure; every rank must call this at the same time.

    Args:
        rank: This one.
        num_ranks: Of the default process group, two or more.
        device: "cpu", or this rank's CUDA device, whose messages go over NCCL.
        once_s: Times a body that all ranks begin together.
    """
    group: Any = dist.new_group(backend="nccl") if device.startswith("cuda") else None
    size = _LONG_BYTES[device.partition(":")[0]]
    long, short = (torch.zeros(n // 4, device=device) for n in (size, _SHORT_BYTES))
    # A last rank without a partner waits for the others.
    partner = rank ^ 1 if rank ^ 1 < num_ranks else None

    def there_and_back(message: torch.Tensor, trips: int) -> None:
        for _ in range(trips if partner is not None else 0):
            if rank % 2:
                dist.recv(message, partner, group=group)
                dist.send(message, partner or 0, group=group)
            else:
                dist.send(message, partner or 0, group=group)
                dist.recv(message, partner, group=group)

    def added_up(message: torch.Tensor) -> None:
        dist.all_reduce(message, group=group)

    def median_s(body: Callable[[], object]) -> float:
        once_s(body)
        return statistics.median(once_s(body) for _ in range(_REPEATS))

    return LinkTimes(
        num_ranks=num_ranks,
        long_bytes=size,
        short_message_s=median_s(lambda: there_and_back(short, _TRIPS)) / (2 * _TRIPS),
        long_message_s=median_s(lambda: there_and_back(long, 1)) / 2,
        short_sum_s=median_s(lambda: added_up(short)),
        long_sum_s=median_s(lambda: added_up(long)),
    )


def link_constants(times: LinkTimes, start: Constants) -> tuple[LinkSpec, Constants]:
    """The link, and what collectives make of it, such that both predict what was measured.

    A sum over n ranks is 2 (n - 1) hops of 1/n of the bytes each (`collectives` in `planner/cost`).
    Where sums are faster than messages, the link is as fast as sums show it to be.
    """
    hops = 2 * (times.num_ranks - 1)
    latency_s = times.short_message_s
    sent_s = max(times.long_message_s - latency_s, 1e-9)
    summed_s = max(times.long_sum_s - times.short_sum_s, 1e-9)
    message_rate = times.long_bytes / sent_s
    sum_rate = hops / times.num_ranks * times.long_bytes / summed_s
    rate = max(message_rate, sum_rate)
    hop_s = max(times.short_sum_s / hops - latency_s, 0.0)
    constants = start.replaced(network_efficiency=sum_rate / rate, hop_s=hop_s, stage_s=hop_s)
    return LinkSpec(bytes_per_s=rate, latency_s=latency_s), constants
