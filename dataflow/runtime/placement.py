"""Placement of nodes as the engine needs it: groups of ranks, and a group for every node.

This is all of a plan that execution depends on. Plans with layouts, memory and predicted times are
the planner's; they reduce to a `Placement`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm

from ..errors import PlanError
from ..graph.graph import Graph, Node, Streaming, streaming
from ..graph.proxies import nearest
from ..kinds import NodeKind, WeightRead
from ..scheduler.schedule import Flow, FlowNode, Schedule
from .remote_inference import remote_methods


@dataclass(frozen=True)
class ClusterNode:
    """A node of the cluster that a placement was made for."""

    # Its number there. What has one number runs on one machine, and what has another number on
    # another.
    number: int
    # Labels that a machine needs to stand for it.
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class DeviceGroup:
    """Worker processes that run the same nodes side by side.

    A rank is data-parallel: it has rows of its own. It is one process, or several that share a
    model by tensor and pipeline parallelism, are given the same rows and answer as one.

    Attributes:
        name: What plans and traces call it.
        num_ranks: Data-parallel ranks in the group.
        device: "cpu" or "cuda"; a process of a CUDA group has one device.
        tensor_parallel: Processes among which a rank's matrices are divided.
        pipeline_parallel: Stages of a rank's layers.
        devices: Which devices its processes are on, by process; groups that name the same take
            turns. Empty for devices that no other group has.
        served: Role -> the group that serves it here: nodes that are given the role ask there,
            instead of a copy of their own. Rank r asks rank `r % num_ranks` of that group.
        nodes: Which node of the cluster its processes are on, by process; empty if any will do.
        within: The group in whose processes it lives, of which it has all devices, in any order.
            What that group trains it has as a second layout of the same weights: a *view*, which is
            made of what the processes hold, and dropped when the other group has its turn.

    Raises:
        PlanError: If there are more or fewer devices than processes, or one has two of them.
    """

    name: str
    num_ranks: int = 1
    device: str = "cpu"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    devices: tuple[int, ...] = ()
    served: Mapping[str, str] = field(default_factory=dict[str, str])
    nodes: tuple[ClusterNode, ...] = ()
    within: str = ""

    def __post_init__(self) -> None:
        if self.devices and len(set(self.devices)) != self.num_processes:
            raise PlanError(
                f"group '{self.name}' has {self.num_processes} processes on devices "
                f"{list(self.devices)}; every process needs a device of its own in the group"
            )

    @property
    def num_processes(self) -> int:
        return self.num_ranks * self.tensor_parallel * self.pipeline_parallel

    def processes(self, rank: int) -> tuple[int, ...]:
        """The processes of a data-parallel rank, the one that answers for it first.

        Process `t + tensor_parallel * (rank + num_ranks * p)` is tensor-parallel rank t of stage p,
        as in a plan's layouts. The first of the last stage answers: there the outputs are.
        """
        stages = range(self.pipeline_parallel)
        found = [
            t + self.tensor_parallel * (rank + self.num_ranks * p)
            for p in stages
            for t in range(self.tensor_parallel)
        ]
        lead = found[-self.tensor_parallel]
        return (lead, *(process for process in found if process != lead))

    def places_in(self, other: DeviceGroup) -> tuple[int, ...]:
        """The process of another group on the same device, for each process of this one."""
        return tuple(other.devices.index(device) for device in self.devices)

    def rank_of(self, process: int) -> int:
        return process // self.tensor_parallel % self.num_ranks

    def with_ranks(self, num_ranks: int) -> DeviceGroup:
        """The group cut down to its first data-parallel ranks, on their devices and nodes."""
        kept = [p for p in range(self.num_processes) if self.rank_of(p) < num_ranks]
        return replace(
            self,
            num_ranks=num_ranks,
            devices=tuple(self.devices[p] for p in kept if self.devices),
            nodes=tuple(self.nodes[p] for p in kept if self.nodes),
        )


@dataclass(frozen=True)
class Placement:
    """A group for every node that is not a source.

    Attributes:
        groups: The worker groups.
        nodes: Node name -> group name.
        num_chunks: Into how many pieces a step's rows are cut for the nodes that may stream; at
            least the largest group's ranks, so that each has work.
        predicted_s: Node name -> how long its calls of a step are expected to take, of those of
            which anything is.
    """

    groups: tuple[DeviceGroup, ...]
    nodes: Mapping[str, str]
    num_chunks: int = 1
    predicted_s: Mapping[str, float] = field(default_factory=dict[str, float])

    def streamed(self, num_parts: int) -> Placement:
        """With rows that flow on in at least so many parts, equally many for every rank; 0: as is.

        See `Schedule.streaming`.
        """
        if num_parts == 0:
            return self
        ranks = lcm(*(group.num_ranks for group in self.groups))
        return replace(self, num_chunks=-(-num_parts // ranks) * ranks)

    def group(self, name: str) -> DeviceGroup:
        return next(group for group in self.groups if group.name == name)

    def hosts(self, graph: Graph, role: str) -> list[str]:
        """The groups that have a copy of a role."""
        return [g.name for g in self.groups if role in self.hosted_roles(graph, g.name)]

    def hosted_roles(self, graph: Graph, group: str) -> tuple[str, ...]:
        """Roles that some node reads in the group, or is served by it: those it must build."""
        return tuple(
            role
            for role in graph.roles
            if any(
                self.reads_at(node, role) == group
                for node in graph.nodes
                if node.kind is not NodeKind.SOURCE and any(r.role == role for r in node.reads)
            )
        )

    def reads_at(self, node: Node, role: str) -> str:
        """The group whose copy of a role a node reads."""
        group = self.nodes[node.name]
        return self.group(group).served.get(role, group)

    def served_roles(self, graph: Graph, group: str) -> dict[str, str]:
        """Role -> the group that serves it to nodes of `group`."""
        return {
            read.role: self.reads_at(node, read.role)
            for node in graph.nodes
            if node.kind is not NodeKind.SOURCE and self.nodes[node.name] == group
            for read in node.reads
            if self.reads_at(node, read.role) != group
        }

    def serving(self, graph: Graph) -> tuple[tuple[str, str], ...]:
        found = (self.served_roles(graph, group.name).items() for group in self.groups)
        return tuple(dict.fromkeys(pair for pairs in found for pair in pairs))

    def methods(self, graph: Graph, group: str, role: str) -> frozenset[str]:
        return frozenset(
            node.method
            for node in graph.nodes
            if node.role == role and node.method and self.nodes.get(node.name) == group
        )

    def home(self, graph: Graph, role: str) -> str | None:
        """The group where a role trains, or None if it is frozen."""
        homes = [
            self.nodes[node.name]
            for node in graph.nodes
            if node.kind is NodeKind.TRAIN and node.role == role
        ]
        return homes[0] if homes else None

    def state_homes(self, graph: Graph) -> dict[str, str]:
        """Role that keeps state -> the group that hosts it."""
        return {
            role: group
            for role, contract in graph.roles.items()
            if contract.keeps_state
            for group in self.hosts(graph, role)
        }


def _check_state(graph: Graph, placement: Placement) -> None:
    for role, contract in graph.roles.items():
        hosts = placement.hosts(graph, role)
        if contract.keeps_state and len(hosts) > 1:
            raise PlanError(
                f"role '{role}' keeps state, but is asked on groups {sorted(hosts)}; its state has "
                "one home: put all nodes that call it, or are given it, on one group"
            )


def _check_within(graph: Graph, placement: Placement) -> None:
    groups = {group.name: group for group in placement.groups}
    for group in placement.groups:
        if not group.within:
            continue
        where = f"group '{group.name}' cannot live within group '{group.within}': "
        other = groups.get(group.within)
        if other is None:
            raise PlanError(f"{where}that is not declared; {nearest(group.within, groups)}")
        if other.within:
            raise PlanError(f"{where}that lives within '{other.within}' itself; name that one")
        if set(group.devices) != set(other.devices) or group.device != other.device:
            raise PlanError(
                f"{where}they are on devices {sorted(group.devices)} and {sorted(other.devices)}\n"
                "    give both groups the same devices, in any order"
            )
        for role in placement.hosted_roles(graph, group.name):
            if placement.home(graph, role) == group.name or graph.roles[role].keeps_state:
                raise PlanError(
                    f"{where}'{role}' is trained or keeps its state there\n    put its training on "
                    f"'{group.within}'"
                )


def _check_served(graph: Graph, placement: Placement) -> None:
    names = {group.name for group in placement.groups}
    shares = sharing(placement.groups)
    for group in placement.groups:
        for role, server in group.served.items():
            if server not in names:
                raise PlanError(
                    f"group '{group.name}' is served '{role}' by group '{server}', which is not "
                    f"declared; {nearest(server, names)}"
                )
        for role, server in placement.served_roles(graph, group.name).items():
            remote_methods(role, graph.roles[role])
            what = f"group '{server}' cannot serve '{role}' to group '{group.name}': "
            wrong = _cannot_serve(graph, placement, role, group, placement.group(server))
            if wrong or server in shares:
                raise PlanError(
                    what + (wrong or "it shares devices, so it sleeps; give it its own")
                )


def _cannot_serve(
    graph: Graph, placement: Placement, role: str, group: DeviceGroup, server: DeviceGroup
) -> str:
    called = [
        n.name for n in graph.nodes if n.role == role and placement.nodes[n.name] == group.name
    ]
    if graph.roles[role].keeps_state:
        return "it keeps state, and is asked where that is"
    if called:
        return f"'{called[0]}' needs a copy there; place that node on another group"
    if role in server.served:
        return f"it is itself served by '{server.served[role]}'"
    if server.num_processes != server.num_ranks:
        return (
            f"a rank of it is {server.num_processes // server.num_ranks} processes, and requests "
            "are answered by one; set tensor_parallel=1 and pipeline_parallel=1"
        )
    return ""


def sharing(groups: Sequence[DeviceGroup]) -> dict[str, frozenset[str]]:
    """Group -> the other groups that have some of its devices; groups that share none left out."""
    found = {
        one.name: frozenset(
            other.name
            for other in groups
            if other is not one and set(one.devices) & set(other.devices)
        )
        for one in groups
    }
    return {name: others for name, others in found.items() if others}


def one_group(graph: Graph, num_ranks: int = 1, device: str = "cpu") -> Placement:
    """Everything on one group: the trivial placement."""
    group = DeviceGroup("all", num_ranks, device)
    nodes = {node.name: group.name for node in graph.nodes if node.kind is not NodeKind.SOURCE}
    return Placement((group,), nodes, num_chunks=num_ranks)


def follow(graph: Graph, main: Graph, placement: Placement) -> Placement:
    """Place a second graph where the first graph's roles live.

    What a role is asked for goes where the first graph asks it for the same: an engine that only
    generates, or only trains, can do nothing else. Otherwise a trained role's nodes go to its home,
    whose weights are always the newest; a frozen one's to any group that hosts it; ops and roles
    the first graph lacks to the first group.
    """
    asked = {(n.role or "", n.method): placement.nodes[n.name] for n in main.nodes if n.role}

    def group_of(node: Node) -> str:
        same = asked.get((node.role or "", node.method))
        if same is not None:
            return same
        role = node.role or ""
        hosts = placement.hosts(main, role)
        return placement.home(main, role) or (hosts[0] if hosts else placement.groups[0].name)

    nodes = {node.name: group_of(node) for node in graph.nodes if node.kind is not NodeKind.SOURCE}
    return Placement(placement.groups, nodes, placement.num_chunks)


def flow_of(graph: Graph, placement: Placement, schedule: Schedule | None = None) -> Flow:
    """The graph and its placement as the scheduler sees them."""
    check_placement(graph, placement)
    homes = {role: placement.home(graph, role) or "" for role in graph.trains_per_step}
    schedule = schedule or Schedule()
    views = [group for group in placement.groups if group.within]
    if views and (schedule.max_lag or schedule.in_flight):
        raise PlanError(
            f"group '{views[0].name}' lives within '{views[0].within}', whose weights it has, and "
            "schedule.max_lag or in_flight asks for older ones\n    set schedule.max_lag=0, have "
            "the groups take turns, or give them devices of their own"
        )
    able = streaming(graph) if schedule.streaming or schedule.segment_tokens else Streaming()
    if not schedule.streaming:
        able = replace(able, order_of={})
    return Flow(
        name=graph.name,
        nodes=tuple(_flow_node(graph, node, placement, able) for node in graph.nodes),
        groups={group.name: group.num_ranks for group in placement.groups},
        homes=homes,
        trains_per_step=graph.trains_per_step,
        num_chunks=placement.num_chunks,
        sharing=sharing(placement.groups),
        views=frozenset(group.name for group in views),
    )


def _flow_node(graph: Graph, node: Node, placement: Placement, able: Streaming) -> FlowNode:
    trained = graph.trains_per_step
    return FlowNode(
        name=node.name,
        kind=node.kind.value,
        chunked=node.scope != "batch",
        group="" if node.kind is NodeKind.SOURCE else placement.nodes[node.name],
        inputs=tuple(dict.fromkeys(ref.node for _, ref in node.inputs)),
        reads=tuple(_read(node, read, placement) for read in node.reads if read.role in trained),
        trains=node.role if node.kind is NodeKind.TRAIN else None,
        streams=node.name in able.rollouts,
        order_of=able.order_of.get(node.name, ""),
        predicted_s=placement.predicted_s.get(node.name),
    )


def _read(node: Node, read: WeightRead, placement: Placement) -> WeightRead:
    at = placement.reads_at(node, read.role)
    return read if at == placement.nodes[node.name] else replace(read, at=at)


def check_placement(graph: Graph, placement: Placement) -> None:
    """Refuse a placement that does not cover the graph or that trains one role in two groups."""
    known = {group.name for group in placement.groups}
    names = [node.name for node in graph.nodes if node.kind is not NodeKind.SOURCE]
    for unknown in placement.nodes.keys() - set(names):
        raise PlanError(
            f"the placement names node '{unknown}', which graph '{graph.name}' does not have; "
            f"{nearest(unknown, names)}"
        )
    for name in names:
        group = placement.nodes.get(name)
        if group is None:
            raise PlanError(f"node '{name}' has no group; add it to the placement's nodes")
        if group not in known:
            raise PlanError(
                f"node '{name}' is placed on group '{group}', which is not declared; "
                f"{nearest(group, known)}"
            )
    for role in graph.trains_per_step:
        homes = {
            placement.nodes[node.name]
            for node in graph.nodes
            if node.kind is NodeKind.TRAIN and node.role == role
        }
        if len(homes) > 1:
            raise PlanError(
                f"role '{role}' trains on groups {sorted(homes)}; its weights have one home: put "
                "all its train nodes on one group"
            )
    _check_state(graph, placement)
    _check_within(graph, placement)
    _check_served(graph, placement)
    most = max(group.num_ranks for group in placement.groups)
    if placement.num_chunks < most:
        raise PlanError(
            f"num_chunks is {placement.num_chunks} but the largest group has {most} ranks, so some "
            f"would have no rows; use at least {most}"
        )


def in_flight(graph: Graph, placement: Placement) -> dict[str, str]:
    """Rollout -> why it cannot take newer weights while it is sampled; "" if it can."""
    found = streaming(graph)
    return {
        node.name: f"it cannot stream: {found.why_not[node.name]}"
        if node.name in found.why_not
        else _why_not(graph, placement, node)
        for node in graph.nodes
        if node.kind is NodeKind.ROLLOUT
    }


def _why_not(graph: Graph, placement: Placement, node: Node) -> str:
    role, group = node.role or "", placement.nodes[node.name]
    home = placement.home(graph, role) if role in graph.trains_per_step else None
    if home is None:
        return f"nothing trains '{role}' here"
    if home == group:
        return f"it runs on group '{group}', which trains '{role}'; give it a group of its own"
    if home in sharing(placement.groups).get(group, ()):
        return (
            f"its group '{group}' shares devices with '{home}', which trains '{role}', and they "
            "work in turn; give it devices of its own"
        )
    return ""


def check_in_flight(graph: Graph, placement: Placement) -> None:
    """Refuse newer weights in flight where no rollout can ever take any."""
    found = in_flight(graph, placement)
    if not found or not all(found.values()):
        return
    lines = [f"    {name} cannot: {reason}" for name, reason in found.items()]
    raise PlanError(
        f"{graph.name} is to take newer weights in flight (Schedule.in_flight), and nothing that "
        "it samples can\n" + "\n".join(lines) + "\n    or leave in_flight out"
    )


@dataclass(frozen=True)
class HandOff:
    sleep: tuple[str, ...] = ()  # Groups to put to sleep, first
    wake: str | None = None  # The group to wake then; None if it is awake


class DeviceSharing:
    """The groups that share devices, asleep at first, and those of them that are awake."""

    def __init__(self, groups: Sequence[DeviceGroup]) -> None:
        self._sharing = sharing(groups)
        self._awake: set[str] = set()

    def shares(self, group: str) -> bool:
        return group in self._sharing

    def others(self, group: str) -> frozenset[str]:
        return self._sharing.get(group, frozenset())

    def hand_off(self, group: str) -> HandOff:
        """Give a group its devices; says what is to be done for it."""
        if not self.shares(group) or group in self._awake:
            return HandOff()
        giving = tuple(sorted(self._sharing[group] & self._awake))
        self._awake -= self._sharing[group]
        self._awake.add(group)
        return HandOff(giving, group)
