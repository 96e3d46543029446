"""A graph as a Mermaid flowchart; `str(graph)` is its plain text, and `svg` draws it."""

from __future__ import annotations

from ..graph.graph import Graph, Node
from .svg import KIND_FILLS, ArrowKind, arrows_of, role_colors

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
    note = graph.weights_note(node)
    if note:
        lines.append(_mermaid_escape(note))
    lines.extend(_mermaid_escape(f"{output.name} {output.spec}") for output in node.outputs)
    return "<br/>".join(lines)


def _mermaid_escape(text: str) -> str:
    for character, code in (("#", "#35;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;")):
        text = text.replace(character, code)
    return text
