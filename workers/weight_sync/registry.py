"""The weight channels there are; see `channel.py` for what one must do.

The default, through the executor's object store, is so short that it stands here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Literal

from .channel import ChannelEnd, Offer, Receiver, WeightChannel
from .packets import Packet
from .point_to_point import PointToPointChannel
from .version_tracker import WeightsError

__all__ = ["CHANNELS", "DEFAULT_TRANSPORT", "ObjectStoreChannel", "Transport"]


class ObjectStoreChannel:
    """Packets stay in the executor's object store for as long as anybody has their offer.

    Args:
        end: The process that it is in.
    """

    def __init__(self, end: ChannelEnd) -> None:
        self._end = end
        self._numbers = itertools.count()

    def publish(self, packets: Mapping[Receiver, Packet]) -> Offer:
        """See `WeightChannel.publish`."""
        places = {receiver: self._end.put(packet) for receiver, packet in packets.items()}
        return Offer(*self._end.name, next(self._numbers), places)

    def obtain(self, offer: Offer) -> Packet | None:
        """See `WeightChannel.obtain`."""
        place = offer.places.get(self._end.name)
        if place is None:
            return None
        try:
            return self._end.get(place)
        except Exception as error:  # what a store raises depends on the executor
            raise WeightsError(
                f"{offer} cannot be had from the object store: {type(error).__name__}: {error}"
            ) from error

    def forget(self, number: int) -> None:
        """Nothing to do: the store forgets what nobody has a reference to."""

    def close(self, timeout_s: float) -> None:
        """Nothing to do: nothing runs."""


Transport = Literal["object_store", "point_to_point"]
"""How the configuration calls them."""

DEFAULT_TRANSPORT: Transport = "object_store"

CHANNELS: Mapping[Transport, Callable[[ChannelEnd], WeightChannel]] = {
    "object_store": ObjectStoreChannel,
    "point_to_point": PointToPointChannel,
}
"""Name -> what makes a process's end of one."""
