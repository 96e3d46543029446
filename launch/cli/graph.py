"""`penstock graph`: show the graph of an algorithm's step. Builds no model and reads no data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...dataflow.errors import ConfigError
from ...dataflow.graph.graph import Graph, NodeKind
from ...dataflow.graph.streaming import streaming
from ...dataflow.render.mermaid import to_mermaid
from ...dataflow.render.svg import to_svg
from .hydra_app import hydra_app, refuse_resume
from .plan import output_file, write_output


def _text(graph: Graph) -> str:
    """The graph, and what of it could stream if something is sampled."""
    if not any(node.kind is NodeKind.ROLLOUT for node in graph.nodes):
        return str(graph)
    lines = [f"  {line}" for line in str(streaming(graph)).splitlines()]
    return "\n".join([str(graph), "", "with schedule.streaming above 0", *lines])


FORMATS: Mapping[str, Callable[[Graph], str]] = {
    "text": _text,
    "mermaid": to_mermaid,
    "svg": to_svg,
    "json": Graph.to_json,
}


def graph_command(arguments: list[str]) -> int:
    """Run the command; `arguments` are the words after `penstock graph`."""
    hydra_app("graph", arguments, _show)
    return 0


def _show(composed: dict[str, Any]) -> None:
    from ..inputs.compose import resolved

    form, output = composed.pop("format"), output_file("output", composed.pop("output"))
    refuse_resume(composed, "graph")
    if not isinstance(form, str) or form not in FORMATS:
        raise ConfigError(f"'format': expected one of {', '.join(FORMATS)}, got {form!r}")
    run = resolved(composed)
    graph, unlike = run.main.graph, run.config.schedule.why_not_reproducible
    text = FORMATS[form](graph)
    if unlike and form == "text":
        text += f"\n\nnot reproducible: {unlike}"
    if output is None:
        print(text)
        return
    write_output("output", output, text + "\n")
    print(f"wrote {output}")
