"""Nodes of a step that may stream: they are consumed before all of their rows are there.

A rollout streams if its rows come from a source: a rank samples all that it has of a step together,
and a part of them goes on when its last row has ended. A train call streams if it can take such
parts one by one: each gives its gradient, and the optimizer's step comes with the last. Everything
else follows from the scopes of the ops in between; one that needs the whole batch is a barrier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from .graph import Graph
from .nodes import Constant, Node, NodeKind, RoleRef
from .role import Loss

_MOST_TOTALS = 64  # At least as many numbers as any loss has totals


@dataclass(frozen=True)
class Streaming:
    """Nodes that stream in a step, in program order."""

    rollouts: tuple[str, ...] = ()  # Nodes that stream
    # Train node that takes parts one by one -> the rollout in whose order.
    order_of: Mapping[str, str] = field(default_factory=dict[str, str])
    # Rollout or train node that does not stream -> why, and what to change.
    why_not: Mapping[str, str] = field(default_factory=dict[str, str])
    nodes: tuple[str, ...] = ()  # All rollouts and train nodes

    def __str__(self) -> str:
        """One line per rollout and train node."""
        return "\n".join(self._line(name) for name in self.nodes)

    def _line(self, name: str) -> str:
        if name in self.why_not:
            return f"{name} cannot stream: {self.why_not[name]}"
        if name in self.order_of:
            rollout = self.order_of[name]
            return (
                f"{name} streams: it takes the parts of {rollout} one by one, by the length of "
                "their longest rows"
            )
        return f"{name} streams: a part goes on when its last row has ended"


def streaming(graph: Graph) -> Streaming:
    rollouts: list[str] = []
    order_of: dict[str, str] = {}
    why_not: dict[str, str] = {}
    nodes = [node for node in graph.nodes if node.kind in (NodeKind.ROLLOUT, NodeKind.TRAIN)]
    for node in nodes:
        if node.kind is NodeKind.ROLLOUT:
            reason = _rollout_why_not(graph, node)
            if not reason:
                rollouts.append(node.name)
        else:
            sampled = [name for name in _before(graph, node) if name in rollouts]
            reason = _train_why_not(graph, node, sampled)
            if not reason:
                order_of[node.name] = sampled[0]
        if reason:
            why_not[node.name] = reason
    return Streaming(tuple(rollouts), order_of, why_not, tuple(node.name for node in nodes))


def _rollout_why_not(graph: Graph, node: Node) -> str:
    if node.scope == "batch":
        return "it is one call for the whole batch"
    if node.role is not None and graph.roles[node.role].keeps_state:
        return f"'{node.role}' keeps state, so each of its calls comes after the one before"
    asked = [argument.role for _, argument in node.arguments if isinstance(argument, RoleRef)]
    if asked:
        return f"it asks '{asked[0]}' on the way, and such calls are not served together"
    made = [ref.node for _, ref in node.inputs if graph[ref.node].kind is not NodeKind.SOURCE]
    return f"its rows are made in the step, by '{made[0]}', and not by a source" if made else ""


def _train_why_not(graph: Graph, node: Node, sampled: list[str]) -> str:
    if not node.learns:
        return "it has no loss, whose gradients could be added up"
    if len(sampled) != 1:
        which = " and ".join(f"'{name}'" for name in sampled)
        why = f"it trains on rows of {which}, and takes parts in the order of one rollout"
        return why if sampled else "nothing that it trains on streams"
    barriers = [name for name in _before(graph, node) if graph[name].scope == "batch"]
    barriers = [name for name in barriers if graph[name].kind is not NodeKind.SOURCE]
    if barriers:
        return f"'{barriers[0]}' needs the whole batch; use an op of row or group scope there"
    given = {name: a.value for name, a in node.arguments if isinstance(a, Constant)}
    loss = next(value for value in given.values() if isinstance(value, Loss))
    for name in ("epochs", "num_minibatches"):
        if given.get(name, 1) != 1:
            return f"{name} is {given[name]}, and each optimizer step needs its rows first; set 1"
    if loss.divisor(torch.ones(_MOST_TOTALS, dtype=torch.float64)) is None:
        name = type(loss).__name__
        return f"{name} needs sums over all rows before the first; use a loss with a `divisor`"
    return ""


def _before(graph: Graph, node: Node) -> list[str]:
    found = {ref.node for _, ref in node.inputs}
    for other in reversed(graph.nodes):
        if other.name in found:
            found |= {ref.node for _, ref in other.inputs}
    return [other.name for other in graph.nodes if other.name in found]
