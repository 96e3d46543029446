"""Decisions that a person fixed before the search begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...dataflow.errors import PlanError
from ...dataflow.graph.proxies import nearest
from ..inputs.cluster import ClusterSpec
from .allocation import Space
from .options import CallNode, Option, Partition, partitions


@dataclass(frozen=True, kw_only=True)
class Pins:
    """Parts of a plan that the search must keep."""

    together: tuple[tuple[str, ...], ...] = ()  # call groups of one entry share a group
    apart: tuple[tuple[str, ...], ...] = ()  # no two call groups of one entry share a group
    # call group -> number of devices of its group
    num_devices: Mapping[str, int] = field(default_factory=dict[str, int])
    # call group -> the devices of its group; other call groups may join it there
    devices: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    # call name -> fields of its `Layout` with the values they must have
    layouts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    # role without a model -> processes of each of its ranks
    num_processes: Mapping[str, int] = field(default_factory=dict[str, int])
    # whether a call group may have an option; must be deterministic
    allows: Callable[[str, Option], bool] = lambda call_group, option: True

    def check(self, calls: Sequence[CallNode], cluster: ClusterSpec) -> None:
        call_groups = list(dict.fromkeys(call.call_group for call in calls))
        named = [("together", u) for s in self.together for u in s]
        named += [("apart", u) for s in self.apart for u in s]
        named += [("num_devices", u) for u in self.num_devices]
        named += [("devices", u) for u in self.devices]
        for pin, call_group in named:
            if call_group not in call_groups:
                raise PlanError(
                    f"pin {pin} names call group '{call_group}'; {nearest(call_group, call_groups)}"
                )
        self._check_devices(cluster)
        self._check_groups(call_groups)

    def _check_devices(self, cluster: ClusterSpec) -> None:
        for call_group, count in self.num_devices.items():
            if not 1 <= count <= cluster.num_devices:
                raise PlanError(
                    f"pin num_devices gives '{call_group}' {count} devices; expected 1 to "
                    f"{cluster.num_devices}, as many as cluster '{cluster.name}' has"
                )
        space = Space(cluster)
        owner: dict[int, str] = {}
        for call_group, devices in self.devices.items():
            if not devices or len(set(devices)) != len(devices):
                raise PlanError(f"pin devices of '{call_group}' is empty or names a device twice")
            for device in devices:
                if not 0 <= device < cluster.num_devices:
                    raise PlanError(
                        f"pin devices gives '{call_group}' device {device}, but cluster "
                        f"'{cluster.name}' has devices 0 to {cluster.num_devices - 1}"
                    )
                other = owner.setdefault(device, call_group)
                if set(self.devices[other]) != set(devices):
                    raise PlanError(
                        f"pin devices gives device {device} to '{other}' and to '{call_group}' but "
                        "not the same devices to both; groups share no device"
                    )
            if self.num_devices.get(call_group, len(devices)) != len(devices):
                raise PlanError(
                    f"pins give '{call_group}' {self.num_devices[call_group]} devices and name "
                    f"{len(devices)}"
                )
            space.index_of(devices, f"pin devices of '{call_group}'")

    def _check_groups(self, call_groups: Sequence[str]) -> None:
        kept = next(partitions(call_groups, self.all_together(), self.all_apart()), None)
        if kept is None or any(len({*entry}) < len(entry) for entry in self.apart):
            both = [*(("together", e) for e in self.together), *(("apart", e) for e in self.apart)]
            said = [f"{pin}=[{', '.join(entry)}]" for pin, entry in both]
            said += [f"devices.{name}={[*ids]}" for name, ids in self.devices.items()]
            raise PlanError(
                "the pins contradict each other: which calls share a group cannot be as all of "
                f"these say\n    drop one of {', '.join(said)}"
            )

    def all_together(self) -> tuple[tuple[str, ...], ...]:
        same: dict[frozenset[int], list[str]] = {}
        for call_group, devices in self.devices.items():
            same.setdefault(frozenset(devices), []).append(call_group)
        return (*self.together, *(tuple(call_groups) for call_groups in same.values()))

    def all_apart(self) -> tuple[tuple[str, ...], ...]:
        different = [
            (a, b)
            for a, on_a in self.devices.items()
            for b, on_b in self.devices.items()
            if a < b and set(on_a) != set(on_b)
        ]
        return (*self.apart, *different)

    def fixed(self, partition: Partition) -> tuple[tuple[int, ...], ...]:
        return tuple(
            next((tuple(sorted(self.devices[u])) for u in group if u in self.devices), ())
            for group in partition
        )

    def accepts(self, call_group: str, option: Option) -> bool:
        for name, layout in option.layouts.items():
            for key, value in self.layouts.get(name, {}).items():
                if getattr(layout, key) != value:
                    return False
        return self.allows(call_group, option)
