"""Assignment of machines to the nodes of a plan.

A plan says which of its processes are on one node and which are not. What it puts on one node gets
a machine to itself, among those with the labels and the devices that it needs. GPU processes of
which nothing is said go wherever there is room, those that share matrices together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...dataflow.runtime.placement import DeviceGroup

Device = int | tuple[str, int]
"""A device that the plan names, or the group and the process that has one of its own."""

_MOST_LISTED = 8  # Nodes that a message names


@dataclass(frozen=True)
class Machine:
    """A node of a real cluster, or of one that is described."""

    id: str  # What tells it from all others
    address: str  # Its address, for people
    total: Mapping[str, float]  # Resource -> how much it has
    free: Mapping[str, float]  # Resource -> how much of that is not taken
    labels: Mapping[str, str] = field(default_factory=dict[str, str])  # What it is labeled with
    # Names of its kind of GPU, the most exact first: "A100-80G", "A100".
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeShare:
    """Devices that have to be on one node."""

    what: str  # What messages call it
    # The devices, each with the resource that it takes one of; None if it takes none.
    devices: Mapping[Device, str | None]
    # The plan's number of the node, which is shared with no other number; None if the plan does not
    # say.
    number: int | None = None
    # What the node must be labeled with.
    labels: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def needs(self) -> Counter[str]:
        """Resource -> how much of it."""
        return Counter(resource for resource in self.devices.values() if resource is not None)

    def fits(self, node: Machine, amounts: Mapping[str, float]) -> bool:
        return all(node.labels.get(k) == v for k, v in self.labels.items()) and all(
            amounts.get(resource, 0) >= needed for resource, needed in self.needs.items()
        )

    def __str__(self) -> str:
        needs = [_amount(number, resource) for resource, number in sorted(self.needs.items())]
        labels = [f"the label {key}={value}" for key, value in self.labels.items()]
        return f"{self.what} needs {' and '.join([*needs, *labels]) or 'a node'}"


class NoRoom(Exception):  # noqa: N818 - what it says is that it does not fit now
    """A share for which no node is left; the message says what each node has."""


def device_of(group: DeviceGroup, process: int) -> Device:
    return group.devices[process] if group.devices else (group.name, process)


def shares_of(groups: Sequence[DeviceGroup], *, all_cpus: bool = False) -> list[NodeShare]:
    """Devices that have to be together: first the plan's nodes, then the others, largest first.

    A CUDA process takes a GPU. A CPU process takes a CPU if the plan has several nodes, and nothing
    otherwise: on one machine ranks may be more than cores. Nothing at all is said of CPU processes
    without a node.
    """
    on_nodes = [group for group in groups if group.nodes]
    numbers = sorted({node.number for group in on_nodes for node in group.nodes})
    cpu = "CPU" if all_cpus or len(numbers) > 1 else None
    planned: list[NodeShare] = []
    for number in numbers:
        devices: dict[Device, str | None] = {}
        labels: dict[str, str] = {}
        for group in on_nodes:
            for process, node in enumerate(group.nodes):
                if node.number == number:
                    devices[device_of(group, process)] = "GPU" if _on_gpu(group) else cpu
                    labels |= node.labels
        planned.append(NodeShare(f"node {number} of the plan", devices, number, labels))
    anywhere = [group for group in groups if not group.nodes and _on_gpu(group)]
    free = [NodeShare(what, dict.fromkeys(devices, "GPU")) for what, devices in _together(anywhere)]
    return planned + sorted(free, key=lambda share: -len(share.devices))


def _on_gpu(group: DeviceGroup) -> bool:
    return group.device.startswith("cuda")


def _together(groups: Sequence[DeviceGroup]) -> list[tuple[str, tuple[Device, ...]]]:
    merged: list[tuple[str, tuple[Device, ...]]] = []
    for group in groups:
        size = group.tensor_parallel
        for first in range(0, group.num_processes, size):
            own = [device_of(group, process) for process in range(first, first + size)]
            touching = [one for one in merged if set(own) & set(one[1])]
            merged = [one for one in merged if one not in touching]
            every = dict.fromkeys([*(d for _, devices in touching for d in devices), *own])
            what = touching[0][0] if touching else f"rank {group.rank_of(first)} of '{group.name}'"
            merged.append((what, tuple(every)))
    return merged


def assign(
    shares: Sequence[NodeShare],
    nodes: Sequence[Machine],
    held: Mapping[int, str],
    *,
    free_only: bool,
) -> dict[Device, str]:
    """Device -> the id of the node that it is on."""
    amounts = {node.id: dict(node.free if free_only else node.total) for node in nodes}
    planned = [share for share in shares if share.number is not None]
    choices = [
        [
            i
            for i, node in enumerate(nodes)
            if share.fits(node, amounts[node.id]) and _may_stand(held, share.number, node.id)
        ]
        for share in planned
    ]
    chosen: dict[int, int] = {}  # node -> share
    for index, share in enumerate(planned):
        if not _augment(index, choices, chosen, set()):
            taken = {nodes[i].id: planned[j].what for i, j in chosen.items()}
            raise NoRoom(_no_room(share, nodes, amounts, taken, free_only))
    found: dict[Device, str] = {}
    for i, j in chosen.items():
        found |= _taken(planned[j], nodes[i], amounts)
    for share in (part for whole in shares for part in _fitting(whole, nodes)):
        node = next((node for node in nodes if share.fits(node, amounts[node.id])), None)
        if node is None:
            raise NoRoom(_no_room(share, nodes, amounts, {}, free_only))
        found |= _taken(share, node, amounts)
    return found


def _fitting(share: NodeShare, nodes: Sequence[Machine]) -> Sequence[NodeShare]:
    if share.number is not None:
        return ()
    if any(share.fits(node, node.total) for node in nodes):
        return (share,)
    return [NodeShare(share.what, {device: needs}) for device, needs in share.devices.items()]


def _may_stand(held: Mapping[int, str], number: int | None, node: str) -> bool:
    own = None if number is None else held.get(number)
    return node not in held.values() if own is None else own == node


def _augment(
    index: int, choices: Sequence[Sequence[int]], chosen: dict[int, int], seen: set[int]
) -> bool:
    for node in choices[index]:
        if node not in chosen:
            chosen[node] = index
            return True
    for node in choices[index]:
        if node in seen:
            continue
        seen.add(node)
        if _augment(chosen[node], choices, chosen, seen):
            chosen[node] = index
            return True
    return False


def _taken(
    share: NodeShare, node: Machine, amounts: dict[str, dict[str, float]]
) -> dict[Device, str]:
    for resource, number in share.needs.items():
        amounts[node.id][resource] -= number
    return dict.fromkeys(share.devices, node.id)


def _amount(number: float, resource: str) -> str:
    return f"{number:g} {resource}{'' if number == 1 else 's'}"


def _no_room(
    share: NodeShare,
    nodes: Sequence[Machine],
    amounts: Mapping[str, Mapping[str, float]],
    taken: Mapping[str, str],
    free_only: bool,
) -> str:
    resources = sorted(share.needs)
    word = " free" if free_only else ""
    said: list[str] = []
    for node in nodes[:_MOST_LISTED]:
        amount = amounts[node.id]
        has = [_amount(amount.get(resource, 0), resource) + word for resource in resources]
        has += [f"{key}={node.labels.get(key, 'nothing')}" for key in share.labels]
        use = f" (is {taken[node.id]})" if node.id in taken else ""
        said.append(f"{node.address}: {', '.join(has) or 'alive'}{use}")
    if len(nodes) > _MOST_LISTED:
        said.append(f"and {len(nodes) - _MOST_LISTED} more")
    return f"{share}, which no node has{word}\n    " + "\n    ".join(said)
