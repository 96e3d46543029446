"""The cluster that an executor has joined, as the planner sees it.

GPUs are known by name: those of the options of `cluster=`. Cores are described as `cluster=cpu`
describes them, each node's shared among at most eight ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ...planner.inputs.cluster import ClusterSpec, LinkSpec, NodeGroup
from ...workers.executors.assignment import Machine
from ..inputs.compose import Resolved
from .cluster_inputs import presets
from .machine import cpu_node
from .place import executor_kind

ALIKE = 1.1
"""How much more memory a node may have than another that is taken for its equal."""


def joined(run: Resolved) -> Resolved:
    """The run with the cluster that its executor has joined, if it has and a device is known."""
    inputs = run.placement
    if inputs.cluster is not None:
        return run
    machines = executor_kind(inputs.executor.kind, "executor.kind").machines()
    device = inputs.executor.device.partition(":")[0]
    cluster = reported_cluster(machines, device) if machines else None
    return replace(run, placement=replace(inputs, cluster=cluster))


def reported_cluster(machines: Sequence[Machine], device: str) -> ClusterSpec | None:
    """The machines as a cluster; None if what a GPU of them can do is not known.

    Machines without such devices are left out. Neighbors that are equal are one group of nodes,
    also where Ray gives one a little less memory than the other.

    Args:
        machines: What the executor reports.
        device: "cpu" or "cuda".
    """
    known = presets()
    nodes: list[NodeGroup] = []
    links: list[LinkSpec] = []
    for machine in machines:
        number = int(machine.total.get("CPU" if device == "cpu" else "GPU", 0))
        if not number:
            continue
        name = "cpu" if device == "cpu" else option_of(machine, known)
        if name is None:
            return None
        preset = known[name]
        node = _node(preset.node_groups[0], machine, number, device)
        links.append(preset.between)
        if nodes and (one := _smaller(nodes[-1], node)) is not None:
            nodes[-1] = one.model_copy(update={"num_nodes": nodes[-1].num_nodes + 1})
        else:
            nodes.append(node)
    if not nodes:
        return None
    slowest = min(links, key=lambda link: link.bytes_per_s)
    return ClusterSpec(name="joined cluster", node_groups=tuple(nodes), between=slowest)


def _smaller(one: NodeGroup, other: NodeGroup) -> NodeGroup | None:
    """What both nodes have, if they differ by a little memory at most."""
    low, high = sorted(node.device.memory_bytes for node in (one, other))
    if high > ALIKE * low:
        return None
    least, most = (
        node.model_copy(
            update={
                "num_nodes": 1,
                "device": node.device.model_copy(update={"memory_bytes": low}),
            }
        )
        for node in (one, other)
    )
    return least if least == most else None


def _node(preset: NodeGroup, machine: Machine, number: int, device: str) -> NodeGroup:
    if device == "cpu":
        memory = int(machine.total.get("memory", 0)) or preset.device.memory_bytes
        return cpu_node(preset, number, memory)
    return preset.model_copy(
        update={"num_nodes": 1, "devices_per_node": number, "labels": labels_of(machine)}
    )


def option_of(machine: Machine, options: Collection[str]) -> str | None:
    """Which of the options of `cluster=` describes a machine's GPUs, if one does."""
    names = map(str.lower, machine.devices)
    return next((name for name in names if name in options), None)


def labels_of(machine: Machine) -> Mapping[str, str]:
    """The labels of a machine that name its GPUs."""
    return {key: value for key, value in machine.labels.items() if value in machine.devices}
