"""The weight channels that come with Penstock; `channel.py` says what one must do.

- `object_store`: packets lie in the executor's object store, a bucket once.
- `cuda_ipc`: buckets stay in the memory of a GPU that both groups take turns on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal

from ...dataflow.errors import ConfigError
from ...dataflow.registry import Registry
from ...dataflow.runtime.placement import DeviceGroup

if TYPE_CHECKING:
    from .channel import ChannelEnd, WeightChannel

_FOLDER = "penstock.workers.weight_sync"

Transport = Literal["object_store", "cuda_ipc"]
"""Names of channels in the configuration."""

DEFAULT_TRANSPORT: Transport = "object_store"
"""The channel of a run that names none."""

CHANNELS: Registry[Callable[[ChannelEnd], WeightChannel]] = Registry(
    {
        "object_store": f"{_FOLDER}.object_store:ObjectStoreChannel",
        "cuda_ipc": f"{_FOLDER}.shared_device:SharedDeviceChannel",
    }
)
"""Name -> what makes a process's end of one."""

_WHY_NOT = Registry[Callable[[DeviceGroup, DeviceGroup], str | None]](
    {"cuda_ipc": f"{_FOLDER}.shared_device:why_not_shared"}
)
"""Name -> why one group's weights cannot get to another by it; of those that not all groups can."""


def check_transport(
    transport: Transport, routes: Iterable[tuple[DeviceGroup, DeviceGroup]]
) -> None:
    """Require that weights can get by a channel wherever they go."""
    why_not = _WHY_NOT.get(transport)
    if why_not is None:
        return
    for sender, receiver in routes:
        reason = why_not(sender, receiver)
        if reason is not None:
            raise ConfigError(
                f"'executor.transport' is '{transport}', which carries weights from "
                f"'{sender.name}' to '{receiver.name}' in the memory of the GPU that both are on, "
                f"but {reason}\n    put them on one GPU, to take turns there, or leave "
                "executor.transport out"
            )
