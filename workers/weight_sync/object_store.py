"""The channel through the executor's object store, which is the default."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .channel import ChannelEnd, Offer, Receiver
from .packets import Packet, WeightsError, host_room


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
        """Nothing to do: the store forgets what nobody has a reference to."""

    def close(self, timeout_s: float) -> None:
        """Nothing to do: nothing runs."""
