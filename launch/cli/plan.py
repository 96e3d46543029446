"""`penstock graph`, `plan` and `profile`: commands that train nothing.

`graph` shows the graph of an algorithm's step. `plan` says where each node of a step runs, in which
layout, and how long it takes; it builds no model, reads no data and needs none of the devices it
plans for, and what it writes with `output=` is a plan that a run can follow. `profile` measures
machines, for plans and runs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...dataflow.errors import ConfigError, InfeasibleError
from .hydra_app import chosen, hydra_app, refuse_resume

if TYPE_CHECKING:
    from ...dataflow.graph.graph import Graph
    from ...planner.plan.plan import Plan
    from ...planner.report.comparison import PlanComparison
    from ..placement.plan_request import PlanRequest

OUTPUTS = ("json", "html", "trace", "output")  # keys that name files to write

_TERMINAL = "-"


def plan_command(arguments: list[str]) -> int:
    """Run the command; `arguments` are the words after `penstock plan`."""
    words = [f"json={_TERMINAL}" if word == "--json" else word for word in arguments]
    hydra_app("plan", words, _plan)
    return 0


def _plan(composed: dict[str, Any]) -> None:
    files = {key: output_file(key, composed.pop(key, None)) for key in OUTPUTS}
    started_s = time.monotonic()
    try:
        request, plan, comparisons = found_plan(composed)
    except InfeasibleError as error:
        _say_infeasible(files["json"], str(error), time.monotonic() - started_s)
        raise
    for note in request.notes:
        print(f"penstock: note: {note}", file=sys.stderr)
    for name, why in request.refused.items():
        print(f"penstock: note: {name} was not considered: {why}", file=sys.stderr)
    _show(request, plan, comparisons, files)


def found_plan(composed: dict[str, Any]) -> tuple[PlanRequest, Plan, tuple[PlanComparison, ...]]:
    # Imported here: torch and all that follows it take seconds, and `--help` needs none of it.
    from ..placement.plan_request import plan_and_tables, plan_request

    refuse_resume(composed, "plan")
    request = plan_request(composed, chosen("model"))
    return request, *plan_and_tables(request)


def _show(
    request: PlanRequest,
    plan: Plan,
    comparisons: Sequence[PlanComparison],
    files: Mapping[str, str | None],
) -> None:
    from ...planner.plan.simulate import simulate_plan
    from ...planner.report.comparison import comparison_text
    from ...planner.report.explain import explain
    from ...planner.report.html_report import to_html
    from ...planner.report.json_report import to_json, to_trace

    graph, kept = request.graph, request.kept(plan)
    simulation = simulate_plan(graph, plan)
    made = {
        "json": lambda: json.dumps(to_json(graph, plan, simulation, comparisons), indent=2) + "\n",
        "html": lambda: to_html(graph, plan, simulation, comparisons),
        "trace": lambda: to_trace(graph, plan, simulation),
        "output": lambda: kept.model_dump_json(indent=2, exclude_defaults=True) + "\n",
    }
    quiet = files["json"] == _TERMINAL
    if not quiet:
        tables = (comparison_text(graph, comparison) for comparison in comparisons)
        print("\n\n".join([explain(graph, plan, simulation), *tables]))
    for key, make in made.items():
        file = files[key]
        if file is not None:
            write_output(key, file, make())
            if not quiet:
                print(f"wrote {file}")


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
    """Write a file that a key names, or to the terminal."""
    if file == _TERMINAL:
        print(text, end="")
        return
    try:
        Path(file).write_text(text)
    except OSError as error:
        raise ConfigError(f"'{key}': '{file}' cannot be written: {error.strerror}") from error


def _say_infeasible(file: str | None, reason: str, search_time_s: float) -> None:
    from ...planner.report.json_report import infeasible

    if file is not None:
        write_output("json", file, json.dumps(infeasible(reason, search_time_s), indent=2) + "\n")


def profile_command(arguments: list[str]) -> int:
    """Run the command; `arguments` are the words after `penstock profile`."""
    hydra_app("profile", arguments, _profile)
    return 0


@contextmanager
def _folder_of(file: Path) -> Generator[None]:
    made = [folder for folder in file.parents if not folder.exists()]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"'output': '{file}' cannot be written: {error.strerror}") from error
    try:
        yield
    except ConfigError:
        for folder in made:
            folder.rmdir()
        raise


def _profile(composed: dict[str, Any]) -> None:
    # Imported here: torch and all that follows it take seconds, and `--help` needs none of it.
    from ...configs.plan_schema import ProfileConfig
    from ...configs.validate import validated
    from ..profile.profile import profile
    from ..profile.show import calibration_text
    from ..run_dir.files import write_text

    config = validated(ProfileConfig, composed)
    file = Path(config.output)
    if file.is_dir():
        raise ConfigError(f"'output': '{file}' is a folder; give the name of a file")
    began_s = time.monotonic()
    with _folder_of(file):
        calibration = profile(config)
        write_text(file, calibration.model_dump_json(indent=2) + "\n")
    print(calibration_text(calibration))
    print(f"wrote {file} after {time.monotonic() - began_s:.0f} s")


def graph_command(arguments: list[str]) -> int:
    """Run the command; `arguments` are the words after `penstock graph`."""
    hydra_app("graph", arguments, _graph)
    return 0


def _graph(composed: dict[str, Any]) -> None:
    # Imported here: torch and all that follows it take seconds, and `--help` needs none of it.
    from ...dataflow.graph.graph import Graph
    from ...dataflow.render.mermaid import to_mermaid
    from ...dataflow.render.svg import to_svg
    from ..inputs.compose import resolved

    formats = {"text": _graph_text, "mermaid": to_mermaid, "svg": to_svg, "json": Graph.to_json}
    form, output = composed.pop("format"), output_file("output", composed.pop("output"))
    refuse_resume(composed, "graph")
    if not isinstance(form, str) or form not in formats:
        raise ConfigError(f"'format': expected one of {', '.join(formats)}, got {form!r}")
    run = resolved(composed)
    graph, unlike = run.main.graph, run.config.schedule.why_not_reproducible
    text = formats[form](graph)
    if unlike and form == "text":
        text += f"\n\nnot reproducible: {unlike}"
    if output is None:
        print(text)
        return
    write_output("output", output, text + "\n")
    print(f"wrote {output}")


def _graph_text(graph: Graph) -> str:
    """Describe the graph, and what of it could stream if something is sampled."""
    from ...dataflow.graph.streaming import streaming
    from ...dataflow.kinds import NodeKind

    if not any(node.kind is NodeKind.ROLLOUT for node in graph.nodes):
        return str(graph)
    lines = [f"  {line}" for line in str(streaming(graph)).splitlines()]
    return "\n".join([str(graph), "", "with schedule.streaming above 0", *lines])
