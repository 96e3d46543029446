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

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ...dataflow.errors import PlanError
from ...dataflow.files import read_bytes
from ...dataflow.graph.graph import Graph, Node
from ...dataflow.kinds import NodeKind
from ...dataflow.registry import imported
from ...dataflow.runtime.placement import ClusterNode, DeviceGroup, Placement, check_placement
from ..inputs.cluster import MOST_DEVICES, ClusterSpec
from ..inputs.layout import Layout
from .prediction import Prediction


class GroupPlan(BaseModel):
    """One group of ranks: worker processes, each on a device of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")
    """What nodes and traces call it."""
    num_ranks: int = Field(default=1, ge=1, le=MOST_DEVICES)
    """Worker processes in the group; as many as `devices` where those are given."""
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda)$")
    """"cpu" or "cuda"; each rank of a CUDA group owns one device."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks among which every model's matrices are divided."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Ranks among which every model's layers are divided."""
    devices: tuple[Annotated[int, Field(ge=0, lt=MOST_DEVICES)], ...] = ()
    """Which devices of the cluster, in rank order; nothing is said about them if empty."""
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


class Plan(BaseModel):
    """Groups, and the group of every node; with a layout and a prediction where they are known."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    groups: tuple[GroupPlan, ...] = Field(min_length=1)
    """The worker groups; those that share devices take turns on them. The planner's share none."""
    nodes: Mapping[str, str] = Field(default_factory=dict[str, str])
    """Node name, or role name for all nodes of a role, -> group name; the node wins."""
    default_group: str = ""
    """Where every other node runs; the first group if empty."""
    chunks_per_rank: int = Field(default=1, ge=1, le=1024)
    """Pieces each rank of the largest group gets; more than 1 lets consumers start earlier."""
    layouts: Mapping[str, Layout] = Field(default_factory=dict[str, Layout])
    """Node name -> how its model is spread over the devices of its group."""
    micro_batch_tokens: Mapping[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict[str, int]
    )
    """Forward or train node -> tokens a rank computes at once; if absent, as the engine likes."""
    max_lag: int | None = Field(default=None, ge=0)
    """The schedule that it was made for; none in particular if None."""
    cluster: ClusterSpec | str = ""
    """The cluster that it was made for, or its name."""
    graph: str = ""
    """The fingerprint of the graph that it was made for; it is not compared if empty."""
    engines: str = ""
    """What it was made for runs its calls, as keys of a configuration; for messages."""
    num_steps: int | None = Field(default=None, ge=1)
    """Steps of the run that it was made for; not known if None."""
    prediction: Prediction | None = None
    """What it is expected to do."""

    @model_validator(mode="after")
    def _fits(self) -> Plan:
        _check_groups(self)
        return self

    @property
    def num_devices(self) -> int:
        return len({device for group in self.groups for device in group.devices})

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
        return imported("penstock.planner.report.plan_table:plan_table")(self)  # above this folder

    def group(self, name: str) -> GroupPlan:
        return next(group for group in self.groups if group.name == name)

    def group_of(self, node: Node) -> str:
        default = self.default_group or self.groups[0].name
        names = (node.name, _generation(node), node.role or "")
        return next((self.nodes[name] for name in names if name in self.nodes), default)

    def placement(self, graph: Graph) -> Placement:
        self._check_graph(graph)
        named = {
            name for node in graph.nodes for name in (node.name, node.role or "", _generation(node))
        }
        nodes = {
            node.name: self.group_of(node)
            for node in graph.nodes
            if node.kind is not NodeKind.SOURCE
        }
        unknown = {name: group for name, group in self.nodes.items() if name not in named}
        groups = tuple(self._on_nodes(group.device_group) for group in self.groups)
        num_chunks = self.chunks_per_rank * max(group.num_ranks for group in groups)
        durations_s = self.prediction.durations_s if self.prediction else {}
        placement = Placement(groups, {**nodes, **unknown}, num_chunks, durations_s)
        check_placement(graph, placement)
        self._check_served(graph, placement)
        self._check_layouts(graph)
        self._check_micro_batches(graph)
        return placement

    def _check_graph(self, graph: Graph) -> None:
        if self.graph not in ("", graph.fingerprint):
            raise PlanError(
                f"the plan was made for another version of {graph.name}: its graph is "
                f"{self.graph}, and this one is {graph.fingerprint}\n"
                "    plan again: penstock plan ... output=FILE"
            )

    def _on_nodes(self, group: DeviceGroup) -> DeviceGroup:
        cluster = self.cluster
        if not isinstance(cluster, ClusterSpec):
            return group
        nodes = (ClusterNode(cluster.node_of(d), cluster.labels_of(d)) for d in group.devices)
        return replace(group, nodes=tuple(nodes))

    def _check_served(self, graph: Graph, placement: Placement) -> None:
        for group in self.groups:
            given = placement.served_roles(graph, group.name)
            for role in group.served.keys() - given.keys():
                raise PlanError(
                    f"group '{group.name}' is served '{role}', which no node there is given"
                    + (f"; they are given {', '.join(given)}" if given else "")
                )

    def _check_layouts(self, graph: Graph) -> None:
        named = {node.name: node for node in graph.nodes if node.role}
        for name, layout in self.layouts.items():
            if name not in named:
                raise PlanError(
                    f"the plan has a layout for '{name}', which is no call of graph "
                    f"'{graph.name}'; its calls are {', '.join(named)}"
                )
            group = self.group(self.group_of(named[name]))
            if group.devices and layout.num_devices != len(group.devices):
                raise PlanError(
                    f"node '{name}' has layout {layout}, which uses {layout.num_devices} of the "
                    f"{len(group.devices)} devices of group '{group.name}'; tp x pp x dp x cp must "
                    f"be {len(group.devices)}"
                )

    def _check_micro_batches(self, graph: Graph) -> None:
        calls = [node.name for node in graph.nodes if node.role]
        for name in self.micro_batch_tokens:
            if name not in calls:
                raise PlanError(
                    f"the plan has micro_batch_tokens for '{name}', which is no call of graph "
                    f"'{graph.name}'; its calls are {', '.join(calls)}"
                )

    @staticmethod
    def read(file: Path) -> Plan:
        try:
            return Plan.model_validate_json(read_bytes(file).decode())
        except FileNotFoundError:
            raise PlanError(f"plan file {file} does not exist") from None
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"plan file {file} cannot be read: {error}") from None
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"])) or "the file"
            raise PlanError(
                f"plan file {file}: {key}: {first['msg']} (got {first['input']!r:.80})"
            ) from None


def _check_groups(plan: Plan) -> None:
    names = Counter(group.name for group in plan.groups)
    repeated = [name for name, count in names.items() if count > 1]
    if repeated:
        raise PlanError(f"two groups of the plan are named '{repeated[0]}'; names must be unique")
    for group in plan.groups:
        twice = [device for device, count in Counter(group.devices).items() if count > 1]
        if twice:
            raise PlanError(
                f"device {twice[0]} is in group '{group.name}' twice over; a process has a device "
                "that no other process of its group has"
            )
    used = [device for group in plan.groups for device in group.devices]
    if isinstance(plan.cluster, ClusterSpec) and used:
        plan.cluster.node_of(max(used))


def one_group_plan(num_ranks: int = 1, device: str = "cpu") -> Plan:
    """Everything on one group."""
    return Plan(groups=(GroupPlan(name="all", num_ranks=num_ranks, device=device),))


def _generation(node: Node) -> str:
    return f"{node.role}.generate" if node.kind is NodeKind.ROLLOUT and node.role else node.name
