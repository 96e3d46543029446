"""`penstock graph`, `plan` and `profile`: commands that train nothing, on what Hydra composed.

`graph` shows the graph of an algorithm's step. `plan` says where each node of a step runs, in which
layout, and how long it takes; it builds no model, reads no data and needs none of the devices it
plans for, and what it writes with `output=` is a plan that a run can follow. `profile` measures
machines, for plans and runs.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from ...configs.schema import ProfileConfig
from ...configs.validate import validated
from ...dataflow.errors import ConfigError, InfeasibleError
from ...dataflow.graph.graph import Graph, streaming
from ...dataflow.kinds import NodeKind
from ...dataflow.render.mermaid import to_mermaid
from ...dataflow.render.svg import to_svg
from ...planner.plan.plan import Plan
from ...planner.plan.simulate import simulate_plan
from ...planner.report.comparison import PlanComparison, comparison_text
from ...planner.report.explain import explain
from ...planner.report.html_report import to_html
from ...planner.report.json_report import infeasible, to_json, to_trace
from ..inputs.run import resolved
from ..placement.plan_request import PlanRequest, plan_and_tables, plan_request
from ..run_dir.files import write_text
from .hydra_app import chosen, refuse_resume

OUTPUTS = ("json", "html", "trace", "output")  # keys that name files to write

_TERMINAL = "-"


def make_plan(composed: dict[str, Any]) -> None:
    files = {key: output_file(key, composed.pop(key, None)) for key in OUTPUTS}
    started_s = time.monotonic()
    try:
        request, found, comparisons = found_plan(composed)
    except InfeasibleError as error:
        if (file := files["json"]) is not None:
            reason = infeasible(str(error), time.monotonic() - started_s)
            write_output("json", file, json.dumps(reason, indent=2) + "\n")
        raise
    for note in request.notes:
        print(f"penstock: note: {note}", file=sys.stderr)
    for name, why in request.refused.items():
        print(f"penstock: note: {name} was not considered: {why}", file=sys.stderr)
    graph, kept = request.graph, request.kept(found)
    simulation = simulate_plan(graph, found)
    made = {
        "json": lambda: json.dumps(to_json(graph, found, simulation, comparisons), indent=2) + "\n",
        "html": lambda: to_html(graph, found, simulation, comparisons),
        "trace": lambda: to_trace(graph, found, simulation),
        "output": lambda: kept.model_dump_json(indent=2, exclude_defaults=True) + "\n",
    }
    quiet = files["json"] == _TERMINAL
    if not quiet:
        tables = (comparison_text(graph, comparison) for comparison in comparisons)
        print("\n\n".join([explain(graph, found, simulation), *tables]))
    for key, make in made.items():
        if (file := files[key]) is not None:
            write_output(key, file, make())
            if not quiet:
                print(f"wrote {file}")


def found_plan(composed: dict[str, Any]) -> tuple[PlanRequest, Plan, tuple[PlanComparison, ...]]:
    refuse_resume(composed, "plan")
    request = plan_request(composed, chosen("model"))
    return request, *plan_and_tables(request)


def output_file(key: str, given: Any) -> str | None:
    """The file's name, if one can be written there: a search should not end in a refusal."""
    if given is None or given == _TERMINAL and key == "json":
        return given
    other = isinstance(given, str) and Path(given).is_fifo() and not given.startswith("/dev/")
    if not isinstance(given, str) or not given or Path(given).is_dir() or other:
        raise ConfigError(f"'{key}': expected the name of a file, got {given!r}")
    if not Path(given).absolute().parent.is_dir():
        raise ConfigError(f"'{key}': '{given}' cannot be written: there is no such folder")
    return given


def write_output(key: str, file: str, text: str) -> None:
    if file == _TERMINAL:
        print(text, end="")
        return
    try:
        Path(file).write_text(text)
    except OSError as error:
        raise _unwritable(key, file, error) from error


def _unwritable(key: str, file: str | Path, error: OSError) -> ConfigError:
    return ConfigError(f"'{key}': '{file}' cannot be written: {error.strerror}")


def measure(composed: dict[str, Any]) -> None:
    from ..profile.profile import calibration_text, profile  # the others do without

    config = validated(ProfileConfig, composed)
    file = Path(config.output)
    if file.is_dir():
        raise ConfigError(f"'output': '{file}' is a folder; give the name of a file")
    began_s = time.monotonic()
    made = [folder for folder in file.parents if not folder.exists()]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable("output", file, error) from error
    try:
        calibration = profile(config)
        write_text(file, calibration.model_dump_json(indent=2) + "\n")
    except ConfigError:
        for folder in made:
            folder.rmdir()
        raise
    print(calibration_text(calibration))
    print(f"wrote {file} after {time.monotonic() - began_s:.0f} s")


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
