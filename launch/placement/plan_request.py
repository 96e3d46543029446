"""The planner's request from a composed configuration, with pins and what-if questions."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, cast

import yaml
from typing_extensions import override

from ...configs.references import load_yaml
from ...configs.schema import PinsConfig, PlanConfig, PlanOptions
from ...configs.validate import validated
from ...dataflow.errors import ConfigError, FlowError, InfeasibleError, PlanError, nearest
from ...dataflow.graph.check import check_lag
from ...dataflow.graph.graph import Graph, check_segments
from ...dataflow.runtime.messages import TaskSpan
from ...dataflow.scheduler.schedule import Schedule
from ...planner.cost.calibration import Constants
from ...planner.cost.engine_model import RoleEngines
from ...planner.formatting import change_text, ranges_text, seconds_text
from ...planner.inputs.calls import Call, Workload, calls_of
from ...planner.inputs.cluster import ClusterSpec, improved, smaller, with_more_cores
from ...planner.inputs.layout import Layout, check_layout, pinned_layout
from ...planner.inputs.model_shape import ModelShape
from ...planner.inputs.task_profile import ActingPins, TaskProfile
from ...planner.plan.plan import NodePrediction, OtherSchedule, Plan, Prediction
from ...planner.plan.planner import plan_step
from ...planner.plan.simulate import Simulation, idle_of
from ...planner.report.comparison import Alternative, PlanComparison
from ...planner.search.pins import Pins
from ..inputs.run import Run, resolved
from ..run_dir.run_folder import RunFolder
from ..run_dir.step_logs import read_trace
from .acting import acting_nodes, acting_plan, measure_command, task_profile, verifier_costs
from .machine import PlannedMachine, cluster_spec, named_devices, read_calibration
from .models import PlanInputs, local_model


def measured_run(name: str, graph: Graph, workload: Workload | None) -> Alternative:
    """Return what a run took, read from the plan and the trace of its folder."""
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
    if own is not None and workload is not None and _sizes_text(own) != _sizes_text(workload):
        raise ConfigError(
            f"{at} is a run with other rows or tokens: planned for {_sizes_text(own)}, and this "
            f"step has {_sizes_text(workload)}\n    give this step the run's: workload.prompt=..., "
            "workload.response=..., algorithm.per_step..."
        )
    spans = _spans(read_trace(folder.trace), graph)
    last: dict[int, float] = {}
    for span in spans:
        last[span.step] = max(last.get(span.step, 0.0), span.end_s)
    # When each step, and all before it, were done.
    ends = list(accumulate((end_s for _, end_s in sorted(last.items())), max))
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


SECTIONS = ("cluster", "workload", "plan")  # keys that a plan has and a run has not


@dataclass(frozen=True, kw_only=True)
class PlanRequest(ABC):
    graph: Graph  # the recorded step
    models: Mapping[str, ModelShape | None]  # role -> shape, or None for a role without a model
    cluster: ClusterSpec  # where it is to run
    lags: tuple[int, ...]  # how far generation may run ahead: what to compare
    # key and value of a schedule -> why the step cannot have it, of those that were to be compared
    refused: Mapping[str, str]
    # what to say of roles that are not planned for, of rates that are not known, and of what a run
    # would do that is not predicted
    notes: tuple[str, ...]
    words: str = ""  # the engines as keys of the configuration
    pins: Pins = Pins()  # parts that are fixed
    # file -> pins with which the step is to be planned as well, or a run
    compared: Mapping[str, Pins | Alternative]
    options: PlanOptions  # the section `plan`
    num_steps: int  # of the run, for what it costs

    @abstractmethod
    def plan(self) -> Plan: ...

    @abstractmethod
    def better_clusters(self) -> Mapping[str, ClusterSpec]:
        """Name -> the cluster with something better, for `plan.sensitivity`."""

    def kept(self, plan: Plan) -> Plan:
        """The plan with what tells a run whether it was made for it: graph and engines."""
        return plan.model_copy(update={"graph": self.graph.fingerprint, "engines": self.words})


@dataclass(frozen=True, kw_only=True)
class ActingRequest(PlanRequest):
    run: Run
    profile: TaskProfile  # of its task; there is no language model

    @override
    def plan(self) -> Plan:
        pins = self.options.pins.acting
        made = acting_plan(self.run, self.profile, self.cluster, max_lag=self.lags, pins=pins)
        return made.model_copy(update={"num_steps": self.num_steps})

    @override
    def better_clusters(self) -> Mapping[str, ClusterSpec]:
        return with_more_cores(self.cluster)


@dataclass(frozen=True, kw_only=True)
class LanguageRequest(PlanRequest):
    workload: Workload  # how much one step computes
    # how far a response may grow in a step, 0 for to its end: what to compare
    segments: tuple[int, ...]
    constants: Constants  # of the model of time
    engines: RoleEngines  # what runs the calls
    others: Mapping[str, RoleEngines]  # role -> what runs its calls instead
    streaming: int  # parts in which a step's rows go on
    task: TaskProfile | None  # with one, what its verifiers cost

    @override
    def plan(self) -> Plan:
        """Search, in turn under each length of a segment: how far a response grows in a step."""
        found: list[Plan] = []
        unfit: dict[int, InfeasibleError] = {}
        longest_s = self.options.deadline_s
        for segment in self.segments:
            try:
                made = plan_step(
                    self.graph,
                    self.models,
                    self.cluster,
                    self.workload.model_copy(update={"segment_tokens": segment or None}),
                    max_lag=self.lags,
                    constants=self.constants,
                    engines=self.engines,
                    others=self.others,
                    pins=self.pins,
                    deadline_s=longest_s and longest_s / len(self.segments),
                    tp_across_nodes=self.options.tp_across_nodes,
                    max_cp=self.options.max_cp,
                    streaming=self.streaming,
                    task=self.task,
                )
            except InfeasibleError as error:
                unfit[segment] = error
            else:
                found.append(made)
        if not found:
            raise next(iter(unfit.values()))
        return _fastest(found, unfit).model_copy(update={"num_steps": self.num_steps})

    @override
    def better_clusters(self) -> Mapping[str, ClusterSpec]:
        better = improved(self.cluster)
        return better if self.task is None else {**better, **with_more_cores(self.cluster)}


def _fastest(plans: Sequence[Plan], unfit: Iterable[int]) -> Plan:
    """Return the fastest of plans under several schedules, with what the others would take."""
    searched = [(plan, plan.prediction) for plan in plans if plan.prediction is not None]
    best, prediction = min(searched, key=lambda one: one[1].step_time_s)
    others = [
        OtherSchedule(
            max_lag=plan.max_lag or 0,
            segment_tokens=one.segment_tokens,
            step_time_s=one.step_time_s,
        )
        for plan, one in searched
        if plan is not best
    ]
    others += [other for _, one in searched for other in one.other_schedules]
    others.sort(key=lambda one: one.step_time_s or math.inf)
    for segment in unfit:
        others.append(OtherSchedule(max_lag=0, segment_tokens=segment, step_time_s=None))
    known = prediction.model_copy(update={"other_schedules": tuple(others)})
    return best.model_copy(update={"prediction": known})


def plan_request(composed: Mapping[str, Any], model_name: str = "") -> PlanRequest:
    """The request that a composition of `configs/plan.yaml` asks, less its outputs."""
    run, own = _split(composed)
    found = resolved(run)
    asked = validated(PlanConfig, own)
    options = asked.plan
    file = options.calibration
    calibration = None if file is None else read_calibration(Path(file))
    cluster = cluster_spec(asked.cluster, calibration and calibration.cluster)
    model = local_model(found.model, lambda: cluster.computes_faster("bfloat16"))
    inputs = PlanInputs(found.having(model=model), model.hub or model_name)
    graph, models = inputs.graph, inputs.models(options.models)
    if not any(models.values()):
        return _acting_request(found, options, cluster, composed)
    if options.pins.acting != ActingPins():
        raise ConfigError(
            "'plan.pins.acting' is set, and is for steps without a language model\n    leave it out"
        )
    _check_dtypes(models, options.models, cluster)
    workload, schedule = inputs.workload(asked.workload), found.config.schedule
    lags, segments, refused = _schedules(graph, schedule, options, composed)
    found.engines.check_generates(graph)
    engines, others = found.engines.planned(found.executor.transport)
    calls, allows = calls_of(graph, workload, models), inputs.allows(workload)
    shapes = [model for model in models.values() if model is not None]
    task, free = verifier_costs(found)
    verifying = {node.role for node in graph.nodes if task and node.name in task.verifiers}
    for role in options.pins.num_processes.keys() - verifying:
        raise ConfigError(
            f"'plan.pins.num_processes' names role '{role}', of which it is not known what it "
            f"verifies\n    measure the task, or leave the pin out: {measure_command(found)}"
        )
    notes = [*inputs.left_out(models), *free, *cluster.notes(shape.dtype for shape in shapes)]
    notes += [] if calibration is None else calibration.notes_for(shapes)
    if schedule.streaming and any(segments):
        notes.append("schedule.streaming is not predicted of responses that go on in later steps")
    if schedule.in_flight:
        notes.append("schedule.in_flight is not predicted; weights come between two steps")
    return LanguageRequest(
        graph=graph,
        models=models,
        cluster=cluster,
        workload=workload,
        lags=lags,
        segments=segments,
        refused=refused,
        notes=tuple(notes),
        constants=PlannedMachine(cluster, calibration).constants(models),
        engines=engines,
        others=others,
        words=found.engines.words,
        pins=replace(pins_of(options.pins, calls, cluster), allows=allows),
        compared={
            name: measured_run(name, graph, workload)
            if Path(name).is_dir()
            else replace(pins_of_file(name, calls, cluster), allows=allows)
            for name in options.compare
        },
        options=options,
        num_steps=found.main.config.num_steps,
        streaming=schedule.streaming,
        task=task,
    )


def _acting_request(
    run: Run, options: PlanOptions, cluster: ClusterSpec, composed: Mapping[str, Any]
) -> ActingRequest:
    graph = run.main.graph
    if not acting_nodes(graph):
        raise ConfigError(
            f"'{graph.name}' has no role with a language model and acts in no environment, and the "
            "planner knows the memory and time of nothing else\n    place its nodes by hand: "
            "placement=PLAN.json, or executor.groups and executor.nodes; or say what a role "
            "computes: plan.models.ROLE"
        )
    if options.pins != PinsConfig(acting=options.pins.acting):
        raise ConfigError(
            f"'plan.pins' fixes more than 'acting', and '{graph.name}' has no language model\n"
            f"    pin plan.pins.acting: {', '.join(ActingPins.model_fields)}"
        )
    profile = task_profile(run)
    if isinstance(profile, str):
        raise ConfigError(f"'task_profile': {profile}")
    lags, _, refused = _schedules(graph, run.config.schedule, options, composed)
    notes = [
        f"times of one core are those of {profile.machine}: a faster core is not known of"
    ] if cluster.num_cores != profile.cores else []  # fmt: skip
    return ActingRequest(
        graph=graph,
        models=dict.fromkeys(graph.roles),
        cluster=cluster,
        lags=lags,
        refused=refused,
        notes=tuple(notes),
        compared={name: measured_run(name, graph, None) for name in options.compare},
        options=options,
        num_steps=run.main.config.num_steps,
        run=run,
        profile=profile,
    )


def _check_dtypes(
    models: Mapping[str, ModelShape | None], named: Mapping[str, str | None], cluster: ClusterSpec
) -> None:
    devices = [group.device for group in cluster.node_groups]
    for role, model in models.items():
        for device in devices:
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
    segment = configured.segment_tokens
    if not _is_auto(composed):
        _check_schedule(graph, configured.max_lag, segment)
        return (configured.max_lag,), (segment,), {}
    refused: dict[str, str] = {}

    def allowed(key: str, value: int) -> bool:
        try:
            _check_schedule(graph, **{"max_lag": 0, "segment_tokens": 0, key: value})
        except FlowError as error:
            refused[f"{key}={value}"] = error.what
            return False
        return True

    lags = tuple(lag for lag in dict.fromkeys(options.lags) if allowed("max_lag", lag))
    lengths = dict.fromkeys(options.segments)
    segments = tuple(length for length in lengths if allowed("segment_tokens", length))
    return lags or (0,), segments or (0,), refused


def _check_schedule(graph: Graph, max_lag: int, segment_tokens: int) -> None:
    check_lag(graph, max_lag, segment_tokens)
    if segment_tokens:
        check_segments(graph)


_SIZES = ("tp", "pp", "dp", "cp")
_RANGE = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?")


def flat_layouts(section: Any) -> Any:
    """The composed section `plan.pins.layouts` with node names as keys.

    A name has a dot, which the command line takes for a step down:
    `plan.pins.layouts.actor.train.tp=8` arrives as `{actor: {train: {tp: 8}}}`.
    """
    if not isinstance(section, Mapping):
        return section
    flat: dict[str, Any] = {}
    for name, value in cast("Mapping[str, Any]", section).items():
        below: Any = value
        if (
            isinstance(below, Mapping)
            and below
            and all(isinstance(v, Mapping) for v in below.values())
        ):
            flat |= {f"{name}.{method}": fields for method, fields in below.items()}
        else:
            flat[name] = value
    return flat


def pins_of(config: PinsConfig, calls: Sequence[Call], cluster: ClusterSpec) -> Pins:
    at = "plan.pins"
    call_groups = list(dict.fromkeys(call.call_group for call in calls))
    for key in ("together", "apart", "num_devices", "devices"):
        for entry in getattr(config, key):
            for call_group in [entry] if isinstance(entry, str) else entry:
                _known(call_group, call_groups, f"{at}.{key}", "call group")
    devices = {
        call_group: _ids(ids, f"{at}.devices.{call_group}", cluster)
        for call_group, ids in config.devices.items()
    }
    sizes = {**config.num_devices, **{call_group: len(ids) for call_group, ids in devices.items()}}
    layouts = {
        name: _layout(name, fields, calls, sizes, cluster, f"{at}.layouts.{name}")
        for name, fields in config.layouts.items()
    }
    pins = Pins(
        together=tuple(map(tuple, config.together)),
        apart=tuple(map(tuple, config.apart)),
        num_devices=config.num_devices,
        devices=devices,
        layouts=layouts,
        num_processes=config.num_processes,
    )
    _check_used(pins, call_groups, sizes, cluster, at)
    return pins


def pins_of_file(file: str, calls: Sequence[Call], cluster: ClusterSpec) -> Pins:
    """The pins of a YAML file, which has the keys of `plan.pins`."""
    at = f"'plan.compare': '{file}'"
    path = Path(file)
    try:
        # As JSON, because a YAML file can say more than keys can: dates, or a value inside itself.
        text = json.dumps(load_yaml(path), default=str)
    except OSError as error:
        raise ConfigError(f"{at} cannot be read: {error.strerror}") from None
    except (TypeError, ValueError, RecursionError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"{at} is no YAML file: {said:.300}") from None
    keys: Any = json.loads(text)
    if not isinstance(keys, dict) or not keys:
        raise ConfigError(
            f"{at}: expected keys of plan.pins, got {text:.60}\n"
            f"    its keys are: {', '.join(PinsConfig.model_fields)}"
        )
    keys = cast("dict[str, Any]", keys)
    if "layouts" in keys:
        keys["layouts"] = flat_layouts(keys["layouts"])
    try:
        return pins_of(validated(PinsConfig, keys, "plan.pins"), calls, cluster)
    except (ConfigError, PlanError) as error:
        raise ConfigError(f"{at}:\n{error}") from None


def _known(name: str, known: Sequence[str], at: str, what: str) -> None:
    if name not in known:
        raise ConfigError(
            f"'{at}' names a {what} '{name}', which the step does not have"
            f"{nearest(name, known)}\n    its {what}s are: {', '.join(known)}"
        )


def _ids(given: Sequence[int] | str, at: str, cluster: ClusterSpec) -> tuple[int, ...]:
    if not isinstance(given, str):
        ids = list(given)
    else:
        ids = []
        for piece in given.split(","):
            found = _RANGE.fullmatch(piece)
            if found is None:
                raise ConfigError(f"'{at}': expected ids such as \"0-7, 12\", got {given!r}")
            first, last = int(found[1]), int(found[2] or found[1])
            # No more of them than show that there is one too many.
            ids += range(first, min(last, max(first, cluster.num_devices)) + 1)
    for device in ids:
        if not 0 <= device < cluster.num_devices:
            raise ConfigError(
                f"'{at}': there is no device {device}\n    cluster '{cluster.name}' has devices 0 "
                f"to {cluster.num_devices - 1}"
            )
    return tuple(ids)


def _layout(
    name: str,
    fields: Mapping[str, Any],
    calls: Sequence[Call],
    sizes: Mapping[str, int],
    cluster: ClusterSpec,
    at: str,
) -> Mapping[str, Any]:
    _known(name, [call.name for call in calls], "plan.pins.layouts", "node")
    call = next(call for call in calls if call.name == name)
    validated(Layout, fields, at)
    layout = pinned_layout(fields)
    node_size = max(group.devices_per_node for group in cluster.node_groups)
    check_layout(layout, call.model, node_size=node_size, where=f"'{at}'")
    devices = sizes.get(call.call_group, cluster.num_devices)
    whole = all(size in fields for size in ("tp", "pp", "dp"))
    used = layout.num_devices
    if used > devices or devices % used or (whole and call.call_group in sizes and used != devices):
        product = " x ".join(f"{size} {getattr(layout, size)}" for size in _SIZES if size in fields)
        there = f"'{call.call_group}' is pinned to {devices}" if call.call_group in sizes else (
            f"cluster '{cluster.name}' has {devices}"
        )  # fmt: skip
        raise PlanError(
            f"'{at}': {product} uses {used} devices, but {there}\n    a layout uses every device "
            "of its group: choose sizes whose product is their number"
        )
    return dict(fields)


def _check_used(
    pins: Pins, call_groups: Sequence[str], sizes: Mapping[str, int], cluster: ClusterSpec, at: str
) -> None:
    # Call groups that are pinned to share a group, joined; the others alone.
    groups = [{call_group} for call_group in call_groups]
    for entry in pins.all_together():
        joined = [group for group in groups if group & set(entry)]
        groups = [group for group in groups if not group & set(entry)]
        groups.append(set[str]().union(*joined))
    counts = [max(sizes.get(call_group, 0) for call_group in group) for group in groups]
    free = cluster.num_devices - sum(counts)
    if free <= 0 or not all(counts):
        return
    named = {device for ids in pins.devices.values() for device in ids}
    left = ranges_text([d for d in range(cluster.num_devices) if d not in named])
    which = f" ({left})" if len(named) == sum(counts) else ""
    raise PlanError(
        f"'{at}' gives every call group its devices, {sum(counts)} in all, but cluster "
        f"'{cluster.name}' has {cluster.num_devices}: {free}{which} would be unused\n"
        "    pin more devices, leave a call group free, or plan for a smaller cluster"
    )


def plan_and_tables(request: PlanRequest) -> tuple[Plan, tuple[PlanComparison, ...]]:
    """The plan, and the tables that were asked for.

    With a time to reach (`target_s`) it is the plan for the fewest nodes that reach it, or else for
    the number of nodes that is fastest; what else is asked is asked of those nodes.
    """
    tables: list[PlanComparison] = []
    if request.options.target_s is None:
        plan = request.plan()
    else:
        plan, table = _sized(request, request.options.target_s)
        tables.append(table)
        assert isinstance(plan.cluster, ClusterSpec), "the planner says what it planned for"
        request = replace(request, cluster=plan.cluster)
    this, others = Alternative("this plan", plan), list[Alternative]()
    for file, pins in request.compared.items():
        try:
            others.append(
                pins
                if isinstance(pins, Alternative)
                else Alternative(file, replace(request, pins=pins).plan())
            )
        except PlanError as error:
            raise type(error)(f"'plan.compare': '{file}':\n{error}") from None
    if others:
        tables.append(PlanComparison("compare", "what if", this, tuple(others), by_call=True))
    if request.options.sensitivity:
        better = _planned(request, request.better_clusters())
        best = min(better, key=lambda one: one.step_s)
        change = change_text(best.step_s / this.step_s - 1)
        answer = f"most is gained by {best.name}: {seconds_text(best.step_s)}, {change}"
        if best.step_s > this.step_s * 0.9995:
            answer = "none of these makes a step faster"
        title = "what better hardware gives"
        tables.append(PlanComparison("sensitivity", title, this, better, answer))
    return plan, tuple(tables)


def _sized(request: PlanRequest, target_s: float) -> tuple[Plan, PlanComparison]:
    sizes = _planned(request, smaller(request.cluster))
    fits = [one for one in sizes if one.plan is not None]
    if not fits:
        raise InfeasibleError(sizes[-1].why)
    best = min(fits, key=lambda one: one.step_s)
    chosen = next((one for one in fits if one.step_s <= target_s), best)
    assert chosen.plan is not None
    if chosen.step_s > target_s:
        answer = (
            f"none makes a step in {seconds_text(target_s)}: the fastest, {best.name}, takes "
            f"{seconds_text(best.step_s)}"
        )
    else:
        answer = (
            f"{chosen.name} ({chosen.plan.num_devices:,} devices) is the least of these that makes "
            f"a step in {seconds_text(target_s)}"
        )
    title = f"nodes for a step in {seconds_text(target_s)}"
    return chosen.plan, PlanComparison("target_s", title, chosen, sizes, answer)


def _planned(request: PlanRequest, clusters: Mapping[str, ClusterSpec]) -> tuple[Alternative, ...]:
    rows: list[Alternative] = []
    for name, cluster in clusters.items():
        try:
            rows.append(Alternative(name, replace(request, cluster=cluster).plan()))
        except PlanError as error:
            rows.append(Alternative(name, None, str(error)))
    return tuple(rows)
