"""Columns of each step that are handed out, or that a worker looks at beside the run.

Nothing of it is part of the graph: the scheduler says when no node needs an output any more, and
here it is held a little longer, until the step's result has been put together. No node depends on a
look, the scheduler does not know of it, and a checkpoint says nothing about it, so a run computes
the same with and without. A look is a call of a further program whose sources are named as the
nodes of the main graph that made the columns: a message with their handles is sent, and the
worker's process fetches them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, nearest
from ..graph.graph import Graph, Node, Ref
from ..graph.role import Role
from ..kinds import NodeKind, WeightRead
from ..scheduler.events import Output
from .columns import CallColumns, Part
from .executor import Program
from .host import Host
from .messages import Handle, NodeCall, RankWork, work
from .placement import Placement


class Hold:
    """Outputs that no node needs any more, held until those of their step are let go."""

    def __init__(self, nodes: Collection[str] = ()) -> None:
        self._nodes = frozenset(nodes)
        self._held: dict[int, list[Output]] = {}
        self._next = 0

    def take(self, output: Output) -> bool:
        """Keep an output that is about to be released; False if no observer wants it."""
        taken = output.node in self._nodes and output.step >= self._next
        if taken:
            self._held.setdefault(output.step, []).append(output)
        return taken

    def let_go(self, step: int) -> list[Output]:
        self._next = step + 1
        return self._held.pop(step, [])


class KeptColumns:
    def __init__(self, graph: Graph, names: Sequence[str]) -> None:
        self._graph = graph
        self._asked = {name: _asked(graph, name) for name in names}

    @property
    def nodes(self) -> frozenset[str]:
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


WATCH = "watch"
"""The program that looks."""


@dataclass(frozen=True)
class Watch:
    """Columns of a step that a worker looks at, and the node before which it does."""

    # The train node of the main graph before whose work the look is sent, to the first rank of its
    # group: then all columns are there, and that rank is about to be busy.
    before: str
    program: Program  # One call node, the worker's, and the sources of its columns

    @property
    def group(self) -> str:
        (group,) = set(self.program.placement.nodes.values())
        return group

    @property
    def nodes(self) -> frozenset[str]:
        graph = self.program.graph
        return frozenset(node.name for node in graph.nodes if node.kind is NodeKind.SOURCE)

    def work(
        self, step: int, inputs: Mapping[str, tuple[Handle, ...]], staleness: int | None
    ) -> RankWork:
        node = self.program.graph.nodes[-1]
        return work(Host.call, NodeCall(node.name, step, None, inputs, (), staleness))


def watch_before(
    node: Node,
    columns: Mapping[str, Ref],
    worker: tuple[str, type[Role], str],
    graph: Graph,
    placement: Placement,
) -> Watch:
    """A look at columns of a graph before one of its train nodes."""
    role, contract, method = worker
    makers = tuple(dict.fromkeys(ref.node for ref in columns.values()))
    sources = tuple(
        Node(
            name=maker,
            kind=NodeKind.SOURCE,
            scope="batch",
            ordinal=0,
            where=graph[maker].where,
            outputs=graph[maker].outputs,
            output_table=graph[maker].output_table,
        )
        for maker in makers
    )
    look = Node(
        name=f"{role}.{method}",
        kind=NodeKind.FORWARD,
        scope="batch",
        ordinal=0,
        where=node.where,
        role=role,
        method=method,
        arguments=tuple(columns.items()),
        reads=(WeightRead(role),),
    )
    watched = Graph(WATCH, (*sources, look), {role: contract}, {})
    group = placement.nodes[node.name]
    placed = Placement(placement.groups, {look.name: group}, placement.num_chunks)
    return Watch(node.name, Program(watched, placed))
