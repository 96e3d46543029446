"""A transfer plan carried out by packets, which a weight channel carries to their receivers.

`pack` runs where the source's tensors are and `unpack` where the destination's are; a `Packet` is
plain arrays. Nothing is written before everything is checked.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...planner.resharding.plan import TransferPlan
from .device_slices import (
    Message,
    Part,
    Tensors,
    checksum,
    dtype_of,
    messages_of,
    plan_stamp,
    read_view,
    write_view,
)
from .version_tracker import HeldWeights, WeightsError

__all__ = ["Packet", "pack", "unpack"]


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
    buckets: tuple[NDArray[np.uint8], ...]

    @property
    def num_bytes(self) -> int:
        """Of the slices."""
        return sum(len(bucket) for bucket in self.buckets)


def pack(plan: TransferPlan, device: int, tensors: Tensors, version: int) -> dict[int, Packet]:
    """Read what a device has to send out of its engine's tensors.

    Elements are converted to the plan's dtype here, so that what travels is what is stored.

    Args:
        plan: Of the transfer.
        device: Who sends.
        tensors: The source engine's tensors on it.
        version: Of these weights.

    Returns:
        Destination -> its packet; nothing for devices that need nothing of this one.

    Raises:
        WeightsError: If the plan does not fit the tensors.
    """
    dtype, index = dtype_of(plan), _param_index(plan)
    sent: dict[int, list[tuple[Message, NDArray[np.uint8], list[int]]]] = {}
    for message in messages_of(plan, [device])[device]:
        if message.source != device:
            continue
        payload = torch.empty(message.num_bytes, dtype=torch.uint8)
        checksums: list[int] = []
        for part, data in zip(message.parts, message.slices(payload), strict=True):
            data.view(dtype).view(part.shape).copy_(read_view(part, tensors))
            checksums.append(checksum(part, data, version))
        for destination in message.destinations:
            sent.setdefault(destination, []).append((message, payload.numpy(), checksums))
    stamp = plan_stamp(plan)
    return {
        destination: Packet(
            plan=stamp,
            source=device,
            destination=destination,
            version=version,
            params=np.array([index[p.param.name] for m, _, _ in given for p in m.parts], np.int64),
            checksums=np.array([c for _, _, values in given for c in values], np.int64),
            buckets=tuple(payload for _, payload, _ in given),
        )
        for destination, given in sorted(sent.items())
    }


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
    dtype, index, stamp = dtype_of(plan), _param_index(plan), plan_stamp(plan)
    expected: dict[int, list[Message]] = {}
    for message in messages_of(plan, [device])[device]:
        if message.source != device:
            expected.setdefault(message.source, []).append(message)
    given = _by_source(packets, device, expected)
    ready: list[tuple[Part, Tensor, Tensor]] = []
    for source, messages in expected.items():
        parts = [part for message in messages for part in message.parts]
        packet = given.get(source)
        if packet is None:
            raise WeightsError(
                f"device {device} lacks {parts[0]}: no packet has come from device {source}. "
                "Unpack when all packets are there"
            )
        _check_packet(packet, device, parts, index, stamp, version)
        ready += _checked(packet, messages, tensors, dtype)
    for part, data, place in ready:
        held.writing(part.param.name, part.move.box, version)
        place.copy_(data)
        held.wrote(part.param.name, part.move.box, version)
    return sum(packet.num_bytes for packet in given.values())


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
    packet: Packet, messages: Sequence[Message], tensors: Tensors, dtype: torch.dtype
) -> list[tuple[Part, Tensor, Tensor]]:
    """Every slice with its values and the place that they go to.

    Raises:
        WeightsError: If bytes are missing or damaged, or there is no such place.
    """
    where = f"packet from device {packet.source} to device {packet.destination}"
    checksums = iter(packet.checksums.tolist())
    ready: list[tuple[Part, Tensor, Tensor]] = []
    for at, message in enumerate(messages):
        payload = _tensor(packet.buckets[at]) if at < len(packet.buckets) else torch.empty(0)
        if len(payload) != message.num_bytes:
            ends = zip(message.parts, message.ends, strict=True)
            part = next((p for p, end in ends if end > len(payload)), message.parts[-1])
            raise WeightsError(
                f"{where}: {part} is not whole: its bucket has {len(payload)} bytes and should "
                f"have {message.num_bytes}"
            )
        for part, data in zip(message.parts, message.slices(payload), strict=True):
            if checksum(part, data, packet.version) != next(checksums):
                raise WeightsError(f"{where}: {part} has the wrong checksum; send it again")
            values = data.view(dtype).view(part.shape)
            ready.append((part, values, write_view(part, tensors, dtype)))
    return ready


def _tensor(bucket: NDArray[np.uint8]) -> Tensor:
    with warnings.catch_warnings():
        # Arrays out of an object store are read-only, which torch warns of; they are only read.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(bucket)  # pyright: ignore[reportUnknownMemberType]
