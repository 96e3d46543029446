"""A transfer plan as data: moves, and the bytes of every device.

Nothing here decides anything; `plan_transfer.py` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from pydantic import TypeAdapter

from .sharding import Box


@dataclass(frozen=True, slots=True)
class MovedParam:
    """A logical parameter, and the tensors it lies in on either side."""

    name: str  # in the checkpoint
    shape: tuple[int, ...]  # in the checkpoint
    source_tensor: str  # the source engine's tensor
    source_dims: tuple[int, ...]  # its dimensions, as in `StoredParam.dims`
    destination_tensor: str  # the destination engine's tensor
    destination_dims: tuple[int, ...]  # dimensions of the destination's tensor
    bucket: int  # parameters of one bucket travel together; buckets go one after another


@dataclass(frozen=True, slots=True)
class Move:
    """One box of some parameters, from one device to another; a copy if they are the same."""

    group: int  # index into `TransferPlan.groups`: of which parameters, the same box of each
    box: Box  # which indices of the logical parameter
    source: int  # the device that sends
    destination: int  # the device that receives
    source_start: tuple[int, ...]  # where the box begins in the source engine's tensor
    destination_start: tuple[int, ...]  # where it begins in the destination engine's tensor

    @property
    def is_copy(self) -> bool:
        return self.source == self.destination


@dataclass(frozen=True, slots=True)
class DeviceTraffic:
    """One device's share of a transfer, in bytes of the destination's dtype."""

    device: int  # the device's number
    needed_bytes: int = 0  # size of its destination shard
    kept_bytes: int = 0  # the part of it that the device already holds
    received_bytes: int = 0  # what arrives; equal to `lower_bound_bytes`
    sent_bytes: int = 0  # what it sends
    unused_bytes: int = 0  # what it holds of the source and does not need: redundancy, if both stay
    # the most it packs and unpacks in one bucket; a box that a group sends to several devices is
    # packed once
    staging_bytes: int = 0

    @property
    def lower_bound_bytes(self) -> int:
        return self.needed_bytes - self.kept_bytes

    @property
    def peak_bytes(self) -> int:
        return self.needed_bytes + self.staging_bytes


@dataclass(frozen=True)
class TransferPlan:
    """From one sharding to another."""

    params: tuple[MovedParam, ...]  # what is moved
    # parameters that move alike, as indices into `params`: the layers of a stage
    groups: tuple[tuple[int, ...], ...]
    moves: tuple[Move, ...]  # how; copies first
    devices: tuple[DeviceTraffic, ...]  # bytes of every device of either side
    dtype: str  # in which elements travel: the destination's

    @cached_property
    def traffic(self) -> Mapping[int, DeviceTraffic]:
        return {share.device: share for share in self.devices}

    @property
    def num_buckets(self) -> int:
        return 1 + max((param.bucket for param in self.params), default=-1)

    @property
    def sent_bytes(self) -> int:
        return sum(share.sent_bytes for share in self.devices)

    @property
    def lower_bound_bytes(self) -> int:
        return sum(share.lower_bound_bytes for share in self.devices)

    def explain(self) -> str:
        busiest = max(self.devices, key=lambda share: share.received_bytes)
        lines = [
            f"{len(self.params)} parameters in {self.num_buckets} bucket(s), "
            f"{len(self.moves)} moves",
            f"sent {_size(self.sent_bytes)} in all (lower bound {_size(self.lower_bound_bytes)})",
            f"device {busiest.device} receives most: {_size(busiest.received_bytes)} of "
            f"{_size(busiest.needed_bytes)}; it sends {_size(busiest.sent_bytes)}",
            f"most memory for shard and staging: "
            f"{_size(max(share.peak_bytes for share in self.devices))}",
        ]
        return "\n".join(lines)

    def to_json(self) -> str:
        return _adapter().dump_json(self).decode()

    @staticmethod
    def from_json(text: str) -> TransferPlan:
        return _adapter().validate_json(text)


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[TransferPlan]:
    return TypeAdapter(TransferPlan)


def window(box: Box, dims: Sequence[int], start: Sequence[int]) -> tuple[slice, ...]:
    """Index of a box in an engine's tensor.

    `tensor[window(...)]` has the box's elements with dimensions in the order of `dims`.
    """
    return tuple(
        slice(begin, begin + box[dim][1] - box[dim][0])
        for dim, begin in zip(dims, start, strict=True)
    )


def _size(num_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes} B"
