"""A plan: where every node runs, as data that a person can write and a program can read.

Execution depends on groups and assignments alone, and those are all that a plan must have. A plan
that was searched for also says which devices of which cluster each group is, in which layout every
call runs, how far generation may run ahead, and what all that is expected to cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from ...dataflow.errors import PlanError
from ...dataflow.graph.graph import Graph, Node
from ...dataflow.kinds import NodeKind
from ...dataflow.registry import imported
from ...dataflow.runtime.placement import ClusterNode, DeviceGroup, Placement, check_placement
from ..cost.calibration import Constants, read_model
from ..inputs.calls import Workload
from ..inputs.cluster import MOST_DEVICES, ClusterSpec
from ..inputs.layout import Layout
from ..inputs.model_shape import PlanData
from ..inputs.task_profile import TaskProfile

Seconds = Annotated[float, Field(ge=0)]
Bytes = Annotated[int, Field(ge=0)]


class NodePrediction(PlanData):
    # from its start to its end on its group, moving weights into its layout included
    duration_s: Seconds
    # what the duration is made of: "compute", "tensor_parallel", ..
    parts_s: Mapping[str, Seconds] = Field(default_factory=dict[str, float])


class GroupMemory(PlanData):
    """Memory of the fullest device of one group.

    Calls of a group run one after the other, so the most it ever holds is what is resident and the
    largest of the transient sums.
    """

    # role, or "role.generate" for a copy of its own -> part ("weights") -> always held
    resident_bytes: Mapping[str, Mapping[str, Bytes]]
    # call -> part ("activations", "kv_cache") -> held while the call runs
    transient_bytes: Mapping[str, Mapping[str, Bytes]]
    capacity_bytes: Bytes  # what roles may use of the device

    @property
    def resident_total_bytes(self) -> int:
        return sum(sum(parts.values()) for parts in self.resident_bytes.values())

    @property
    def peak_call(self) -> str | None:
        sums = {call: sum(parts.values()) for call, parts in self.transient_bytes.items()}
        return max(sums, key=lambda call: sums[call]) if any(sums.values()) else None

    @property
    def peak_bytes(self) -> int:
        peak = self.peak_call
        most = sum(self.transient_bytes[peak].values()) if peak else 0
        return self.resident_total_bytes + most


class RunnerUp(PlanData):
    description: str  # who shares how many devices
    step_time_s: Seconds  # what it would take
    why: str  # why it lost, in one sentence


class StreamedStep(PlanData):
    """The same plan where a step's rows go on in parts."""

    num_parts: int = Field(ge=1)  # parts
    step_time_s: Annotated[float, Field(gt=0)]  # seconds per step


class OtherSchedule(PlanData):
    max_lag: int = Field(ge=0)  # how many steps generation may run ahead
    # how far a response grows in one step; 0: to its end
    segment_tokens: int = Field(default=0, ge=0)
    step_time_s: Seconds | None  # what it would take; None if no plan fits


class Prediction(PlanData):
    # whether every device holds what it must; a plan that does not is refused, not returned
    feasible: bool = True
    step_time_s: Annotated[float, Field(gt=0)]  # seconds per step, steps following each other
    # no plan under the same pins and models of time and memory can be faster
    lower_bound_s: Seconds
    search_time_s: Seconds = 0.0  # how long the search took
    # whether the search ended before it had proved its plan the best
    stopped_at_deadline: bool = False
    calibration: str = "analytic defaults"  # where the constants of the model of time come from
    constants: Constants | None = None  # these constants; None in plans that do not say
    # costs of a step that acts, instead of constants, or of its verifiers beside them
    task: TaskProfile | None = None
    nodes: Mapping[str, NodePrediction]  # calls by name; nodes that are not here take no time
    # group -> memory of its fullest device
    memory: Mapping[str, GroupMemory] = Field(default_factory=dict[str, GroupMemory])
    runner_up: RunnerUp | None = None  # the best plan with another placement, if one was met
    # the others, the fastest first, where several were compared
    other_schedules: tuple[OtherSchedule, ...] = ()
    streamed: StreamedStep | None = None  # what `Schedule.streaming` makes of it, if that was asked
    # role -> name of its model's shape
    models: Mapping[str, str] = Field(default_factory=dict[str, str])
    workload: Workload | None = None  # rows and tokens of the step it was made for

    @property
    def gap(self) -> float:
        return max(0.0, 1.0 - self.lower_bound_s / self.step_time_s)

    @property
    def segment_tokens(self) -> int:
        return (self.workload.segment_tokens or 0) if self.workload is not None else 0

    @property
    def tokens_per_s(self) -> float | None:
        if self.workload is None:
            return None
        work = self.workload
        return work.num_rows * (work.prompt.mean + work.response.mean) / self.step_time_s

    @property
    def fullest(self) -> GroupMemory | None:
        held = self.memory.values()
        return max(held, key=lambda one: one.peak_bytes / one.capacity_bytes, default=None)

    @property
    def durations_s(self) -> dict[str, float]:
        return {name: node.duration_s for name, node in self.nodes.items()}


class GroupPlan(PlanData):
    """One group of ranks: worker processes, each on a device of its own."""

    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")
    """Name in nodes and traces."""
    num_ranks: int = Field(default=1, ge=1, le=MOST_DEVICES)
    """Worker processes in the group; as many as `devices` where those are given."""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda)$")
    """"cpu" or "cuda"; each rank of a CUDA group owns one device."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks among which every model's matrices are divided."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Ranks among which every model's layers are divided."""
    devices: tuple[Annotated[int, Field(ge=0, lt=MOST_DEVICES)], ...] = ()
    """Devices of the cluster, in rank order; nothing is said about them if empty."""
    served: Mapping[str, str] = Field(default_factory=dict[str, str])
    """Role -> the group that serves it here: nodes that are given the role ask there, instead of a
    copy of their own."""

    @model_validator(mode="before")
    @classmethod
    def _ranks_of_devices(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("devices") and "num_ranks" not in data:
            return {**data, "num_ranks": len(data["devices"])}
        return data

    @model_validator(mode="after")
    def _fits(self) -> GroupPlan:
        if self.devices and self.num_ranks != len(self.devices):
            raise PlanError(
                f"group '{self.name}' has {self.num_ranks} ranks on {len(self.devices)} devices; "
                "a rank has one device: leave num_ranks out"
            )
        if self.num_ranks % (self.tensor_parallel * self.pipeline_parallel):
            raise PlanError(
                f"group '{self.name}' has {self.num_ranks} ranks, which tensor_parallel="
                f"{self.tensor_parallel} x pipeline_parallel={self.pipeline_parallel} does not "
                "divide"
            )
        return self

    @property
    def device_group(self) -> DeviceGroup:
        tensor, stages = self.tensor_parallel, self.pipeline_parallel
        num_ranks = self.num_ranks // (tensor * stages)
        served = dict(self.served)
        return DeviceGroup(self.name, num_ranks, self.device, tensor, stages, self.devices, served)


class Plan(PlanData):
    """Groups, and the group of every node; with a layout and a prediction where they are known."""

    groups: tuple[GroupPlan, ...] = Field(min_length=1)
    """The worker groups; those that share devices take turns on them. The planner's share none."""
    nodes: Mapping[str, str] = Field(default_factory=dict[str, str])
    """Node name, or role name for all nodes of a role, -> group name; the node wins."""
    default_group: str = ""
    """Group of every other node; the first group if empty."""
    chunks_per_rank: int = Field(default=1, ge=1, le=1024)
    """Pieces each rank of the largest group gets; more than 1 lets consumers start earlier."""
    layouts: Mapping[str, Layout] = Field(default_factory=dict[str, Layout])
    """Node name -> how its model is spread over the devices of its group."""
    micro_batch_tokens: Mapping[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict[str, int]
    )
    """Forward or train node -> tokens a rank computes at once; if absent, as the engine likes."""
    role_options: Mapping[str, Mapping[str, Any]] = Field(
        default_factory=dict[str, Mapping[str, Any]]
    )
    """Role -> fields of its worker's spec that the plan decides, as `num_overlapped`."""
    group_size: int | None = Field(default=None, ge=1)
    """Environments or games that step together, where `task.group_size` is `auto`."""
    max_lag: int | None = Field(default=None, ge=0)
    """The schedule that it was made for; none in particular if None."""
    cluster: ClusterSpec | str = ""
    """The cluster that it was made for, or its name."""
    graph: str = ""
    """The fingerprint of the graph that it was made for; it is not compared if empty."""
    engines: str = ""
    """Engines that it was made for, as keys of a configuration; for messages."""
    num_steps: int | None = Field(default=None, ge=1)
    """Steps of the run that it was made for; not known if None."""
    prediction: Prediction | None = None
    """Prediction of its times and memory."""

    @model_validator(mode="after")
    def _fits(self) -> Plan:
        names = Counter(group.name for group in self.groups)
        repeated = [name for name, count in names.items() if count > 1]
        if repeated:
            raise PlanError(
                f"two groups of the plan are named '{repeated[0]}'; names must be unique"
            )
        for group in self.groups:
            twice = [device for device, count in Counter(group.devices).items() if count > 1]
            if twice:
                raise PlanError(
                    f"device {twice[0]} is in group '{group.name}' twice over; a process has a "
                    "device that no other process of its group has"
                )
        if isinstance(self.cluster, ClusterSpec) and self.devices:
            self.cluster.node_of(max(self.devices))  # which refuses a device that there is not
        return self

    @property
    def devices(self) -> frozenset[int]:
        return frozenset(device for group in self.groups for device in group.devices)

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def device_hours(self) -> float:
        step_s = self.prediction.step_time_s if self.prediction else 0.0
        ranks = sum(group.num_ranks for group in self.groups)
        return step_s * (self.num_devices or ranks) / 3600

    @property
    def memory_bytes_per_device(self) -> dict[int, int]:
        memory = self.prediction.memory if self.prediction else {}
        return {
            device: memory[group.name].peak_bytes
            for group in self.groups
            if group.name in memory
            for device in group.devices
        }

    def _repr_html_(self) -> str:
        return imported("penstock.planner.report.plan_texts:plan_table")(self)  # above this folder

    def group(self, name: str) -> GroupPlan:
        return next(group for group in self.groups if group.name == name)

    def group_of(self, node: Node) -> str:
        default = self.default_group or self.groups[0].name
        names = (node.name, _generation(node), node.role or "")
        return next((self.nodes[name] for name in names if name in self.nodes), default)

    def placement(self, graph: Graph) -> Placement:
        if self.graph not in ("", graph.fingerprint):
            raise PlanError(
                f"the plan was made for another version of {graph.name}: its graph is "
                f"{self.graph}, and this one is {graph.fingerprint}\n"
                "    plan again: penstock plan ... output=FILE"
            )
        named = {
            name for node in graph.nodes for name in (node.name, node.role or "", _generation(node))
        }
        nodes = {
            node.name: self.group_of(node)
            for node in graph.nodes
            if node.kind is not NodeKind.SOURCE
        }
        unknown = {name: group for name, group in self.nodes.items() if name not in named}
        groups = tuple(group.device_group for group in self.groups)
        if isinstance(cluster := self.cluster, ClusterSpec):
            on = {d: ClusterNode(cluster.node_of(d), cluster.labels_of(d)) for d in self.devices}
            groups = tuple(replace(g, nodes=tuple(on[d] for d in g.devices)) for g in groups)
        num_chunks = self.chunks_per_rank * max(group.num_ranks for group in groups)
        durations_s = self.prediction.durations_s if self.prediction else {}
        placement = Placement(groups, {**nodes, **unknown}, num_chunks, durations_s)
        check_placement(graph, placement)
        self._check_served(graph, placement)
        self._check_calls(graph)
        return placement

    def _check_served(self, graph: Graph, placement: Placement) -> None:
        for group in self.groups:
            given = placement.served_roles(graph, group.name)
            for role in group.served.keys() - given.keys():
                raise PlanError(
                    f"group '{group.name}' is served '{role}', which no node there is given"
                    + (f"; they are given {', '.join(given)}" if given else "")
                )

    def _check_calls(self, graph: Graph) -> None:
        named = {node.name: node for node in graph.nodes if node.role}
        keys = [("a layout", name) for name in self.layouts]
        keys += [("micro_batch_tokens", name) for name in self.micro_batch_tokens]
        for role in self.role_options.keys() - graph.roles.keys():
            raise PlanError(
                f"the plan has role_options for '{role}', which is no role of graph "
                f"'{graph.name}'\n    give one of {', '.join(graph.roles)}"
            )
        for key, name in keys:
            if name not in named:
                raise PlanError(
                    f"the plan has {key} for '{name}', which is no call of graph "
                    f"'{graph.name}'; its calls are {', '.join(named)}"
                )
        for name, layout in self.layouts.items():
            group = self.group(self.group_of(named[name]))
            if group.devices and layout.num_devices != len(group.devices):
                raise PlanError(
                    f"node '{name}' has layout {layout}, which uses {layout.num_devices} of the "
                    f"{len(group.devices)} devices of group '{group.name}'; tp x pp x dp x cp must "
                    f"be {len(group.devices)}"
                )

    @staticmethod
    def read(file: Path) -> Plan:
        return read_model(Plan, file, "plan")


def one_group_plan(num_ranks: int = 1, device: str = "cpu") -> Plan:
    return Plan(groups=(GroupPlan(name="all", num_ranks=num_ranks, device=device),))


def _generation(node: Node) -> str:
    return f"{node.role}.generate" if node.kind is NodeKind.ROLLOUT and node.role else node.name
