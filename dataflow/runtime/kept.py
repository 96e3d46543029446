"""Columns that a run hands out with each step, and what is stored for whoever looks later.

Nothing of it is part of the graph: the scheduler says when no node needs an output any more, and
here it is held a little longer, until the step's result has been put together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..errors import ConfigError, nearest
from ..graph.graph import Graph, Node, Ref
from ..scheduler.events import Output
from .call_columns import CallColumns
from .messages import Part


class Hold:
    """Outputs that no node needs any more, held until those of their step are let go."""

    def __init__(self, nodes: Collection[str] = ()) -> None:
        self._nodes = frozenset(nodes)
        self._held: dict[int, list[Output]] = {}
        self._next = 0

    def take(self, output: Output) -> bool:
        """Hold an output that is about to be forgotten; False if nobody is to look at it."""
        taken = output.node in self._nodes and output.step >= self._next
        if taken:
            self._held.setdefault(output.step, []).append(output)
        return taken

    def let_go(self, step: int) -> list[Output]:
        self._next = step + 1
        return self._held.pop(step, [])


class KeptColumns:
    """Columns that are handed out with each step."""

    def __init__(self, graph: Graph, names: Sequence[str]) -> None:
        self._graph = graph
        self._asked = {name: _asked(graph, name) for name in names}

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes whose outputs are handed out."""
        return frozenset(ref.node for refs in self._asked.values() for ref in refs)

    def tables(self, parts: Mapping[str, list[Part]]) -> dict[str, Any]:
        """Name -> its column as a dense tensor on the CPU, or its table of such columns."""
        columns = CallColumns(self._graph, parts)
        found: dict[str, Any] = {}
        for name, refs in self._asked.items():
            if refs[0].node not in parts:
                continue
            dense = {ref.column: columns.dense(ref).cpu() for ref in refs}
            table = self._graph[name].output_table if name in _makers(self._graph) else None
            found[name] = table(**dense) if table is not None else dense[refs[0].column]
        return found


def _makers(graph: Graph) -> dict[str, Node]:
    return {node.name: node for node in graph.nodes if node.outputs}


def _asked(graph: Graph, name: str) -> tuple[Ref, ...]:
    makers = _makers(graph)
    if name in makers:
        return tuple(Ref(name, output.name) for output in makers[name].outputs)
    refs = [Ref(node.name, output.name) for node in makers.values() for output in node.outputs]
    columns = {str(ref): ref for ref in refs}
    if name in columns:
        return (columns[name],)
    if any(node.name == name for node in graph.nodes):
        raise ConfigError(
            f"keep: '{name}' makes no columns; what it reports is in StepResult.metrics, as "
            f"'{name}/...'"
        )
    raise ConfigError(
        f"keep: graph '{graph.name}' makes no '{name}'{nearest(name, [*makers, *columns])}\n"
        f"    it makes: {', '.join(makers)}; of a table one column is NODE.COLUMN"
    )
