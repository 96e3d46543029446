"""From a plan's groups to groups of processes: one for every engine and division of a model.

A plan may give the calls of one group different layouts, and another engine generates than trains.
A process runs one engine in one layout. So such a group becomes several, on the same devices, and
they take turns on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...dataflow.errors import PlanError
from ...dataflow.graph.graph import Graph, Node, NodeKind
from ...planner.inputs.calls import CALL_KINDS
from ...planner.plan.plan import GroupPlan, Plan
from ..inputs.engines import Engines


@dataclass(frozen=True)
class _Kind:
    """What a process must be to run a call.

    Attributes:
        engine: What trains there; or for generation by another engine the role, because a process
            has at most one worker that only generates.
        generates: Whether that is the case.
        tensor_parallel: Processes that share matrices.
        pipeline_parallel: Stages.
    """

    engine: str
    generates: bool
    tensor_parallel: int
    pipeline_parallel: int

    def name(self, group: str, beside: Sequence[_Kind]) -> str:
        """What the group of these processes is called, the first of several keeping the name."""
        if self == beside[0]:
            return group
        sizes = f"tp{self.tensor_parallel}pp{self.pipeline_parallel}"
        several = {kind.engine for kind in beside if kind.generates == self.generates} != {
            self.engine
        }
        of = f"-{self.engine}" if several else ""
        return f"{group}{of}-rollout" if self.generates else f"{group}{of}-{sizes}"


def check_layouts(plan: Plan, graph: Graph, engines: Engines, where: str) -> None:
    """Refuse layouts that the engines do not run.

    Raises:
        PlanError: Naming the node; `where` begins the message.
    """
    for node in graph.nodes:
        layout = plan.layouts.get(node.name)
        if layout is None or node.kind not in CALL_KINDS:
            continue
        problem = engines.runs(graph, node).why_not(layout, CALL_KINDS[node.kind])
        if problem is not None:
            other = plan.engines not in ("", engines.words)
            given = f"give the run the engines of the plan: {plan.engines}; or " if other else ""
            raise PlanError(
                f"{where}: node '{node.name}' has layout {layout}, but {problem}\n"
                f"    {given}plan for it: {engines.words}"
            )


def divided(plan: Plan, graph: Graph, engines: Engines) -> Plan:
    """The plan with a group for every kind of process.

    The first kind of a group, the one that trains if there is any, keeps its name and whatever
    does not say what it needs. Groups that nothing is to be divided in stay as they are.
    """
    groups: list[GroupPlan] = []
    nodes = dict(plan.nodes)
    free = 1 + max((d for group in plan.groups for d in group.devices), default=-1)
    for group in plan.groups:
        kinds = {n.name: _kind(n, group, plan, graph, engines) for n in _of(plan, graph, group)}
        every = _in_order(graph, kinds)
        if len(every) < 2:
            groups.append(_sized(group, every[0]) if every else group)
            continue
        devices = group.devices or tuple(range(free, free + group.num_ranks))
        free = max(free, max(devices) + 1)
        shared = group.model_copy(update={"devices": devices})
        names = {kind: kind.name(group.name, every) for kind in every}
        groups += [_sized(shared, kind, names[kind]) for kind in every]
        nodes |= {name: names[kind or every[0]] for name, kind in kinds.items()}
    if tuple(groups) == plan.groups:
        return plan
    default = plan.default_group or plan.groups[0].name
    return Plan.model_validate(
        {**dict(plan), "groups": tuple(groups), "nodes": nodes, "default_group": default}
    )


def _of(plan: Plan, graph: Graph, group: GroupPlan) -> list[Node]:
    return [
        node
        for node in graph.nodes
        if node.kind is not NodeKind.SOURCE and plan.group_of(node) == group.name
    ]


def _kind(node: Node, group: GroupPlan, plan: Plan, graph: Graph, engines: Engines) -> _Kind | None:
    """What a node needs; None if any process will do."""
    apart = engines.apart(graph, node)
    layout = plan.layouts.get(node.name)
    if layout is None and not apart and not _trains(node, graph, engines):
        return None
    sizes = (group.tensor_parallel, group.pipeline_parallel)
    if layout is not None:
        sizes = engines.runs(graph, node).division(layout)
    role = node.role or ""
    return _Kind(role if apart else engines.trainer(role).name, apart, *sizes)


def _trains(node: Node, graph: Graph, engines: Engines) -> bool:
    """Whether a node needs the engine that trains: also to evaluate what another generates with."""
    if node.kind is NodeKind.TRAIN or node.role in engines.of_roles:
        return True
    return any(other.role == node.role and engines.apart(graph, other) for other in graph.nodes)


def _in_order(graph: Graph, kinds: dict[str, _Kind | None]) -> list[_Kind]:
    """The kinds of a group: first that of its first train call, then in program order."""
    trained = [kinds[n.name] for n in graph.nodes if n.kind is NodeKind.TRAIN and n.name in kinds]
    return [kind for kind in dict.fromkeys([*trained, *kinds.values()]) if kind is not None]


def _sized(group: GroupPlan, kind: _Kind, name: str = "") -> GroupPlan:
    """The group as processes of one kind."""
    return GroupPlan.model_validate(
        {
            **dict(group),
            "name": name or group.name,
            "tensor_parallel": kind.tensor_parallel,
            "pipeline_parallel": kind.pipeline_parallel,
        }
    )
