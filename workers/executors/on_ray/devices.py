"""Several processes on one GPU: what Ray is asked for where groups share devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ....dataflow.errors import PlanError
from ....dataflow.runtime.placement import DeviceGroup, sharing

__all__ = ["SharedDevices"]


class SharedDevices:
    """A bundle of resources for every GPU that several groups have.

    The processes on a device are scheduled into its bundle, each with an equal fraction of the one
    GPU in it. CPUs are shared without being asked for.

    Args:
        groups: All groups.
    """

    def __init__(self, groups: Sequence[DeviceGroup]) -> None:
        shared = sharing(groups)
        self._named = {
            g.name: g.devices for g in groups if g.name in shared and g.device.startswith("cuda")
        }
        self._uses = Counter(device for devices in self._named.values() for device in devices)
        self._bundles = {device: index for index, device in enumerate(sorted(self._uses))}
        self._reserved: Any = None

    def reserve(self, timeout_s: float) -> None:
        """Have Ray set the GPUs aside; nothing if none is shared.

        Raises:
            PlanError: If they are not there within `timeout_s` seconds.
        """
        if not self._bundles:
            return
        self._reserved = placement_group([{"GPU": 1}] * len(self._bundles), strategy="PACK")
        try:
            ray.get(self._reserved.ready(), timeout=timeout_s)
        except GetTimeoutError as error:
            self.release()
            raise PlanError(
                f"the plan's groups share {len(self._bundles)} GPUs, which Ray did not have free "
                f"within {timeout_s:g} s (it has {ray.cluster_resources().get('GPU', 0):g})"
            ) from error

    def options(self, group: DeviceGroup, process: int) -> dict[str, Any]:
        """Ray's options for the actor that is one process of a group."""
        if not group.device.startswith("cuda"):
            return {}
        if group.name not in self._named:
            return {"num_gpus": 1}
        device = group.devices[process]
        return {
            "num_gpus": 1 / self._uses[device],
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._reserved, placement_group_bundle_index=self._bundles[device]
            ),
        }

    def release(self) -> None:
        """Give the GPUs back; idempotent."""
        reserved, self._reserved = self._reserved, None
        if reserved is not None and ray.is_initialized():
            remove_placement_group(reserved)
