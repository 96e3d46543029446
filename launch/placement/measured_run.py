"""A run beside plans: the plan that it followed, with one of its steps in place of a prediction.

The step of median length is shown, so that neither the first one, which loads, nor one that wrote
a checkpoint stands for all. The ranks of a group count as one: a call lasts from the first rank
that begins it to the last that ends it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...dataflow.errors import ConfigError, PlanError
from ...dataflow.graph.graph import Graph
from ...dataflow.runtime.executor import TaskSpan
from ...planner.inputs.workload import Workload
from ...planner.plan.plan import Plan
from ...planner.plan.prediction import NodePrediction, Prediction
from ...planner.plan.simulate import Simulation, idle_of
from ...planner.report.comparison import Alternative
from ..run_dir.run_folder import RunFolder
from ..run_dir.trace import read_trace


def measured_run(name: str, graph: Graph, workload: Workload) -> Alternative:
    """What a run took, as its folder's plan and trace have it.

    Args:
        name: Of its folder, as `plan.compare` has it.
        graph: The step that is planned.
        workload: Its rows and tokens.

    Raises:
        ConfigError: If it is no run with a plan, ran another step or one of another size, or has
            not made two of them.
    """
    at = f"'plan.compare': '{name}'"
    folder = RunFolder(Path(name))
    if not folder.plan.is_file():
        raise ConfigError(
            f"{at} is no folder of a run that followed a plan\n    give runs/ID of a run with "
            "placement=..., or a YAML file with the keys of plan.pins"
        )
    try:
        plan = Plan.read(folder.plan)
        plan.placement(graph)
    except PlanError as error:
        raise ConfigError(f"{at}:\n{error}") from None
    own = plan.prediction and plan.prediction.workload
    if own is not None and _sizes_text(own) != _sizes_text(workload):
        raise ConfigError(
            f"{at} is a run with other rows or tokens: planned for {_sizes_text(own)}, and this "
            f"step has {_sizes_text(workload)}\n    give this step the run's: workload.prompt=..., "
            "workload.response=..., algorithm.per_step..."
        )
    spans = _spans(read_trace(folder.trace), graph)
    ends = _ends(spans)
    if len(ends) < 2:
        raise ConfigError(f"{at} has made no two steps yet\n    wait for it, or take another run")
    lengths = sorted((end_s - start_s, start_s, end_s) for start_s, end_s in pairwise(ends))
    length_s, start_s, end_s = lengths[len(lengths) // 2]
    simulation = Simulation(
        step_time_s=length_s,
        cycle_steps=1,
        start_s=start_s,
        end_s=end_s,
        completed_s=tuple(ends),
        spans=spans,
        idle_share={g.name: idle_of(spans, g.name, start_s, end_s) for g in plan.groups},
        critical_path=(),
    )
    taken = {s.node: s.end_s - s.start_s for s in spans if start_s < s.end_s <= end_s}
    found = Prediction(
        step_time_s=length_s,
        lower_bound_s=0.0,
        calibration="measured",
        nodes={node: NodePrediction(duration_s=seconds) for node, seconds in taken.items()},
    )  # without a workload: how long the responses were is not known here
    return Alternative(name, plan.model_copy(update={"prediction": found}), simulation=simulation)


def _sizes_text(work: Workload) -> str:
    return f"{work.num_rows:,} rows of {work.prompt.mean:g} + {work.response.mean:g} tokens"


def _spans(events: Sequence[Mapping[str, Any]], graph: Graph) -> tuple[TaskSpan, ...]:
    """A span for each call of each step, in seconds from the first, in the order of their ends."""
    groups = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    calls = {node.name for node in graph.nodes if node.role}
    tasks = [e for e in events if e.get("cat") == "task" and e["name"] in calls]
    first_us = min((event["ts"] for event in tasks), default=0)
    begun: dict[tuple[int, str, str], tuple[float, float]] = {}
    for event in tasks:
        key = (event["step"], event["name"], groups[event["pid"]])
        start_s = (event["ts"] - first_us) / 1e6
        end_s = start_s + event["dur"] / 1e6
        first_s, last_s = begun.get(key, (start_s, end_s))
        begun[key] = (min(first_s, start_s), max(last_s, end_s))
    spans = [
        TaskSpan(node, step, None, group, 0, *ends) for (step, node, group), ends in begun.items()
    ]
    return tuple(sorted(spans, key=lambda span: span.end_s))


def _ends(spans: Sequence[TaskSpan]) -> list[float]:
    """When each step, and all before it, were done."""
    last: dict[int, float] = {}
    for span in spans:
        last[span.step] = max(last.get(span.step, 0.0), span.end_s)
    ends: list[float] = []
    for _, end_s in sorted(last.items()):
        ends.append(max(end_s, ends[-1]) if ends else end_s)
    return ends
