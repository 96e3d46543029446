"""`penstock plan` and `profile`: commands that train nothing, on what Hydra composed.

`plan` says where each node of a step runs, in which layout, and how long it takes; it builds no
model, reads no data and needs none of the devices it plans for, and what it writes with `output=`
is a plan that a run can follow. `profile` measures machines, for plans and runs.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from ...configs.schema import ProfileConfig, TaskProfileConfig
from ...configs.validate import validated
from ...dataflow.errors import ConfigError, InfeasibleError
from ...planner.inputs.task_profile import TaskProfile
from ...planner.plan.plan import Plan
from ...planner.plan.simulate import simulate_plan
from ...planner.report.comparison import PlanComparison, comparison_text
from ...planner.report.explain import explain
from ...planner.report.html_report import to_html
from ...planner.report.json_report import infeasible, to_json, to_trace
from ..inputs.run import executor_kind, resolved
from ..placement.plan_request import PlanRequest, plan_and_tables, plan_request
from ..run_dir.files import TERMINAL, output_file, unwritable, write_output, write_text
from .hydra_app import chosen, refuse_resume

OUTPUTS = ("json", "html", "trace", "output")  # keys that name files to write


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
    quiet = files["json"] == TERMINAL
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


def measure(composed: dict[str, Any]) -> None:
    """Measure machines, or the task of a run where the words name an algorithm and a task."""
    own = {key: composed.pop(key) for key in ("output", "seconds") if key in composed}
    of_task = "algorithm" in composed
    section = TaskProfileConfig if of_task else ProfileConfig
    config = validated(section, own if of_task else {**composed, **own})
    file = Path(config.output)
    if file.is_dir():
        raise ConfigError(f"'output': '{file}' is a folder; give the name of a file")
    began_s = time.monotonic()
    made = [folder for folder in file.parents if not folder.exists()]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable("output", file, error) from error
    try:
        if isinstance(config, TaskProfileConfig):
            found, text = _task(composed, config.seconds)
        else:
            from ..profile.profile import calibration_text, profile  # the others do without

            found = profile(config)
            text = calibration_text(found)
        write_text(file, found.model_dump_json(indent=2) + "\n")
    except ConfigError:
        for folder in made:
            folder.rmdir()
        raise
    print(text)
    print(f"wrote {file} after {time.monotonic() - began_s:.0f} s")


def _task(composed: dict[str, Any], seconds: float) -> tuple[TaskProfile, str]:
    from ..profile.task import profile_task, task_profile_text

    refuse_resume(composed, "profile")
    run = resolved(composed)
    try:
        found = profile_task(run, seconds)
    finally:
        executor_kind(run.executor.kind).end()
    return found, task_profile_text(found)
