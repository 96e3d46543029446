"""Weight channels, which carry packets of weights between processes.

A sender publishes the packets of one version and goes on. What comes back is an `Offer`: small and
picklable, it passes through the controller, and with it each receiver obtains its packet, when it
is ready for it and as often as it needs it. A receiver may still be busy with older weights, or be
started again. A channel moves packets and judges nothing in them: `unpack` does that. Two come with
Penstock:

- `object_store`: packets lie in the executor's object store, a bucket once.
- `cuda_ipc`: buckets stay in the memory of a GPU that both groups take turns on.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ...dataflow.errors import ConfigError
from ...dataflow.registry import Registry
from ...dataflow.runtime.placement import DeviceGroup
from .packets import Packet, WeightsError, host_room

Receiver = tuple[str, int]
"""A process that a packet is for: its group, and its number there."""


@dataclass(frozen=True, eq=False)
class Offer:
    """The packets that a process has published: all that the controller sees of them."""

    group: str  # Of the process
    process: int  # Its number there
    number: int  # Of the offer, among those of this process
    places: Mapping[Receiver, Any]  # Where each receiver's packet is, in terms of the channel

    def __str__(self) -> str:
        return f"the weights of process {self.process} of group '{self.group}'"


@dataclass(frozen=True)
class ChannelEnd:
    """The process that a channel is in, as the channel may use it."""

    group: str  # Of the process
    process: int  # Its number there
    deadline_s: float  # How long a packet may take, from the moment it is asked for
    # Stores an object in the executor's object store, and gives a reference to it.
    put: Callable[[Any], Any]
    # What references stand for; raises if that is not there within some seconds.
    get: Callable[[Sequence[Any], float], list[Any]]

    @property
    def name(self) -> Receiver:
        return self.group, self.process


class WeightChannel(Protocol):
    """A process's end of a channel: it can send and receive.

    Whatever happens to the other process, each function ends by the deadline. It must not give a
    packet other than the one that was published; bytes that are damaged on the way are found by
    their checksums later.
    """

    def room(self, num_bytes: int, device: torch.device) -> Tensor:
        """Provide memory for a bucket of the next offer.

        Args:
            num_bytes: Of the bucket.
            device: Where that lies that goes into it.

        Returns:
            u8[num_bytes], in host memory or, if the channel leaves it there, on the device.
        """
        ...

    def publish(self, packets: Mapping[Receiver, Packet]) -> Offer:
        """Have packets ready for their receivers; comes back without waiting for any of them."""
        ...

    def obtain(self, offer: Offer) -> Packet | None:
        """The packet that an offer has for this process; None if it has none.

        Raises:
            WeightsError: If it cannot be had by the deadline; says from which process, and why.
        """
        ...

    def forget(self, number: int) -> None:
        """Release the packets of this process's offer, which are no longer asked for."""

    def close(self) -> None:
        """Give up what the channel keeps in this process; its offers are void."""


class ObjectStoreChannel:
    """Packets stay in the executor's object store for as long as anybody has their offer.

    A bucket is stored once, whatever the number of packets that it is in; receivers on one machine
    read the same memory if the store does that.
    """

    def __init__(self, end: ChannelEnd) -> None:
        self._end = end
        self._numbers = itertools.count()

    def room(self, num_bytes: int, device: torch.device) -> Tensor:
        return host_room(num_bytes, device)

    def publish(self, packets: Mapping[Receiver, Packet]) -> Offer:
        stored: dict[int, Any] = {}
        places: dict[Receiver, Any] = {}
        for receiver, packet in packets.items():
            for bucket in packet.buckets:
                if id(bucket) not in stored:
                    stored[id(bucket)] = self._end.put(bucket)
            buckets = tuple(stored[id(bucket)] for bucket in packet.buckets)
            places[receiver] = self._end.put(replace(packet, buckets=buckets))
        return Offer(*self._end.name, next(self._numbers), places)

    def obtain(self, offer: Offer) -> Packet | None:
        place = offer.places.get(self._end.name)
        if place is None:
            return None
        end_s = time.monotonic() + self._end.deadline_s
        try:
            packet: Packet
            (packet,) = self._end.get([place], self._end.deadline_s)
            buckets = self._end.get(packet.buckets, max(end_s - time.monotonic(), 0.001))
            return replace(packet, buckets=tuple(buckets))
        except Exception as error:  # what a store raises depends on the executor
            raise WeightsError(
                f"{offer} cannot be had from the object store: {type(error).__name__}: {error}"
            ) from error

    def forget(self, number: int) -> None:
        """Nothing to do: the store drops objects without references."""

    def close(self) -> None:
        """Nothing to do: nothing is kept here."""


_FOLDER = "penstock.workers.weight_sync"

Transport = Literal["object_store", "cuda_ipc"]
"""Names of channels in the configuration."""

ON_DEVICE: frozenset[Transport] = frozenset({"cuda_ipc"})
"""Channels whose buckets stay in the memory of a GPU that both groups take turns on."""

DEFAULT_TRANSPORT: Transport = "object_store"
"""The channel of a run that names none."""

CHANNELS: Registry[Callable[[ChannelEnd], WeightChannel]] = Registry(
    {
        "object_store": f"{_FOLDER}.channel:ObjectStoreChannel",
        "cuda_ipc": f"{_FOLDER}.shared_device:SharedDeviceChannel",
    }
)
"""Name -> what makes a process's end of one."""


def check_transport(
    transport: Transport, routes: Iterable[tuple[DeviceGroup, DeviceGroup]]
) -> None:
    """Require that weights can get by a channel wherever they go."""
    if transport not in ON_DEVICE:
        return
    for sender, receiver in routes:
        reason = _why_not_shared(sender, receiver)
        if reason is not None:
            raise ConfigError(
                f"'executor.transport' is '{transport}', which carries weights from "
                f"'{sender.name}' to '{receiver.name}' in the memory of the GPU that both are on, "
                f"but {reason}\n    put them on one GPU, to take turns there, or leave "
                "executor.transport out"
            )


def _why_not_shared(sender: DeviceGroup, receiver: DeviceGroup) -> str | None:
    """Why one group's weights cannot get to another in a GPU's memory; None if they can."""
    for group in (sender, receiver):
        if not group.device.startswith("cuda"):
            return f"group '{group.name}' is on '{group.device}'"
    giving = {sender.devices[process] for process in sender.processes(0)} if sender.devices else {}
    if len(giving) != 1 or set(receiver.devices) != giving:
        return "they are not on one GPU together"
    return None
