"""A transfer plan carried out by packets, which a weight channel carries to their receivers.

`pack` runs where the source's tensors are and `unpack` where the destination's are; a `Packet` is
plain arrays, and tensors on a device if its channel leaves them there. Nothing is written before
everything is checked.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from ...planner.resharding.box import Box, whole
from ...planner.resharding.plan import TransferPlan
from .device_slices import (
    Message,
    Part,
    Tensors,
    dtype_of,
    messages_of,
    plan_stamp,
    read_view,
    write_view,
)
from .version_tracker import HeldWeights, WeightsError

_ROW = 4096
_WORDS: Mapping[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksums(message: Message, payload: Tensor, version: int) -> list[int]:
    """Return a checksum of each part of a packed message.

    Args:
        message: Describes the parts.
        payload: u8[message.num_bytes], in host memory or on a device, which decides how.
        version: Version of the weights.
    """
    if payload.device.type != "cpu":
        return checksums_of_sums(message, payload, version)
    return [
        checksum(part, data, version)
        for part, data in zip(message.parts, message.slices(payload), strict=True)
    ]


def checksum(part: Part, data: Tensor, version: int) -> int:
    """XXH3 over a part's bytes, seeded with its identity: several times faster than a CRC.

    Args:
        part: Identifies the bytes.
        data: u8[n], contiguous, in host memory.
        version: Version of the weights.
    """
    digest = xxhash.xxh3_64_digest(data.numpy().data, _seed(part, len(data), version))
    return int.from_bytes(digest, "little", signed=True)


def checksums_of_sums(message: Message, payload: Tensor, version: int) -> list[int]:
    """Return checksums of sums that are made on the payload's device and copied together."""
    words = _WORDS[message.element_bytes]
    sums = [_sums(data.view(words)) for data in message.slices(payload)]
    on_host = torch.cat(sums).cpu().split([len(one) for one in sums])
    found: list[int] = []
    for part, size, one in zip(message.parts, message.sizes, on_host, strict=True):
        digest = xxhash.xxh3_64_digest(one.numpy().data, _seed(part, size, version))
        found.append(int.from_bytes(digest, "little", signed=True))
    return found


def _sums(words: Tensor) -> Tensor:
    """Return the sums of every column and of every row, and the words of no whole row: i64."""
    rows = len(words) // _ROW
    table, rest = words[: rows * _ROW].view(rows, _ROW), words[rows * _ROW :]
    by_column, by_row = table.sum(0, dtype=torch.int64), table.sum(1, dtype=torch.int64)
    return torch.cat([by_column, by_row, rest.to(torch.int64)])


def _seed(part: Part, num_bytes: int, version: int) -> int:
    identity = f"{part.param.name}\0{part.move.box}\0{num_bytes}".encode()
    stamp = version.to_bytes(8, "little", signed=True)
    return xxhash.xxh3_64_intdigest(stamp, xxhash.xxh3_64_intdigest(identity))


Bucket = Any
"""u8[bytes]: a numpy array in host memory, or a tensor on a device."""

Room = Callable[[int, torch.device], Tensor]
"""Where a bucket is packed: from its bytes and the device of what goes into it to u8[bytes]."""

Packed = dict[tuple[str, tuple[tuple[str, Box], ...]], tuple[Bucket, list[int]]]
"""Buckets with their checksums, by dtype and by parameters and boxes in them."""


def host_room(num_bytes: int, device: torch.device) -> Tensor:
    """A `Room` in host memory, whatever the device."""
    return torch.empty(num_bytes, dtype=torch.uint8)


@dataclass(frozen=True)
class Packet:
    """What one device sends another: numbers and arrays only.

    Attributes:
        plan: Stamp of the plan.
        source: Device that packed it.
        destination: Device that it is for.
        version: Of the weights.
        params: i64[slices], index of each slice's parameter in the plan.
        checksums: i64[slices], one of each slice.
        buckets: u8[bytes] each, slices end to end; what goes to several devices alike is one array
            in all their packets.
    """

    plan: int
    source: int
    destination: int
    version: int
    params: NDArray[np.int64]
    checksums: NDArray[np.int64]
    buckets: tuple[Bucket, ...]

    @property
    def num_bytes(self) -> int:
        """Of the slices."""
        return sum(len(bucket) for bucket in self.buckets)


def pack(
    plan: TransferPlan,
    device: int,
    tensors: Tensors,
    version: int,
    *,
    room: Room = host_room,
    packed: Packed | None = None,
) -> dict[int, Packet]:
    """Read what a device has to send out of its engine's tensors.

    Elements are converted to the plan's dtype here, so that what travels is what is stored.

    Args:
        plan: Of the transfer.
        device: Who sends.
        tensors: The source engine's tensors on it.
        version: Of these weights.
        room: Where buckets are packed.
        packed: What has been packed of these weights for others, and will be for the next: what
            goes to both alike is packed once. Nothing by default.

    Returns:
        Destination -> its packet; nothing for devices that need nothing of this one.

    Raises:
        WeightsError: If the plan does not fit the tensors.
    """
    index = _param_index(plan)
    packed = {} if packed is None else packed
    sent: dict[int, list[tuple[Message, Bucket, list[int]]]] = {}
    for message in messages_of(plan, [device])[device]:
        if message.source != device:
            continue
        key = plan.dtype, tuple((part.param.name, part.move.box) for part in message.parts)
        if key not in packed:
            packed[key] = _packed(message, tensors, dtype_of(plan), version, room)
        for destination in message.destinations:
            sent.setdefault(destination, []).append((message, *packed[key]))
    stamp = plan_stamp(plan)
    return {
        destination: Packet(
            plan=stamp,
            source=device,
            destination=destination,
            version=version,
            params=np.array([index[p.param.name] for m, _, _ in given for p in m.parts], np.int64),
            checksums=np.array([c for _, _, values in given for c in values], np.int64),
            buckets=tuple(bucket for _, bucket, _ in given),
        )
        for destination, given in sorted(sent.items())
    }


def _packed(
    message: Message, tensors: Tensors, dtype: torch.dtype, version: int, room: Room
) -> tuple[Bucket, list[int]]:
    """A message's bytes, and the checksum of each part."""
    read = [read_view(part, tensors) for part in message.parts]
    payload = room(message.num_bytes, read[0].device)
    for part, data, values in zip(message.parts, message.slices(payload), read, strict=True):
        data.view(dtype).view(part.shape).copy_(values)
    bucket = payload.numpy() if payload.device.type == "cpu" else payload
    return bucket, checksums(message, payload, version)


def unpack(
    plan: TransferPlan,
    device: int,
    packets: Sequence[Packet],
    tensors: Tensors,
    version: int,
    held: HeldWeights,
) -> int:
    """Write what a device receives into its engine's tensors: all of it or nothing.

    Args:
        plan: As at the sources.
        device: Who receives.
        packets: One from every device that has something for it, in any order.
        tensors: The destination engine's tensors on it.
        version: That is expected.
        held: Is told of every slice.

    Returns:
        Bytes written.

    Raises:
        WeightsError: Names the parameter and what is wrong with it: a slice that is missing or
            damaged, another version, another plan. Nothing has been written then.
    """
    ready = [
        (part, data, write_view(part, tensors, dtype_of(plan)))
        for part, data in _checked(plan, device, packets, version)
    ]
    for part, data, place in ready:
        held.writing(part.param.name, part.move.box, version)
        place.copy_(data)
        held.wrote(part.param.name, part.move.box, version)
    return sum(packet.num_bytes for packet in packets)


def unpack_whole(
    plan: TransferPlan, device: int, packets: Sequence[Packet], version: int, held: HeldWeights
) -> dict[str, Tensor]:
    """What a device receives, as tensors of their own: all of it or nothing.

    Args:
        plan: As at the sources; the device is to have whole parameters.
        device: Who receives.
        packets: One from every device that has something for it, in any order.
        version: That is expected.
        held: Is told of every slice.

    Returns:
        Tensors by the receiver's names, on the device of the packets. A parameter that has come in
        one piece is a view of its packet, which must not be written to; others are put together.

    Raises:
        WeightsError: As `unpack` does.
    """
    found: dict[str, Tensor] = {}
    for part, data in _checked(plan, device, packets, version):
        param = part.param
        held.writing(param.name, part.move.box, version)
        if part.move.box == whole(param.shape):
            found[param.destination_tensor] = data
        else:
            if param.destination_tensor not in found:
                found[param.destination_tensor] = data.new_empty(param.shape)
            write_view(part, found, data.dtype).copy_(data)
        held.wrote(param.name, part.move.box, version)
    return found


def _param_index(plan: TransferPlan) -> Mapping[str, int]:
    return {param.name: i for i, param in enumerate(plan.params)}


def _by_source(
    packets: Sequence[Packet], device: int, expected: Mapping[int, Sequence[Message]]
) -> Mapping[int, Packet]:
    given: dict[int, Packet] = {}
    for packet in packets:
        if packet.destination != device or packet.source not in expected:
            raise WeightsError(
                f"device {device} was given a packet from device {packet.source} for device "
                f"{packet.destination}; by the plan, devices {sorted(expected)} send to it"
            )
        if packet.source in given:
            raise WeightsError(
                f"device {device} was given two packets from device {packet.source}; pass one "
                "of each source"
            )
        given[packet.source] = packet
    return given


def _check_packet(
    packet: Packet, device: int, parts: Sequence[Part], index: Mapping[str, int], stamp: int,
    version: int,
) -> None:  # fmt: skip
    """Refuse what can be refused without looking at the bytes."""
    where = f"packet from device {packet.source} to device {device}"
    if packet.version != version:
        raise WeightsError(
            f"{where}: {parts[0]} and all others are of version {packet.version}; expected version "
            f"{version}. Pack them again after the update"
        )
    listed = packet.params.tolist()
    for at, part in enumerate(parts):
        if at >= len(listed) or listed[at] != index[part.param.name]:
            raise WeightsError(
                f"{where}: {part} is missing, the slice numbered {at} of {len(parts)}; the packet "
                f"has {len(listed)}"
            )
    if packet.plan != stamp:
        raise WeightsError(
            f"{where}: {parts[0]} and all others were packed by another plan; both sides must use "
            "the same"
        )
    if len(listed) != len(parts) or len(packet.checksums) != len(parts):
        raise WeightsError(
            f"{where}: it lists {len(listed)} slices and {len(packet.checksums)} checksums; the "
            f"plan ends with {parts[-1]}, the last of {len(parts)}"
        )


def _checked(
    plan: TransferPlan, device: int, packets: Sequence[Packet], version: int
) -> list[tuple[Part, Tensor]]:
    """Return every slice that a device is to receive, with its values."""
    index, stamp = _param_index(plan), plan_stamp(plan)
    expected: dict[int, list[Message]] = {}
    for message in messages_of(plan, [device])[device]:
        if message.source != device:
            expected.setdefault(message.source, []).append(message)
    given = _by_source(packets, device, expected)
    ready: list[tuple[Part, Tensor]] = []
    for source, messages in expected.items():
        parts = [part for message in messages for part in message.parts]
        packet = given.get(source)
        if packet is None:
            raise WeightsError(
                f"device {device} lacks {parts[0]}: no packet has come from device {source}. "
                "Unpack when all packets are there"
            )
        _check_packet(packet, device, parts, index, stamp, version)
        ready += _slices(packet, messages, dtype_of(plan))
    return ready


def _slices(
    packet: Packet, messages: Sequence[Message], dtype: torch.dtype
) -> list[tuple[Part, Tensor]]:
    """Return every slice of a packet with its values."""
    where = f"packet from device {packet.source} to device {packet.destination}"
    given = iter(packet.checksums.tolist())
    ready: list[tuple[Part, Tensor]] = []
    for at, message in enumerate(messages):
        payload = _tensor(packet.buckets[at]) if at < len(packet.buckets) else torch.empty(0)
        if len(payload) != message.num_bytes:
            ends = zip(message.parts, message.ends, strict=True)
            part = next((p for p, end in ends if end > len(payload)), message.parts[-1])
            raise WeightsError(
                f"{where}: {part} is not whole: its bucket has {len(payload)} bytes and should "
                f"have {message.num_bytes}"
            )
        found = checksums(message, payload, packet.version)
        for part, data, one in zip(message.parts, message.slices(payload), found, strict=True):
            if one != next(given):
                raise WeightsError(f"{where}: {part} has the wrong checksum; send it again")
            ready.append((part, data.view(dtype).view(part.shape)))
    return ready


def _tensor(bucket: Bucket) -> Tensor:
    if isinstance(bucket, Tensor):
        return bucket
    with warnings.catch_warnings():
        # Arrays out of an object store are read-only, which torch warns of; they are only read.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(bucket)  # pyright: ignore[reportUnknownMemberType]
