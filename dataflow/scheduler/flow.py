"""The scheduler's view of a step: nodes placed on groups of ranks, and the weights they read.

A `Flow` is what remains of a graph and a placement once tensors, devices and user code are taken
away. It is plain data; the engine builds it, the scheduler runs it.

A step's rows are split into `num_chunks` chunks, and every node's output is stored as that many
parts. Weights are single assignment: the version of a trainable role counts its train calls, n per
step, so "offset o at step s" names version `s * n + o`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..kinds import WeightRead

FlowKind = Literal["source", "op", "rollout", "forward", "train"]

_KINDS = ("source", "op", "rollout", "forward", "train")


@dataclass(frozen=True, slots=True)
class FlowNode:
    """One node of a step."""

    name: str  # Unique in the flow: "actor.generate"
    kind: FlowKind  # "source" nodes are filled by the shell and run on no rank
    # True if the node runs once per chunk (row or group scope), on rank `chunk % num_ranks`; False
    # if it is a barrier that needs every chunk of every input and runs on rank 0. A train node is
    # never chunked and runs on all ranks of its group.
    chunked: bool = True
    group: str = ""  # The group it runs on; "" for a source
    inputs: tuple[str, ...] = ()  # Names of the nodes whose outputs it takes
    # Weights it reads. A train node's read of its own role is implied.
    reads: tuple[WeightRead, ...] = ()
    trains: str | None = None  # The role whose next version it makes; only for kind "train"
    # True for a rollout that streams: a rank samples all its chunks of a step together, and answers
    # each when it is ready, by (size, chunk).
    streams: bool = False
    # The streaming rollout in whose answers' order a train node takes the chunks, one per rank at a
    # time; "" if it takes them all at once.
    order_of: str = ""
    # Seconds that a plan expects all of its tasks of a step to take; None without a plan.
    predicted_s: float | None = None


@dataclass(frozen=True)
class Flow:
    """One step of an algorithm, placed."""

    name: str  # The step function's name, for reports
    nodes: tuple[FlowNode, ...]  # In program order, which must be a topological order
    groups: Mapping[str, int]  # Number of ranks of each group; no rank is in two groups
    homes: Mapping[str, str]  # For each trainable role the group where all its train nodes run
    trains_per_step: Mapping[str, int]  # Train nodes of each trainable role
    num_chunks: int = 1  # Parts in which a step's rows are handled
    # Group -> groups that have some of its devices, and so never work at the same time.
    sharing: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_roles(self)
        seen: dict[str, FlowNode] = {}
        trained = dict.fromkeys(self.homes, 0)
        for node in self.nodes:
            _check_node(self, node, seen)
            _check_reads(self, node, trained)
            seen[node.name] = node
            if node.trains is not None:
                trained[node.trains] += 1
        if not any(node.kind == "source" for node in self.nodes):
            raise ValueError(f"flow '{self.name}' has no source node: its rows come from nowhere")


def _check_sizes(flow: Flow) -> None:
    if flow.num_chunks < 1:
        raise ValueError(f"Flow.num_chunks must be at least 1, got {flow.num_chunks}")
    for group, num_ranks in flow.groups.items():
        if num_ranks < 1:
            raise ValueError(f"group '{group}' must have at least 1 rank, got {num_ranks}")
    for group, others in flow.sharing.items():
        for other in sorted(others):
            known = {group, other} <= flow.groups.keys()
            if not known or group == other or group not in flow.sharing.get(other, ()):
                raise ValueError(
                    f"Flow.sharing says that '{group}' shares devices with '{other}'; both must be "
                    "groups, two of them, and it must say the reverse as well"
                )


def _check_roles(flow: Flow) -> None:
    counted = dict.fromkeys(flow.homes, 0)
    for node in flow.nodes:
        if node.trains is None:
            continue
        if node.trains not in counted:
            raise ValueError(f"node '{node.name}' trains '{node.trains}', which Flow.homes lacks")
        counted[node.trains] += 1
    if dict(flow.trains_per_step) != counted:
        raise ValueError(
            f"Flow.trains_per_step is {dict(flow.trains_per_step)}, but the nodes train {counted}"
        )
    for role, group in flow.homes.items():
        if group not in flow.groups:
            raise ValueError(f"role '{role}' lives on group '{group}', which Flow.groups lacks")
        if counted[role] == 0:
            raise ValueError(f"role '{role}' has a home but no node trains it; leave it out")


def _check_node(flow: Flow, node: FlowNode, seen: Mapping[str, FlowNode]) -> None:
    where = f"node '{node.name}'"
    if node.kind not in _KINDS:
        raise ValueError(f"{where}: kind must be one of {', '.join(_KINDS)}, got {node.kind!r}")
    if node.name in seen:
        raise ValueError(f"{where} appears twice; node names must be unique")
    if (node.kind == "train") != (node.trains is not None):
        raise ValueError(f"{where} of kind '{node.kind}' has trains={node.trains!r}")
    if node.kind == "source":
        if node.group or node.inputs or node.reads:
            raise ValueError(f"{where} is a source: it has no group, inputs or reads")
        return
    if node.group not in flow.groups:
        raise ValueError(f"{where} runs on group '{node.group}', which Flow.groups lacks")
    if node.trains is not None and (node.chunked or node.group != flow.homes[node.trains]):
        raise ValueError(
            f"{where} trains '{node.trains}': it must not be chunked and must run on "
            f"'{flow.homes[node.trains]}'; got chunked={node.chunked}, group '{node.group}'"
        )
    _check_streaming(flow, node, seen)
    if len(set(node.inputs)) != len(node.inputs):
        raise ValueError(f"{where} names an input twice: {', '.join(node.inputs)}")
    for name in node.inputs:
        if name not in seen:
            raise ValueError(f"{where} takes '{name}', which is not a node before it")
        if seen[name].kind == "train":
            raise ValueError(f"{where} takes '{name}': a train call yields metrics, not columns")


def _check_streaming(flow: Flow, node: FlowNode, seen: Mapping[str, FlowNode]) -> None:
    where = f"node '{node.name}'"
    if node.streams and not (node.kind == "rollout" and node.chunked):
        raise ValueError(f"{where} streams; only a chunked rollout can")
    if node.streams and any(seen[name].kind != "source" for name in node.inputs if name in seen):
        raise ValueError(f"{where} streams; its inputs must all be sources")
    if not node.order_of:
        return
    if node.trains is None or node.order_of not in seen or not seen[node.order_of].streams:
        raise ValueError(
            f"{where} has order_of='{node.order_of}': it must be a train node, and that one a "
            "streaming rollout before it"
        )
    if flow.num_chunks % flow.groups[node.group]:
        raise ValueError(
            f"{where} takes chunks one by one on {flow.groups[node.group]} ranks; their number, "
            f"{flow.num_chunks}, must be a multiple of the ranks"
        )


def _check_reads(flow: Flow, node: FlowNode, trained: Mapping[str, int]) -> None:
    where = f"node '{node.name}'"
    roles = [read.role for read in node.reads]
    if len(set(roles)) != len(roles):
        raise ValueError(f"{where} reads a role twice: {', '.join(roles)}")
    for read in node.reads:
        expected = trained.get(read.role, 0)
        if read.offset != expected:
            raise ValueError(
                f"{where} reads '{read.role}' at offset {read.offset}, but {expected} train "
                f"node(s) of it come before; nodes must be in program order"
            )
        if read.role == node.trains and read.lagged:
            raise ValueError(f"{where} trains '{read.role}' and cannot read it lagged")
        if read.at and read.at not in flow.groups:
            raise ValueError(f"{where} reads '{read.role}' on '{read.at}', which is no group")
