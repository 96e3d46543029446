"""The contract of channels, which carry packets of weights between processes.

A sender publishes the packets of one version and goes on. What comes back is an `Offer`: small and
picklable, it passes through the controller, and with it each receiver obtains its packet, when it
is ready for it and as often as it needs it. A receiver may still be busy with older weights, or be
started again. A channel moves packets and judges nothing in them: `unpack` does that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .packets import Packet

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
    host: str  # The address on which it may listen; the other processes can connect to it there
    deadline_s: float  # How long a packet may take, from the moment somebody asks for it
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
            WeightsError: If it cannot be had by the deadline; says of whom, and why.
        """
        ...

    def forget(self, number: int) -> None:
        """Nobody will ask for the packets of this process's offer again."""

    def close(self, timeout_s: float) -> None:
        """End what the channel keeps running in this process, within about `timeout_s` seconds."""
