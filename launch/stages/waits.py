"""What a step waits for: generation, the reward, training, new weights.

Counted is the time in which the step was at work between the step before it and its own end; what
was done ahead of that, as with `schedule.max_lag`, nobody waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...algorithms.roles.language import Policy
from ...dataflow.graph.graph import Graph, Node, NodeKind
from ...dataflow.runtime.engine import StepResult

WEIGHTS = "weights"

Spans = Sequence[tuple[float, float]]


class Waits:
    """Says what the steps of one stage wait for.

    Args:
        graph: The stage's step.
    """

    def __init__(self, graph: Graph) -> None:
        self._what = {node.name: _what(graph, node) for node in graph.nodes}

    def of(self, result: StepResult, begin_s: float, end_s: float) -> Mapping[str, float]:
        """What was waited for -> seconds, "other" for the time in which no worker was at work.

        Args:
            result: The step.
            begin_s: When the step before it was complete, in seconds since the epoch.
            end_s: When it was itself.
        """
        spans: dict[str, list[tuple[float, float]]] = {}
        for span in result.spans:
            spans.setdefault(self._what[span.node], []).append((span.start_s, span.end_s))
        if result.weights_s:
            spans[WEIGHTS] = list(result.weights_s)
        every = [one for each in spans.values() for one in each]
        found = {what: union_s(its, begin_s, end_s) for what, its in spans.items()}
        found["other"] = max(0.0, end_s - begin_s - union_s(every, begin_s, end_s))
        return found


def union_s(spans: Spans, begin_s: float, end_s: float) -> float:
    """Seconds between two moments in which at least one of the spans was going on."""
    total_s, reached_s = 0.0, begin_s
    for start_s, stop_s in sorted(spans):
        start_s, stop_s = max(start_s, reached_s), min(stop_s, end_s)
        if stop_s > start_s:
            total_s += stop_s - start_s
            reached_s = stop_s
    return total_s


def _what(graph: Graph, node: Node) -> str:
    match node.kind:
        case NodeKind.ROLLOUT:
            is_policy = issubclass(graph.roles[node.role or ""], Policy)
            return "generation" if is_policy else "environments"
        case NodeKind.TRAIN:
            return "training"
        case NodeKind.FORWARD:
            return "reward" if node.method == "score" else "forward passes"
        case _:
            return "ops"
