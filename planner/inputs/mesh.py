"""The devices that a group of calls runs on, as the models of time and memory see them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .cluster import ClusterSpec, LinkSpec, NodeGroup


@dataclass(frozen=True)
class Mesh:
    """Some devices of a cluster: whole nodes of any node groups, or a part of one node.

    A mesh over unequal nodes is as fast as its slowest device and as large as its smallest.
    """

    cluster: ClusterSpec  # the cluster that they belong to
    counts: tuple[int, ...]  # devices taken from each node group

    @cached_property
    def _used(self) -> tuple[tuple[NodeGroup, int], ...]:
        pairs = zip(self.cluster.node_groups, self.counts, strict=True)
        return tuple((group, count) for group, count in pairs if count)

    @cached_property
    def num_devices(self) -> int:
        return sum(self.counts)

    @cached_property
    def node_size(self) -> int:
        return min(min(group.devices_per_node, count) for group, count in self._used)

    @cached_property
    def num_nodes(self) -> int:
        return sum(-(-count // group.devices_per_node) for group, count in self._used)

    @cached_property
    def memory_bytes(self) -> int:
        return min(g.device.memory_bytes - g.device.reserved_bytes for g, _ in self._used)

    @cached_property
    def is_cpu(self) -> bool:
        return all(group.device.is_cpu for group, _ in self._used)

    def flops(self, dtype: str) -> float:
        return min(group.device.flops(dtype) for group, _ in self._used)

    @cached_property
    def memory_bytes_per_s(self) -> float:
        return min(group.device.memory_bytes_per_s for group, _ in self._used)

    @cached_property
    def host_bytes_per_s(self) -> float:
        return min(group.device.host_bytes_per_s for group, _ in self._used)

    @cached_property
    def within(self) -> LinkSpec:
        return min((group.within for group, _ in self._used), key=lambda link: link.bytes_per_s)

    @property
    def between(self) -> LinkSpec:
        return self.cluster.between

    def link(self, ranks: int) -> LinkSpec:
        return self.within if ranks <= self.node_size else self.between
