"""`penstock graph`: the graph of an algorithm's step as a text, a picture or data.

Not beside `plan`, which imports the planner: this command is what users type most often.
"""

from __future__ import annotations

from typing import Any

from ...dataflow.errors import ConfigError
from ...dataflow.graph.graph import Graph, streaming
from ...dataflow.kinds import NodeKind
from ...dataflow.render.mermaid import to_mermaid
from ...dataflow.render.svg import to_svg
from ..inputs.run import resolved
from ..run_dir.files import output_file, write_output
from .hydra_app import refuse_resume


def show_graph(composed: dict[str, Any]) -> None:
    formats = {"text": str, "mermaid": to_mermaid, "svg": to_svg, "json": Graph.to_json}
    form, output = composed.pop("format"), output_file("output", composed.pop("output"))
    refuse_resume(composed, "graph")
    if not isinstance(form, str) or form not in formats:
        raise ConfigError(f"'format': expected one of {', '.join(formats)}, got {form!r}")
    run = resolved(composed)
    graph, unlike = run.main.graph, run.config.schedule.why_not_reproducible
    text = formats[form](graph)
    if form == "text" and any(node.kind is NodeKind.ROLLOUT for node in graph.nodes):
        lines = [f"  {line}" for line in str(streaming(graph)).splitlines()]
        text = "\n".join([text, "", "with schedule.streaming above 0", *lines])
    if form == "text" and unlike:
        text += f"\n\nnot reproducible: {unlike}"
    if output is None:
        print(text)
        return
    write_output("output", output, text + "\n")
    print(f"wrote {output}")
