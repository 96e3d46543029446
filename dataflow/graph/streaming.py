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

from ..errors import FlowError
from ..kinds import NodeKind
from .graph import Constant, Graph, Node, RoleRef
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


def check_segments(graph: Graph) -> None:
    """Require that rollouts may go on in later steps."""
    found = streaming(graph)
    for node in graph.nodes:
        if node.kind is NodeKind.ROLLOUT and node.name in found.why_not:
            raise FlowError(
                f"'{node.name}' cannot go on in a later step (Schedule.segment_tokens): "
                f"{found.why_not[node.name]}",
                where=node.where,
                fix="set Schedule(segment_tokens=0), or have it begin with the step's own data",
            )
        if node.kind is NodeKind.TRAIN:
            _check_minibatches(node)
    after: dict[str, str] = {}
    for node in graph.nodes:
        if node.name in found.rollouts:
            after[node.name] = node.name
            continue
        rollouts = {after[ref.node] for _, ref in node.inputs if ref.node in after}
        if not rollouts:
            continue
        after[node.name] = next(iter(sorted(rollouts)))
        others = [str(ref) for _, ref in node.inputs if ref.node not in after]
        if others or len(rollouts) > 1:
            raise _mixed(node, sorted(rollouts), others)


def _check_minibatches(node: Node) -> None:
    given = {name: a.value for name, a in node.arguments if isinstance(a, Constant)}
    if given.get("num_minibatches", 1) != 1:
        raise FlowError(
            f"'{node.name}' cuts its rows into {given['num_minibatches']} minibatches, and with "
            "Schedule.segment_tokens a step may have fewer rows than that",
            where=node.where,
            fix="set num_minibatches=1, or Schedule(segment_tokens=0)",
        )


def _mixed(node: Node, rollouts: list[str], others: list[str]) -> FlowError:
    beside = f"'{others[0]}'" if others else f"those of '{rollouts[1]}'"
    return FlowError(
        f"'{node.name}' takes {beside} beside rows of '{rollouts[0]}', which with "
        "Schedule.segment_tokens are of groups that ended in this step, whichever began them",
        where=node.where,
        fix=f"take all of its columns from '{rollouts[0]}' (ids say which rows they are), or set "
        "Schedule(segment_tokens=0)",
    )
