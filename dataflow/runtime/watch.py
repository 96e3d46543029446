"""A look at what each step made, beside the run: a worker is given columns, and nothing waits.

What is watched is no part of the graph. No node depends on the look, the scheduler does not know of
it, and a checkpoint says nothing about it, so a run computes the same with and without. A look is a
call of a further program whose sources are named as the nodes of the main graph that made the
columns: a message with their handles is sent, and the worker's process fetches them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..graph.graph import Graph, Node, NodeKind, Ref, WeightRead
from ..graph.role import Role
from .checkpoint import Suspended
from .executor import Program
from .host import Host
from .kept import Hold, KeptColumns
from .messages import Handle, NodeCall, RankWork, work
from .placement import Placement

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
        """The group whose first rank looks."""
        (group,) = set(self.program.placement.nodes.values())
        return group

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes of the main graph whose outputs are looked at."""
        graph = self.program.graph
        return frozenset(node.name for node in graph.nodes if node.kind is NodeKind.SOURCE)

    def work(
        self, step: int, inputs: Mapping[str, tuple[Handle, ...]], staleness: int | None
    ) -> RankWork:
        """The message that has the worker look."""
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


def holds(watch: Watch | None, kept: KeptColumns, suspended: Suspended | None) -> tuple[Hold, Hold]:
    if suspended is not None:
        return suspended.holds
    return Hold(watch.nodes if watch else ()), Hold(kept.nodes)
