"""What is asked of the planner, from a composed configuration: everything typed and checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from ...configs.plan_schema import PlanConfig, PlanOptions
from ...configs.validate import validated
from ...dataflow.errors import ConfigError, FlowError, InfeasibleError, PlanError
from ...dataflow.graph.check import check_lag
from ...dataflow.graph.graph import Graph
from ...dataflow.graph.segments import check_segments
from ...dataflow.runtime.executor import TaskSpan
from ...dataflow.scheduler.schedule import Schedule
from ...planner.cost.calibration import Calibration
from ...planner.cost.constants import Constants, default_constants
from ...planner.cost.engine_model import RoleEngines
from ...planner.inputs.calls import calls_of
from ...planner.inputs.cluster import ClusterSpec
from ...planner.inputs.model_shape import ModelShape
from ...planner.inputs.workload import Workload
from ...planner.plan.plan import Plan
from ...planner.plan.planner import plan_step
from ...planner.plan.prediction import NodePrediction, OtherSchedule, Prediction
from ...planner.plan.simulate import Simulation, idle_of
from ...planner.report.comparison import Alternative
from ...planner.search.pins import Pins
from ..inputs.compose import resolved
from ..run_dir.run_folder import RunFolder
from ..run_dir.trace import read_trace
from .cluster_inputs import cluster_spec, named_devices
from .learned import read_calibration
from .pin_inputs import flat_layouts, pins_of, pins_of_file
from .plan_inputs import PlanInputs
from .settled import local_model, with_dtype


def measured_run(name: str, graph: Graph, workload: Workload) -> Alternative:
    """Return what a run took, read from the plan and the trace of its folder.

    Args:
        name: Name of its folder, as in `plan.compare`.
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
    """Return a span for each call of each step, in seconds from the first, ordered by end."""
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
    """Return when each step, and all before it, were done."""
    last: dict[int, float] = {}
    for span in spans:
        last[span.step] = max(last.get(span.step, 0.0), span.end_s)
    ends: list[float] = []
    for _, end_s in sorted(last.items()):
        ends.append(max(end_s, ends[-1]) if ends else end_s)
    return ends


SECTIONS = ("cluster", "workload", "plan")
"""Keys that a plan has and a run has not."""


@dataclass(frozen=True)
class PlanRequest:
    """What the planner is asked.

    Attributes:
        graph: The recorded step.
        models: Role -> shape, or None for a role without a model.
        cluster: Where it is to run.
        workload: How much one step computes.
        lags: How far generation may run ahead: what to compare.
        segments: How far a response may grow in a step, 0 for to its end: what to compare.
        refused: Key and value of a schedule -> why the step cannot have it, of those that were to
            be compared.
        notes: What to say of roles that are not planned for, of rates that are not known, and
            of what a run would do that is not predicted.
        constants: Of the model of time.
        engines: What runs the calls.
        others: Role -> what runs its calls instead.
        words: The same as keys of the configuration.
        pins: Parts that are fixed.
        deadline_s: When to stop.
        num_steps: Steps of the run, for what it costs.
        compared: File -> pins with which the step is to be planned as well, or a run.
        target_s: Plan for the fewest nodes on which a step takes no longer.
        sensitivity: Whether to plan for better hardware as well.
        tp_across_nodes: Allow tensor parallelism over the network.
        max_cp: Most ranks that share a sequence.
        streaming: Parts in which a step's rows go on.
    """

    graph: Graph
    models: Mapping[str, ModelShape | None]
    cluster: ClusterSpec
    workload: Workload
    lags: tuple[int, ...]
    segments: tuple[int, ...]
    refused: Mapping[str, str]
    notes: tuple[str, ...]
    constants: Constants
    engines: RoleEngines
    others: Mapping[str, RoleEngines]
    words: str
    pins: Pins
    deadline_s: float | None
    num_steps: int | None = None
    compared: Mapping[str, Pins | Alternative] = field(
        default_factory=dict[str, "Pins | Alternative"]
    )
    target_s: float | None = None
    sensitivity: bool = False
    tp_across_nodes: bool = False
    max_cp: int = 1
    streaming: int = 0

    def plan(self) -> Plan:
        """Search, in turn under each length of a segment.

        Raises:
            PlanError: If no plan fits.
        """
        found: list[Plan] = []
        unfit: dict[int, InfeasibleError] = {}
        for segment in self.segments:
            try:
                found.append(self._plan(segment))
            except InfeasibleError as error:
                unfit[segment] = error
        if not found:
            raise next(iter(unfit.values()))
        return _fastest(found, unfit).model_copy(update={"num_steps": self.num_steps})

    def kept(self, plan: Plan) -> Plan:
        """The plan with what tells a run whether it was made for it: graph and engines."""
        return plan.model_copy(update={"graph": self.graph.fingerprint, "engines": self.words})

    def _plan(self, segment_tokens: int) -> Plan:
        """The best plan with responses that grow by so much in a step."""
        deadline_s = self.deadline_s
        return plan_step(
            self.graph,
            self.models,
            self.cluster,
            self.workload.model_copy(update={"segment_tokens": segment_tokens or None}),
            max_lag=self.lags,
            constants=self.constants,
            engines=self.engines,
            others=self.others,
            pins=self.pins,
            deadline_s=None if deadline_s is None else deadline_s / len(self.segments),
            tp_across_nodes=self.tp_across_nodes,
            max_cp=self.max_cp,
            streaming=self.streaming,
        )


def _fastest(plans: Sequence[Plan], unfit: Iterable[int]) -> Plan:
    """Return the fastest of plans under several schedules, with what the others would take."""
    best = min(plans, key=_step_time_s)
    others = [_as_other(plan) for plan in plans if plan is not best]
    others += [one for plan in plans if plan.prediction for one in plan.prediction.other_schedules]
    others.sort(key=lambda one: one.step_time_s or math.inf)
    for segment in unfit:
        others.append(OtherSchedule(max_lag=0, segment_tokens=segment, step_time_s=None))
    assert best.prediction is not None, "it was searched for"
    prediction = best.prediction.model_copy(update={"other_schedules": tuple(others)})
    return best.model_copy(update={"prediction": prediction})


def _as_other(plan: Plan) -> OtherSchedule:
    assert plan.prediction is not None, "it was searched for"
    return OtherSchedule(
        max_lag=plan.max_lag or 0,
        segment_tokens=plan.prediction.segment_tokens,
        step_time_s=plan.prediction.step_time_s,
    )


def _step_time_s(plan: Plan) -> float:
    return plan.prediction.step_time_s if plan.prediction is not None else math.inf


def plan_request(composed: Mapping[str, Any], model_name: str = "") -> PlanRequest:
    """The request that a composition of `configs/plan.yaml` asks, less its outputs.

    Args:
        composed: As Hydra composed it.
        model_name: What tables call the run's model.

    Raises:
        ConfigError: For whatever is unknown, missing or out of range.
        FlowError: If the step is no valid graph, or its loss cannot correct for the lag.
        PlanError: If a model's shape or a pin is none that can be planned for.
    """
    run, own = _split(composed)
    found = resolved(run)
    asked = validated(PlanConfig, own)
    options = asked.plan
    file = options.calibration
    calibration = None if file is None else read_calibration(Path(file))
    cluster = cluster_spec(asked.cluster, calibration and calibration.cluster)
    model = with_dtype(local_model(found.model), lambda: cluster.computes_faster("bfloat16"))
    inputs = PlanInputs(replace(found, model=model), model.hub or model_name)
    models = inputs.models(options.models)
    _check_models(inputs.graph, models)
    _check_dtypes(models, options.models, cluster)
    workload = inputs.workload(asked.workload)
    lags, segments, refused = _schedules(inputs.graph, found.schedule, options, composed)
    found.engines.check_generates(inputs.graph)
    engines, others = found.engines.planned()
    calls = calls_of(inputs.graph, workload, models)
    return PlanRequest(
        graph=inputs.graph,
        models=models,
        cluster=cluster,
        workload=workload,
        lags=lags,
        segments=segments,
        refused=refused,
        notes=(
            *inputs.left_out(models),
            *_notes(cluster, calibration, models),
            *_not_predicted(found.schedule, segments),
        ),
        constants=default_constants(cluster)
        if calibration is None
        else calibration.constants_for(models.values()),
        engines=engines,
        others=others,
        words=found.engines.words,
        pins=pins_of(options.pins, calls, cluster),
        compared={
            name: measured_run(name, inputs.graph, workload)
            if Path(name).is_dir()
            else pins_of_file(name, calls, cluster)
            for name in options.compare
        },
        target_s=options.target_s,
        sensitivity=options.sensitivity,
        deadline_s=options.deadline_s,
        num_steps=found.main.config.num_steps,
        tp_across_nodes=options.tp_across_nodes,
        max_cp=options.max_cp,
        streaming=found.schedule.streaming,
    )


def _notes(
    cluster: ClusterSpec,
    calibration: Calibration | None,
    models: Mapping[str, ModelShape | None],
) -> list[str]:
    """Which rates of the devices are not known."""
    shapes = [model for model in models.values() if model is not None]
    notes = list(cluster.notes(model.dtype for model in shapes))
    return notes + list(calibration.notes_for(shapes) if calibration is not None else ())


def _not_predicted(schedule: Schedule, segments: Sequence[int]) -> list[str]:
    notes: list[str] = []
    if schedule.streaming and any(segments):
        notes.append("schedule.streaming is not predicted of responses that go on in later steps")
    if schedule.in_flight:
        notes.append("schedule.in_flight is not predicted; weights come between two steps")
    return notes


def _check_models(graph: Graph, models: Mapping[str, ModelShape | None]) -> None:
    if not any(models.values()):
        raise ConfigError(
            f"'{graph.name}' has no role with a language model, and the planner knows the memory "
            "and time of no other\n    place its nodes by hand: placement=PLAN.json, or "
            "executor.groups and executor.nodes; or say what a role computes: plan.models.ROLE"
        )


def _check_dtypes(
    models: Mapping[str, ModelShape | None], named: Mapping[str, str | None], cluster: ClusterSpec
) -> None:
    """Refuse a model in a dtype for which a device has no rate, before the search meets it."""
    devices = [group.device for group in cluster.node_groups]
    for role, model in models.items():
        for device in devices if model is not None else ():
            if model is None or model.dtype in device.flops_per_s or device.stands_in(model.dtype):
                continue
            known = ", ".join(device.flops_per_s)
            if named.get(role) is None:
                key, fix = "model", f"set model.dtype={next(iter(device.flops_per_s))}"
                fix += ", or choose model=tiny" if "float32" in device.flops_per_s else ""
            else:
                key, fix = f"plan.models.{role}", f"choose a model in {known}"
            raise ConfigError(
                f"'{key}': {model.name or 'the model'} of role '{role}' computes in {model.dtype}, "
                f"but device '{device.name}' of cluster '{cluster.name}' has flops_per_s for "
                f"{known} only\n    {fix}; or plan for another cluster"
            )


def _split(composed: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys of a run, and those of the plan alone with names and dots taken care of."""
    run = {key: value for key, value in composed.items() if key not in SECTIONS}
    own = {key: value for key, value in composed.items() if key in SECTIONS}
    if _is_auto(run):
        run["schedule"] = {**run["schedule"], "max_lag": 0}
    if "cluster" in own:
        own["cluster"] = named_devices(own["cluster"])
    plan: Any = own.get("plan")
    if isinstance(plan, Mapping):
        options = dict(cast("Mapping[str, Any]", plan))
        pins: Any = options.get("pins")
        if isinstance(pins, Mapping) and "layouts" in pins:
            options["pins"] = {**pins, "layouts": flat_layouts(pins["layouts"])}
        own["plan"] = options
    return run, own


def _is_auto(composed: Mapping[str, Any]) -> bool:
    schedule = composed.get("schedule")
    return isinstance(schedule, Mapping) and schedule.get("max_lag") == "auto"


def _schedules(
    graph: Graph, configured: Schedule, options: PlanOptions, composed: Mapping[str, Any]
) -> tuple[tuple[int, ...], tuple[int, ...], dict[str, str]]:
    """Return the lags and segments to plan for, configured or to compare, and why not others."""
    segment = configured.segment_tokens
    if not _is_auto(composed):
        _check_schedule(graph, configured.max_lag, segment)
        return (configured.max_lag,), (segment,), {}
    refused: dict[str, str] = {}
    lags: list[int] = []
    segments: list[int] = []
    for lag in dict.fromkeys(options.lags):
        if _allowed(graph, lag, 0, f"max_lag={lag}", refused):
            lags.append(lag)
    for length in dict.fromkeys(options.segments):
        if _allowed(graph, 0, length, f"segment_tokens={length}", refused):
            segments.append(length)
    return tuple(lags) or (0,), tuple(segments) or (0,), refused


def _allowed(graph: Graph, lag: int, segment: int, name: str, refused: dict[str, str]) -> bool:
    """Whether the step can have a schedule; why not is noted."""
    try:
        _check_schedule(graph, lag, segment)
    except FlowError as error:
        refused[name] = error.what
        return False
    return True


def _check_schedule(graph: Graph, max_lag: int, segment_tokens: int) -> None:
    check_lag(graph, max_lag, segment_tokens)
    if segment_tokens:
        check_segments(graph)
