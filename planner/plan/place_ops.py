"""Groups for the nodes that cost nothing: ops, and roles without a model.

They take no time, but each runs on a rank of some group and waits until that rank is free. An op on
the wrong group, behind a generation that has nothing to do with it, can hold up a step for seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...dataflow.errors import PlanError
from ...dataflow.graph.graph import Graph, Node
from ...dataflow.kinds import NodeKind
from .simulate import simulate

_SAME = 1e-9  # A smaller share of a step is no improvement


def place_ops(
    graph: Graph,
    calls: Mapping[str, str],
    durations_s: Mapping[str, float],
    *,
    max_lag: int = 0,
    target_s: float = 0.0,
) -> dict[str, str]:
    """A group for every node, such that the scheduler loses as little time as can be.

    Few rules are tried, the best is improved node by node, and all are judged by playing the step
    through. With one group there is nothing to choose.
    """
    _check(graph, calls)
    calls = {**_with_their_roles(graph, calls), **calls}
    groups = tuple(dict.fromkeys(calls.values()))
    free = [n for n in graph.nodes if n.kind is not NodeKind.SOURCE and n.name not in calls]
    best: dict[str, str] = {}
    best_s = float("inf")
    for nodes in _by_rule(graph, calls, free, groups):
        if len(groups) == 1:
            return nodes
        taken_s = simulate(graph, nodes, durations_s, max_lag=max_lag).step_time_s
        if taken_s < best_s * (1 - _SAME):
            best, best_s = nodes, taken_s
        if best_s <= target_s * (1 + _SAME):
            return best
    for names in _together(free):
        for group in groups:
            nodes = {**best, **dict.fromkeys(names, group)}
            taken_s = simulate(graph, nodes, durations_s, max_lag=max_lag).step_time_s
            if taken_s < best_s * (1 - _SAME):
                best, best_s = nodes, taken_s
        if best_s <= target_s * (1 + _SAME):
            break
    return best


def _check(graph: Graph, calls: Mapping[str, str]) -> None:
    known = {node.name for node in graph.nodes if node.kind is not NodeKind.SOURCE}
    unknown = sorted(calls.keys() - known)
    if unknown:
        raise PlanError(f"'{unknown[0]}' is placed, but graph '{graph.name}' has no such node")
    if not calls:
        raise PlanError(f"no node of graph '{graph.name}' is placed, so there is no group")


def _with_their_roles(graph: Graph, calls: Mapping[str, str]) -> dict[str, str]:
    sampled = {graph[n].role: g for n, g in calls.items() if graph[n].kind is NodeKind.ROLLOUT}
    others = {graph[n].role: g for n, g in calls.items() if graph[n].kind is not NodeKind.ROLLOUT}
    homes = {**sampled, **others}
    makers = [node for node in graph.nodes if node.kind is NodeKind.TRAIN and node.role in homes]
    return {node.name: homes[node.role] for node in makers}


def _by_rule(
    graph: Graph, calls: Mapping[str, str], free: list[Node], groups: tuple[str, ...]
) -> Iterator[dict[str, str]]:
    yield {**calls, **_follow(graph, calls, free, groups[0], backward=False)}
    yield {**calls, **_follow(graph, calls, free, groups[0], backward=True)}
    for group in groups:
        yield {**calls, **dict.fromkeys((node.name for node in free), group)}


def _follow(
    graph: Graph, calls: Mapping[str, str], free: list[Node], default: str, *, backward: bool
) -> dict[str, str]:
    placed = dict(calls)
    for node in reversed(free) if backward else free:
        if backward:
            near = [placed[name] for name in graph.consumers(node.name) if name in placed]
        else:
            near = [placed[ref.node] for _, ref in node.inputs if ref.node in placed][::-1]
        placed[node.name] = near[0] if near else default
    made = {node.name: placed[node.name] for node in free}
    for names in _together(free):
        made |= dict.fromkeys(names, made[names[0]])
    return made


def _together(free: list[Node]) -> list[tuple[str, ...]]:
    trained = {node.role for node in free if node.kind is NodeKind.TRAIN}
    call_groups: dict[str, list[str]] = {}
    for node in free:
        call_groups.setdefault(
            f"role {node.role}" if node.role in trained else node.name, []
        ).append(node.name)
    return [tuple(names) for names in call_groups.values()]
