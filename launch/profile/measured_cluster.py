"""What ranks have measured, as a cluster and the constants of its links.

Nodes with equal devices are one group of nodes; of its devices and links the slowest and smallest
count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...configs.references import option_file
from ...planner.cost.constants import CPU_DEFAULTS, GPU_DEFAULTS, Constants
from ...planner.inputs.cluster import ClusterSpec, DeviceSpec, LinkSpec, NodeGroup
from ..placement.reported import ALIKE
from .links import LinkTimes, link_constants, link_of
from .rank import RankResult


@dataclass(frozen=True)
class MeasuredNode:
    """A machine.

    Attributes:
        ranks: What its ranks found.
        device_name: What an option of `cluster=` calls its GPUs; "" for the maker's name.
        labels: What a machine must be labeled with to have such devices.
    """

    ranks: Sequence[RankResult]
    device_name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])

    def is_like(self, other: MeasuredNode) -> bool:
        """Whether both have as many of the same devices, with about the same memory."""
        first, second = self.ranks[0], other.ranks[0]
        low, high = sorted((first.memory_bytes, second.memory_bytes))
        return (
            len(self.ranks) == len(other.ranks)
            and first.device_name == second.device_name
            and self.labels == other.labels
            and high <= ALIKE * low
        )


def alike(nodes: Sequence[MeasuredNode]) -> list[list[MeasuredNode]]:
    """The nodes, those that are alike together."""
    kinds: list[list[MeasuredNode]] = []
    for node in nodes:
        same = next((kind for kind in kinds if kind[0].is_like(node)), None)
        if same is None:
            kinds.append([node])
        else:
            same.append(node)
    return kinds


def machine_text(kinds: Sequence[Sequence[MeasuredNode]]) -> str:
    """For people: "2 nodes of 8 x NVIDIA H100", or without nodes if there is one."""
    texts: list[str] = []
    for kind in kinds:
        devices = f"{len(kind[0].ranks)} x {kind[0].ranks[0].device_name}"
        nodes = f"{len(kind)} nodes of " if len(kind) > 1 else "1 node of "
        texts.append(f"{nodes if len(kind) > 1 or len(kinds) > 1 else ''}{devices}")
    return " + ".join(texts)


def measured_cluster(
    name: str, device: str, kinds: Sequence[Sequence[MeasuredNode]], notes: list[str]
) -> tuple[ClusterSpec, Constants]:
    """The cluster, and the constants of its links.

    The share of bandwidth that collectives reach is that of the slowest node's link, or of the link
    between nodes if they have one device each.

    Args:
        name: What plans call the cluster.
        device: "cpu" or "cuda".
        kinds: From `alike`.
        notes: What could not be measured is added here.
    """
    constants = CPU_DEFAULTS if device == "cpu" else GPU_DEFAULTS
    ranks = [rank for kind in kinds for node in kind for rank in node.ranks]
    between = _slowest([rank.between for rank in ranks])
    decisive = _slowest([rank.within for rank in ranks]) or between
    preset = LinkSpec.model_validate(
        option_file("cluster", "cpu" if device == "cpu" else "h100")["within"]
    )
    if decisive is None:
        notes.append("links: analytic defaults, because there is one rank only")
        link = preset
    else:
        link, constants = link_constants(decisive, constants)
    groups = tuple(_group(device, kind, preset, decisive, link, constants) for kind in kinds)
    if len(kinds) > 1:
        notes.append(
            f"calls: of the {groups[0].device.name} of the first kind of node; devices of other "
            "kinds are taken to reach the same shares of their peaks"
        )
    network = link if between is None or between is decisive else link_of(between, constants)
    return ClusterSpec(name=name, node_groups=groups, between=network), constants


def _slowest(times: Sequence[LinkTimes | None]) -> LinkTimes | None:
    found = [one for one in times if one is not None]
    return max(found, key=lambda one: one.long_sum_s, default=None)


def _group(
    device: str,
    kind: Sequence[MeasuredNode],
    preset: LinkSpec,
    decisive: LinkTimes | None,
    link: LinkSpec,
    constants: Constants,
) -> NodeGroup:
    """Equal nodes; a node with one device has no link of its own, and a preset stands for it."""
    ranks = [rank for node in kind for rank in node.ranks]
    own = _slowest([rank.within for rank in ranks])
    within = link if own is not None and own is decisive else preset
    if own is not None and own is not decisive:
        within = link_of(own, constants)
    return NodeGroup(
        num_nodes=len(kind),
        devices_per_node=len(kind[0].ranks),
        device=_device(device, kind[0].device_name, ranks),
        within=within,
        labels=kind[0].labels,
    )


def _device(device: str, name: str, ranks: Sequence[RankResult]) -> DeviceSpec:
    """Of several devices the slowest and smallest counts."""
    return DeviceSpec(
        name="cpu" if device == "cpu" else name or ranks[0].device_name,
        memory_bytes=min(rank.memory_bytes for rank in ranks),
        flops_per_s={
            dtype: min(rank.flops_per_s[dtype] for rank in ranks) for dtype in ranks[0].flops_per_s
        },
        memory_bytes_per_s=min(rank.memory_bytes_per_s for rank in ranks),
        host_bytes_per_s=min(rank.host_bytes_per_s for rank in ranks),
        reserved_bytes=max(rank.reserved_bytes for rank in ranks),
    )
