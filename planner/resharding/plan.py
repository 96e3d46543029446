"""A transfer plan as data: moves, and the bytes of every device.

Nothing here decides anything; `plan_transfer.py` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from pydantic import TypeAdapter

from .box import Box


@dataclass(frozen=True, slots=True)
class MovedParam:
    """A logical parameter, and the tensors it lies in on either side.

    Attributes:
        name: In the checkpoint.
        shape: In the checkpoint.
        source_tensor: The source engine's tensor.
        source_dims: Its dimensions, as in `StoredParam.dims`.
        destination_tensor: The destination engine's tensor.
        destination_dims: Dimensions of the destination's tensor.
        bucket: Parameters of one bucket travel together; buckets go one after another.
    """

    name: str
    shape: tuple[int, ...]
    source_tensor: str
    source_dims: tuple[int, ...]
    destination_tensor: str
    destination_dims: tuple[int, ...]
    bucket: int


@dataclass(frozen=True, slots=True)
class Move:
    """One box of some parameters, from one device to another; a copy if they are the same.

    Attributes:
        group: Index into `TransferPlan.groups`: of which parameters, the same box of each.
        box: Which indices of the logical parameter.
        source: The device that sends.
        destination: The device that receives.
        source_start: Where the box begins in the source engine's tensor.
        destination_start: Where it begins in the destination engine's tensor.
    """

    group: int
    box: Box
    source: int
    destination: int
    source_start: tuple[int, ...]
    destination_start: tuple[int, ...]

    @property
    def is_copy(self) -> bool:
        """Whether nothing is sent."""
        return self.source == self.destination


@dataclass(frozen=True, slots=True)
class DeviceTraffic:
    """One device's share of a transfer, in bytes of the destination's dtype.

    Attributes:
        device: The device's number.
        needed_bytes: Size of its destination shard.
        kept_bytes: The part of it that the device already holds.
        received_bytes: What arrives; equal to `lower_bound_bytes`.
        sent_bytes: What it sends.
        unused_bytes: What it holds of the source and does not need: redundancy, if both stay.
        staging_bytes: The most it packs and unpacks in one bucket; a box that a group sends to
            several devices is packed once.
    """

    device: int
    needed_bytes: int = 0
    kept_bytes: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    unused_bytes: int = 0
    staging_bytes: int = 0

    @property
    def lower_bound_bytes(self) -> int:
        """What no plan can do without: what it needs and lacks."""
        return self.needed_bytes - self.kept_bytes

    @property
    def peak_bytes(self) -> int:
        """Destination shard and staging; the source shard comes on top where it is kept apart."""
        return self.needed_bytes + self.staging_bytes


@dataclass(frozen=True)
class TransferPlan:
    """From one sharding to another.

    Attributes:
        params: What is moved.
        groups: Parameters that move alike, as indices into `params`: the layers of a stage.
        moves: How; copies first.
        devices: Bytes of every device of either side.
        dtype: In which elements travel: the destination's.
    """

    params: tuple[MovedParam, ...]
    groups: tuple[tuple[int, ...], ...]
    moves: tuple[Move, ...]
    devices: tuple[DeviceTraffic, ...]
    dtype: str

    @cached_property
    def traffic(self) -> Mapping[int, DeviceTraffic]:
        """Device -> its share."""
        return {share.device: share for share in self.devices}

    @property
    def num_buckets(self) -> int:
        """How many buckets the parameters are cut into."""
        return 1 + max((param.bucket for param in self.params), default=-1)

    @property
    def sent_bytes(self) -> int:
        """All that is sent."""
        return sum(share.sent_bytes for share in self.devices)

    @property
    def lower_bound_bytes(self) -> int:
        """All that must be sent."""
        return sum(share.lower_bound_bytes for share in self.devices)

    def explain(self) -> str:
        """A few lines for people: bytes and bound."""
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
        """The whole plan as JSON."""
        return _adapter().dump_json(self).decode()

    @staticmethod
    def from_json(text: str) -> TransferPlan:
        """What `to_json` wrote."""
        return _adapter().validate_json(text)


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[TransferPlan]:
    return TypeAdapter(TransferPlan)


def window(box: Box, dims: Sequence[int], start: Sequence[int]) -> tuple[slice, ...]:
    """Index of a box in an engine's tensor.

    `tensor[window(...)]` has the box's elements with dimensions in the order of `dims`.

    Args:
        box: Indices of the logical parameter.
        dims: Dimensions of the tensor, as in `StoredParam.dims`.
        start: Where the box begins in it.
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
