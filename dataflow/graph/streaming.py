"""Which nodes of a step may stream: begin to be consumed before all of their rows are there.

A rollout streams if its prompts are the step's own: a rank samples all of its rows together, and
those of a prompt flow on when the last has ended. A train call streams if it can take such groups
one by one: each gives its gradient, and the optimizer's step comes with the last. Everything else
follows from the scopes of the ops in between; one that needs the whole batch is a barrier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .graph import Graph
from .nodes import Constant, Node, NodeKind
from .role import Loss

__all__ = ["Streaming", "streaming"]

_MOST_TOTALS = 64
"""At least as many numbers as any loss has totals."""


@dataclass(frozen=True)
class Streaming:
    """What streams in a step.

    Attributes:
        rollouts: Nodes that stream.
        order_of: Train node that takes groups one by one -> the rollout in whose order.
        why_not: Rollout or train node that does not stream -> why, and what to change.
    """

    rollouts: frozenset[str]
    order_of: Mapping[str, str]
    why_not: Mapping[str, str]

    def __str__(self) -> str:
        """One line per rollout and train node."""
        lines = [f"{name} streams: each group flows on when it has ended" for name in self.rollouts]
        lines += [
            f"{name} streams: takes groups of {rollout} by their longest response"
            for name, rollout in self.order_of.items()
        ]
        lines += [f"{name} cannot stream: {reason}" for name, reason in self.why_not.items()]
        return "\n".join(sorted(lines))


def streaming(graph: Graph) -> Streaming:
    """What can stream in a step of `graph`."""
    rollouts: list[str] = []
    order_of: dict[str, str] = {}
    why_not: dict[str, str] = {}
    for node in graph.nodes:
        if node.kind is NodeKind.ROLLOUT:
            reason = _rollout_why_not(graph, node)
            if not reason:
                rollouts.append(node.name)
        elif node.kind is NodeKind.TRAIN:
            sampled = [name for name in _before(graph, node) if name in rollouts]
            reason = _train_why_not(graph, node, sampled)
            if not reason:
                order_of[node.name] = sampled[0]
        else:
            continue
        if reason:
            why_not[node.name] = reason
    return Streaming(frozenset(rollouts), order_of, why_not)


def _rollout_why_not(graph: Graph, node: Node) -> str:
    """Why a rollout cannot stream; "" if it can."""
    if node.scope == "batch":
        return "it is one call for the whole batch"
    made = [ref.node for _, ref in node.inputs if graph[ref.node].kind is not NodeKind.SOURCE]
    return f"its prompts are made in the step, by '{made[0]}'" if made else ""


def _train_why_not(graph: Graph, node: Node, sampled: list[str]) -> str:
    """Why a train call cannot take groups one by one; "" if it can."""
    if len(sampled) != 1:
        which = " and ".join(f"'{name}'" for name in sampled)
        return f"it trains on rows of {which}" if sampled else "nothing that it trains on streams"
    barriers = [name for name in _before(graph, node) if graph[name].scope == "batch"]
    barriers = [name for name in barriers if graph[name].kind is not NodeKind.SOURCE]
    if barriers:
        return f"'{barriers[0]}' needs the whole batch"
    given = {name: a.value for name, a in node.arguments if isinstance(a, Constant)}
    for name in ("epochs", "num_minibatches"):
        if given.get(name, 1) != 1:
            return f"{name} is {given[name]}, and every optimizer step needs its rows first; set 1"
    loss = given.get("loss")
    if not isinstance(loss, Loss):
        return "it has no loss, whose parts could be added up"
    if loss.divisor(torch.ones(_MOST_TOTALS, dtype=torch.float64)) is None:
        return f"{type(loss).__name__} needs the totals of all rows before the first"
    return ""


def _before(graph: Graph, node: Node) -> list[str]:
    """All nodes on which one hangs, by program order."""
    found = {ref.node for _, ref in node.inputs}
    for other in reversed(graph.nodes):
        if other.name in found:
            found |= {ref.node for _, ref in other.inputs}
    return [other.name for other in graph.nodes if other.name in found]
