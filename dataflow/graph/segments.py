"""Conditions under which a step's rollouts may go on in later steps.

A rollout's rows of a step are then those of the groups that end in it, whichever step began them.
Whatever is computed of them must hang on the rollout alone: the step's own data, and what is made
of these, are other rows.
"""

from __future__ import annotations

from ..errors import FlowError
from .graph import Graph
from .nodes import Constant, Node, NodeKind
from .streaming import streaming


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
