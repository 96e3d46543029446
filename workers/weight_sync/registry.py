"""The weight channels there are, one line each; see `channel.py` for what one must do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from .channel import ChannelEnd, WeightChannel
from .object_store import ObjectStoreChannel
from .point_to_point import PointToPointChannel

__all__ = ["CHANNELS", "DEFAULT_TRANSPORT", "Transport"]

Transport = Literal["object_store", "point_to_point"]
"""How the configuration calls them."""

DEFAULT_TRANSPORT: Transport = "object_store"

CHANNELS: Mapping[Transport, Callable[[ChannelEnd], WeightChannel]] = {
    "object_store": ObjectStoreChannel,
    "point_to_point": PointToPointChannel,
}
"""Name -> what makes a process's end of one."""
