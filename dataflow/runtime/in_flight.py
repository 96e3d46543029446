"""Rollouts that can take newer weights while they are sampled, by graph and placement.

Newer weights come from a training that runs meanwhile, so a rollout takes some only where its role
is trained by another group, on devices of its own.
"""

from __future__ import annotations

from ..errors import PlanError
from ..graph.graph import Graph
from ..graph.nodes import Node, NodeKind
from ..graph.streaming import streaming
from .placement import Placement, sharing


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
