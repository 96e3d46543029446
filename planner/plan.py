"""A plan: where every node runs, as data that a person can write and a program can read.

This first form holds groups and assignments only: what execution depends on. It says nothing about
layouts, memory or time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..dataflow.errors import PlanError
from ..dataflow.graph import Graph, NodeKind
from ..dataflow.placement import DeviceGroup, Placement, check_placement

__all__ = ["GroupPlan", "Plan"]


class GroupPlan(BaseModel):
    """One group of data-parallel ranks."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    """What nodes and traces call it."""
    num_ranks: int = Field(default=1, ge=1)
    """Worker processes in the group."""
    device: str = "cpu"
    """"cpu" or "cuda"; each rank of a CUDA group owns one device."""


class Plan(BaseModel):
    """Groups, and the group of every node.

    Example:
        >>> Plan(groups=(GroupPlan(name="train"), GroupPlan(name="rollout")),
        ...      nodes={"actor.generate": "rollout"}, default_group="train")
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    groups: tuple[GroupPlan, ...] = Field(min_length=1)
    """The worker groups; they share no device."""
    nodes: Mapping[str, str] = Field(default_factory=dict[str, str])
    """Node name, or role name for all nodes of a role, -> group name; the node wins."""
    default_group: str = ""
    """Where every other node runs; the first group if empty."""
    chunks_per_rank: int = Field(default=1, ge=1)
    """Pieces each rank of the largest group gets; more than 1 lets consumers start earlier."""

    def placement(self, graph: Graph) -> Placement:
        """What the engine needs of this plan for one graph.

        Raises:
            PlanError: If the plan names what the graph does not have, or trains a role twice over.
        """
        default = self.default_group or self.groups[0].name
        roles = {node.role for node in graph.nodes if node.role}
        named = {node.name: node.role or "" for node in graph.nodes}
        nodes = {
            node.name: self.nodes.get(node.name) or self.nodes.get(node.role or "") or default
            for node in graph.nodes
            if node.kind is not NodeKind.SOURCE
        }
        unknown = {
            name: group for name, group in self.nodes.items() if name not in named.keys() | roles
        }
        groups = tuple(DeviceGroup(g.name, g.num_ranks, g.device) for g in self.groups)
        num_chunks = self.chunks_per_rank * max(group.num_ranks for group in self.groups)
        placement = Placement(groups, {**nodes, **unknown}, num_chunks)
        check_placement(graph, placement)
        return placement

    @staticmethod
    def read(file: Path) -> Plan:
        """A plan from a JSON file.

        Raises:
            PlanError: If the file is missing or is no plan; says which key and why.
        """
        try:
            return Plan.model_validate_json(file.read_text())
        except FileNotFoundError:
            raise PlanError(f"plan file {file} does not exist") from None
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"])) or "the file"
            raise PlanError(
                f"plan file {file}: {key}: {first['msg']} (got {first['input']!r})"
            ) from None


def one_group_plan(num_ranks: int = 1, device: str = "cpu") -> Plan:
    """Everything on one group."""
    return Plan(groups=(GroupPlan(name="all", num_ranks=num_ranks, device=device),))
