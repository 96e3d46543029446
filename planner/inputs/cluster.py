"""The cluster of a plan: devices, nodes and links, as data.

A cluster is a list of node groups; mixed and uneven clusters have several. Devices are numbered
node by node in the order listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from pydantic import ConfigDict, Field, model_validator

from ...dataflow.errors import PlanError
from .model_shape import AtLeastOne, PlanData

Positive = Annotated[float, Field(gt=0, le=1e24)]
NotNegative = Annotated[float, Field(ge=0)]
Dtype = Annotated[str, Field(pattern=r"^(float32|bfloat16|float16)$")]
MOST_DEVICES = 100_000
"""Most devices of a cluster: the description of each takes room and time."""


class _Spec(PlanData):
    model_config = ConfigDict(allow_inf_nan=False)


class DeviceSpec(_Spec):
    """One accelerator, or the share of a CPU that one rank uses. Figures are the maker's peaks."""

    name: str
    """Name in tables: "h100"."""
    memory_bytes: int = Field(ge=1, le=1 << 60)
    """Device memory, all of it."""
    flops_per_s: Mapping[Dtype, Positive] = Field(min_length=1)
    """dtype -> dense matrix-multiply peak."""
    memory_bytes_per_s: Positive
    """Bandwidth of device memory."""
    host_bytes_per_s: Positive
    """Bandwidth to host memory, one direction, per device; it bounds offloading."""
    reserved_bytes: int = Field(default=0, ge=0)
    """Memory that no role can have: the driver's context, the runtime, fragmentation."""

    @model_validator(mode="after")
    def _leaves_memory(self) -> DeviceSpec:
        if self.reserved_bytes >= self.memory_bytes:
            raise PlanError(
                f"device '{self.name}' has {self.memory_bytes} memory_bytes, of which "
                f"{self.reserved_bytes} are reserved_bytes\n    leave some for roles"
            )
        return self

    @property
    def is_cpu(self) -> bool:
        """Whether it is a share of a CPU, as its name says: "cpu"."""
        return self.name.startswith("cpu")

    def stands_in(self, dtype: str) -> bool:
        """Whether float32's peak stands for that of a dtype, of which nothing is known."""
        return dtype not in self.flops_per_s and "float32" in self.flops_per_s

    def flops(self, dtype: str) -> float:
        """Peak at that dtype.

        Raises:
            PlanError: If the device has no figure for it, nor for float32.
        """
        if self.stands_in(dtype):
            return self.flops_per_s["float32"]
        if dtype not in self.flops_per_s:
            raise PlanError(
                f"device '{self.name}' has no flops_per_s for {dtype}; it has "
                f"{', '.join(self.flops_per_s)}"
            )
        return self.flops_per_s[dtype]


class LinkSpec(_Spec):
    """A link as one device sees it."""

    bytes_per_s: Positive
    """One direction, per device, while all devices of the node use it."""
    latency_s: NotNegative
    """Latency of one message."""


class NodeGroup(_Spec):
    """Equal nodes."""

    num_nodes: AtLeastOne
    """Number of nodes."""
    devices_per_node: AtLeastOne
    """Devices in each."""
    device: DeviceSpec
    """The kind of their devices."""
    within: LinkSpec
    """Between devices of one node."""
    between: LinkSpec | None = None
    """Between its nodes, where they have network cards that other nodes have not; None for the
    cluster's."""
    cores_per_node: AtLeastOne | None = None
    """Processor cores of each, for environments, verifiers and all else that computes on them; None
    if that is not known."""
    host_bytes: AtLeastOne | None = None
    """Host memory of each; None if that is not known."""
    labels: Mapping[str, str] = Field(default_factory=dict[str, str])
    """Labels that a machine must have in Ray (`ray start --labels`) to stand for one of them:
    `{ray.io/accelerator-type: H100}`."""

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node


class ClusterSpec(_Spec):
    """All nodes, and the network between them."""

    name: str
    """Name in the plan."""
    node_groups: tuple[NodeGroup, ...] = Field(min_length=1)
    """In the order in which devices are numbered."""
    between: LinkSpec
    """Between devices of different nodes, unless their group of nodes has a network of its own."""

    @model_validator(mode="after")
    def _is_bounded(self) -> ClusterSpec:
        if self.num_devices > MOST_DEVICES:
            raise PlanError(
                f"cluster '{self.name}' has {self.num_devices} devices; at most {MOST_DEVICES} can "
                "be planned for\n    plan for a part of it"
            )
        return self

    @cached_property
    def num_devices(self) -> int:
        """In all nodes together."""
        return sum(group.num_devices for group in self.node_groups)

    @property
    def nodes(self) -> tuple[NodeGroup, ...]:
        """The group of each node."""
        return tuple(group for group in self.node_groups for _ in range(group.num_nodes))

    @property
    def num_cores(self) -> int:
        """Cores that are known of, in all nodes together."""
        return sum(g.num_nodes * (g.cores_per_node or 0) for g in self.node_groups)

    @property
    def device_type(self) -> str:
        """Torch's name of its devices: "cpu" or "cuda"."""
        return "cpu" if self.node_groups[0].device.is_cpu else "cuda"

    def computes_faster(self, dtype: str) -> bool:
        """Whether the products of every device are faster in a dtype than in float32."""
        rates = [group.device.flops_per_s for group in self.node_groups]
        return all(rate.get(dtype, 0.0) > rate.get("float32", 0.0) for rate in rates)

    def notes(self, dtypes: Iterable[str]) -> tuple[str, ...]:
        """Notes on rates that stand for others.

        Args:
            dtypes: Those in which something is to be computed.
        """
        return tuple(
            f"device '{group.device.name}' has no flops_per_s for {dtype}; that of float32 stands "
            "for it"
            for dtype in dict.fromkeys(dtypes)
            for group in self.node_groups
            if group.device.stands_in(dtype)
        )

    def node_of(self, device: int) -> int:
        """Number of the node that holds a device.

        Raises:
            PlanError: If the cluster has no such device.
        """
        return self._holder(device)[1]

    def spec_of(self, device: int) -> DeviceSpec:
        return self._holder(device)[0].device

    def labels_of(self, device: int) -> Mapping[str, str]:
        """The labels of the node that holds a device."""
        return self._holder(device)[0].labels

    def _holder(self, device: int) -> tuple[NodeGroup, int]:
        nodes, first = 0, 0
        for group in self.node_groups:
            if first <= device < first + group.num_devices:
                return group, nodes + (device - first) // group.devices_per_node
            first += group.num_devices
            nodes += group.num_nodes
        raise PlanError(
            f"cluster '{self.name}' has no device {device}; its {self.num_devices} devices are "
            f"numbered from 0"
        )


def check_cores(cluster: ClusterSpec) -> None:
    """Refuse a cluster whose cores are not known, for a step that computes on them."""
    if any(group.cores_per_node is None for group in cluster.node_groups):
        raise PlanError(
            f"cluster '{cluster.name}' does not say how many cores its nodes have, and this step "
            "computes on cores\n    set cluster.cores_per_node (penstock plan), or measure its "
            "machines again: penstock profile"
        )


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
    def memory_bytes(self) -> int:
        return min(g.device.memory_bytes - g.device.reserved_bytes for g, _ in self._used)

    @cached_property
    def is_cpu(self) -> bool:
        return all(group.device.is_cpu for group, _ in self._used)

    def cores(self, *, lagged: bool) -> float:
        """Processor cores of its nodes that are free while its own devices wait.

        Under a lag the others compute: a CPU has its share of the cores, and each GPU of a node a
        core, for the process that launches its kernels.
        """
        free = 0.0
        for group, count in self._used:
            devices = -(-count // group.devices_per_node) * group.devices_per_node
            cores = devices / group.devices_per_node * (group.cores_per_node or 1)
            taken = cores * (1.0 - count / devices) if group.device.is_cpu else devices
            free += cores - (taken if lagged else 0.0)
        return max(1.0, free)

    @cached_property
    def host_bytes(self) -> int | None:
        """Memory of its nodes; None if that is not known."""
        each = [(-(-n // group.devices_per_node), group.host_bytes) for group, n in self._used]
        return sum(nodes * (size or 0) for nodes, size in each) if all(x for _, x in each) else None

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
        (group, _), *others = self._used
        return self.cluster.between if others else group.between or self.cluster.between

    def link(self, ranks: int) -> LinkSpec:
        return self.within if ranks <= self.node_size else self.between


# Smaller clusters, and ones of which one thing is twice as much: what a step takes on each of them
# says how many devices are enough, and what is worth buying.
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
        own = _changed(cluster, lambda g: {"between": g.between and _faster(g.between)})
        between = _faster(cluster.between)
        found["bandwidth between nodes"] = own.model_copy(update={"between": between})
    if 2 * cluster.num_devices <= MOST_DEVICES:
        found["devices"] = _changed(cluster, lambda g: {"num_nodes": 2 * g.num_nodes})
    return {f"2 x {name}": one for name, one in found.items()}


def with_more_cores(cluster: ClusterSpec) -> dict[str, ClusterSpec]:
    """The cluster with twice and four times the cores of every node, under what it is called."""
    return {
        f"{times} x cores": _changed(
            cluster, lambda g, times=times: {"cores_per_node": times * (g.cores_per_node or 0)}
        )
        for times in (2, 4)
    }


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
