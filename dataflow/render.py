"""How a graph is shown: plain text for terminals and tests, Mermaid and SVG for documents."""

from __future__ import annotations

from .graph import Argument, Constant, Graph, Node, NodeKind, Ref, RoleRef, TableArgument

__all__ = ["to_text"]


def to_text(graph: Graph) -> str:
    """The graph as text, one node per paragraph in program order; stable, so tests compare it."""
    lines = [f"graph {graph.name}"]
    for name, table in graph.sources.items():
        lines.append(f"  source {name}: {table.__name__}")
    for name, contract in graph.roles.items():
        trained = "trained" if graph.trains_per_step.get(name) else "frozen"
        lines.append(f"  role {name}: {contract.__name__}, {trained}")
    for node in graph.nodes:
        if node.kind is not NodeKind.SOURCE:
            lines.extend(["", *_node_lines(graph, node)])
    lines.extend(["", f"returns {', '.join(graph.results) or 'nothing'}"])
    return "\n".join(lines)


def _node_lines(graph: Graph, node: Node) -> list[str]:
    head = f"{node.name}  [{node.kind.value}, {node.scope}]"
    reads = [
        f"{read.role}@{read.offset}{' or older' if read.lagged else ''}"
        for read in node.reads
        if graph.trains_per_step.get(read.role)
    ]
    if node.kind is NodeKind.TRAIN:
        head += f"  {reads[0]} -> {node.role}@{node.reads[0].offset + 1}"
    elif reads:
        head += f"  reads {', '.join(reads)}"
    lines = [head]
    for name, argument in node.arguments:
        lines.extend(_argument_lines(graph, node, name, argument))
    for output in node.outputs:
        lines.append(f"  -> {output.name} {output.spec}")
    return lines


def _argument_lines(graph: Graph, node: Node, name: str, argument: Argument) -> list[str]:
    if isinstance(argument, TableArgument):
        lines = [f"  {name}: {argument.table.__name__}"]
        for field, value in argument.fields:
            lines.extend("  " + line for line in _argument_lines(graph, node, field, value))
        return lines
    if isinstance(argument, Ref):
        arrow = "~>" if _streams(graph, node, argument) else "<-"
        return [f"  {name} {arrow} {argument}"]
    if isinstance(argument, RoleRef):
        return [f"  {name} = role {argument.role}"]
    return [f"  {name} = {Constant(argument.value)}"]


def _streams(graph: Graph, node: Node, ref: Ref) -> bool:
    """True if the edge may carry part of a batch before the rest is there."""
    return node.scope != "batch" and graph[ref.node].scope != "batch"
