"""How a graph is shown: plain text for terminals and tests, Mermaid and SVG for documents."""

from __future__ import annotations

from ..graph.graph import Argument, Constant, Graph, Node, NodeKind, Ref, RoleRef, TableArgument
from .edges import ArrowKind, arrows_of, streams, weights_note
from .svg import KIND_FILLS, role_colors, to_svg

__all__ = ["to_mermaid", "to_svg", "to_text"]


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
    note = weights_note(graph, node)
    head = f"{node.name}  [{node.kind.value}, {node.scope}]"
    lines = [f"{head}  {note}" if note else head]
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
        arrow = "~>" if streams(graph, node, argument) else "<-"
        return [f"  {name} {arrow} {argument}"]
    if isinstance(argument, RoleRef):
        return [f"  {name} = role {argument.role}"]
    return [f"  {name} = {Constant(argument.value)}"]


_MERMAID_ARROWS: dict[ArrowKind, str] = {"stream": "-->", "barrier": "==>", "weights": "-.->"}


def to_mermaid(graph: Graph) -> str:
    """The graph as a Mermaid flowchart: thin arrows stream, thick ones are barriers.

    Nodes are filled by kind and outlined in their role's color; a dotted arrow leads from a train
    call to the calls after it that read the weights it made.
    """
    ids = {node.name: f"n{index}" for index, node in enumerate(graph.nodes)}
    lines = [f"%% {graph.name}: --> streams, ==> is a barrier, -.-> is new weights"]
    lines.append("flowchart TB")
    for node in graph.nodes:
        lines.append(f'  {ids[node.name]}["{_mermaid_label(graph, node)}"]:::{node.kind.value}')
    for arrow in arrows_of(graph):
        text = "<br/>".join(_mermaid_escape(label) for label in arrow.labels)
        drawn = _MERMAID_ARROWS[arrow.kind]
        lines.append(f'  {ids[arrow.source]} {drawn}|"{text}"| {ids[arrow.target]}')
    for kind, fill in KIND_FILLS.items():
        lines.append(f"  classDef {kind.value} fill:{fill},stroke:#57606a,color:#1f2328")
    colors = role_colors(graph)
    for node in graph.nodes:
        if node.role is not None:
            lines.append(f"  style {ids[node.name]} stroke:{colors[node.role]},stroke-width:3px")
    return "\n".join(lines)


def _mermaid_label(graph: Graph, node: Node) -> str:
    lines = [f"<b>{_mermaid_escape(node.name)}</b>", f"{node.kind.value}, {node.scope}"]
    note = weights_note(graph, node)
    if note:
        lines.append(_mermaid_escape(note))
    lines.extend(_mermaid_escape(f"{output.name} {output.spec}") for output in node.outputs)
    return "<br/>".join(lines)


def _mermaid_escape(text: str) -> str:
    """Mermaid spells special characters as entity codes; `#` opens one, so it goes first."""
    for character, code in (("#", "#35;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;")):
        text = text.replace(character, code)
    return text
