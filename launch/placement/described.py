"""Whether a plan fits the cluster that it is to run on, and where each of its ranks would go.

The cluster is described by the configuration of a dry run, or is what the executor reports. What
would be refused once processes start is refused here, before any does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...dataflow.errors import PlanError
from ...dataflow.graph.graph import Graph
from ...dataflow.runtime.placement import DeviceGroup, Placement
from ...planner.formatting import bytes_text
from ...planner.inputs.cluster import ClusterSpec
from ...planner.plan.plan import Plan
from ...planner.report.plan_texts import cluster_text
from ...workers.executors.assignment import Machine, NoRoom, assign, shares_of

_DEVICE = "device"
"""The label under which a described machine says what its devices are."""


@dataclass(frozen=True)
class Seat:
    """Where a process would go.

    Attributes:
        group: Its group.
        process: Its number there.
        rank: The data-parallel rank that it belongs to.
        node: The machine; "" if any will do.
        device: The device that the plan gives it; None if it gives none.
        roles: What it builds.
    """

    group: str
    process: int
    rank: int
    node: str
    device: int | None
    roles: tuple[str, ...]


def check_devices(plan: Plan, cluster: ClusterSpec) -> None:
    """Refuse a plan for devices that a cluster does not have, or that are too small for it.

    Of a plan that was made for no cluster in particular nothing is known.

    Raises:
        PlanError: Naming the cluster that it was made for, or the group that is too large.
    """
    made_for = plan.cluster
    if not isinstance(made_for, ClusterSpec):
        return
    rooms = {
        group.device.name: group.device.memory_bytes - group.device.reserved_bytes
        for group in cluster.node_groups
    }
    memory = plan.prediction.memory if plan.prediction else {}
    for group in plan.groups:
        needed = memory[group.name].peak_bytes if group.name in memory else 0
        for name in dict.fromkeys(made_for.spec_of(device).name for device in group.devices):
            if name not in rooms:
                raise PlanError(
                    f"the plan is for another cluster: for {cluster_text(made_for)}, and this is "
                    f"{cluster_text(cluster)}\n    plan again, for the cluster that it is to run on"
                )
            if needed > rooms[name]:
                raise PlanError(
                    f"group '{group.name}' of the plan is predicted to hold {bytes_text(needed)} "
                    f"on each device, and a {name} of cluster '{cluster.name}' has "
                    f"{bytes_text(rooms[name])} for it\n    plan again, for the cluster that it is "
                    "to run on"
                )


def check_fits(plan: Plan, placement: Placement, cluster: ClusterSpec) -> Mapping[int, str]:
    """Number of a plan's node -> the node of the cluster that would stand for it.

    Args:
        plan: The plan.
        placement: What it comes to.
        cluster: The cluster it is to run on.

    Raises:
        PlanError: If a node is missing, or has fewer devices than planned.
    """
    groups = [_labeled(plan, group) for group in placement.groups]
    shares = shares_of(groups, all_cpus=True)
    try:
        found = assign(shares, _machines(cluster), {}, free_only=False)
    except NoRoom as error:
        raise PlanError(
            f"{error}\n    the plan does not fit cluster '{cluster.name}'; plan again for it"
        ) from None
    return {s.number: found[next(iter(s.devices))] for s in shares if s.number is not None}


def _labeled(plan: Plan, group: DeviceGroup) -> DeviceGroup:
    """With what the plan's devices are among the labels of its nodes."""
    cluster = plan.cluster
    if not isinstance(cluster, ClusterSpec) or not group.nodes:
        return group
    nodes = (
        replace(node, labels={_DEVICE: cluster.spec_of(device).name, **node.labels})
        for node, device in zip(group.nodes, group.devices, strict=True)
    )
    return replace(group, nodes=tuple(nodes))


def _machines(cluster: ClusterSpec) -> list[Machine]:
    resource = "CPU" if cluster.device_type == "cpu" else "GPU"
    return [
        Machine(
            id=f"node {number}",
            address=f"node {number}",
            total={resource: group.devices_per_node},
            free={resource: group.devices_per_node},
            labels={_DEVICE: group.device.name, **group.labels},
        )
        for number, group in enumerate(
            group for group in cluster.node_groups for _ in range(group.num_nodes)
        )
    ]


def seats(graph: Graph, placement: Placement, nodes: Mapping[int, str]) -> Sequence[Seat]:
    """Where every process would go.

    Args:
        graph: The main stage's.
        placement: Where its nodes run.
        nodes: From `check_fits`, or nothing where no cluster is known.
    """
    return [
        Seat(
            group.name,
            process,
            group.rank_of(process),
            nodes.get(group.nodes[process].number, "") if group.nodes else "",
            group.devices[process] if group.devices else None,
            placement.hosted_roles(graph, group.name),
        )
        for group in placement.groups
        for process in range(group.num_processes)
    ]
