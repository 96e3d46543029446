"""Clusters like a given one: smaller ones, and ones of which one thing is twice as much.

What a step takes on each of them says how many devices are enough, and what is worth buying.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .cluster import MOST_DEVICES, ClusterSpec, DeviceSpec, LinkSpec, NodeGroup

_EVERY = 16  # up to so many nodes every number of them is looked at


def halvings(number: int) -> list[int]:
    """A number, half of it, a quarter, ... and 1."""
    sizes = [number]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    return sizes


def part(cluster: ClusterSpec, num_devices: int) -> ClusterSpec:
    """The first devices of a cluster: whole nodes, and a part of the next."""
    parts: list[NodeGroup] = []
    left = num_devices
    for group in cluster.node_groups:
        nodes, rest = divmod(min(left, group.num_devices), group.devices_per_node)
        left -= nodes * group.devices_per_node + rest
        parts += [group.model_copy(update={"num_nodes": nodes})] if nodes else []
        fewer = {"num_nodes": 1, "devices_per_node": rest}
        parts += [group.model_copy(update=fewer)] if rest else []
    return _like(cluster, parts)


def smaller(cluster: ClusterSpec) -> dict[str, ClusterSpec]:
    """The first nodes of a cluster by how many they are, the fewest first and all of them last.

    Every number of nodes up to 16; of a larger cluster half the nodes, a quarter, and so on.
    """
    ends = [group.devices_per_node for group in cluster.node_groups for _ in range(group.num_nodes)]
    counts = range(1, len(ends) + 1) if len(ends) <= _EVERY else sorted(halvings(len(ends)))
    return {
        f"{count} node{'s' if count > 1 else ''}": part(cluster, sum(ends[:count]))
        for count in counts
    }


def improved(cluster: ClusterSpec) -> dict[str, ClusterSpec]:
    # Links that the cluster does not have are left out.
    changes: dict[str, Callable[[NodeGroup], Mapping[str, object]]] = {
        "device memory": lambda g: _device(g, memory_bytes=2 * g.device.memory_bytes),
        "bandwidth of device memory": lambda g: _device(
            g, memory_bytes_per_s=2 * g.device.memory_bytes_per_s
        ),
        "peak flops": lambda g: _device(
            g, flops_per_s={name: 2 * rate for name, rate in g.device.flops_per_s.items()}
        ),
    }
    if any(group.devices_per_node > 1 for group in cluster.node_groups):
        changes["bandwidth within nodes"] = lambda g: {"within": _faster(g.within)}
    found = {name: _changed(cluster, change) for name, change in changes.items()}
    if sum(group.num_nodes for group in cluster.node_groups) > 1:
        between = _faster(cluster.between)
        found["bandwidth between nodes"] = cluster.model_copy(update={"between": between})
    if 2 * cluster.num_devices <= MOST_DEVICES:
        found["devices"] = _changed(cluster, lambda g: {"num_nodes": 2 * g.num_nodes})
    return {f"2 x {name}": one for name, one in found.items()}


def _changed(
    cluster: ClusterSpec, change: Callable[[NodeGroup], Mapping[str, object]]
) -> ClusterSpec:
    groups = [group.model_copy(update=dict(change(group))) for group in cluster.node_groups]
    return _like(cluster, groups)


def _device(group: NodeGroup, **fields: object) -> dict[str, DeviceSpec]:
    return {"device": group.device.model_copy(update=fields)}


def _faster(link: LinkSpec) -> LinkSpec:
    return link.model_copy(update={"bytes_per_s": 2 * link.bytes_per_s})


def _like(cluster: ClusterSpec, groups: list[NodeGroup]) -> ClusterSpec:
    return ClusterSpec(name=cluster.name, node_groups=tuple(groups), between=cluster.between)
