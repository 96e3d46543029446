"""What is asked of the planner, from a composed configuration: everything typed and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from ...configs.plan_schema import PlanConfig
from ...configs.validate import validated
from ...dataflow.errors import ConfigError, FlowError
from ...dataflow.graph.check import check_lag
from ...dataflow.graph.graph import Graph
from ...dataflow.scheduler.schedule import Schedule
from ...planner.cost.constants import Constants, default_constants
from ...planner.cost.engine_model import RoleEngines
from ...planner.inputs.calls import calls_of
from ...planner.inputs.cluster import ClusterSpec
from ...planner.inputs.model_shape import ModelShape
from ...planner.inputs.workload import Workload
from ...planner.plan.plan import Plan
from ...planner.plan.planner import plan_step
from ...planner.report.comparison import Alternative
from ...planner.search.pins import Pins
from ..inputs.compose import resolved
from .cluster_inputs import cluster_spec, named_devices
from .learned import read_calibration
from .measured_run import measured_run
from .pin_inputs import flat_layouts, pins_of, pins_of_file
from .plan_inputs import PlanInputs
from .settled import local_model, with_dtype

__all__ = ["SECTIONS", "PlanRequest", "plan_request"]

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
        lags: Schedules to compare.
        refused_lags: Lag -> why the step cannot have it, of those that were to be compared.
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
    """

    graph: Graph
    models: Mapping[str, ModelShape | None]
    cluster: ClusterSpec
    workload: Workload
    lags: tuple[int, ...]
    refused_lags: Mapping[int, str]
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

    def plan(self) -> Plan:
        """Search.

        Raises:
            PlanError: If no plan fits.
        """
        plan = plan_step(
            self.graph,
            self.models,
            self.cluster,
            self.workload,
            max_lag=self.lags,
            constants=self.constants,
            engines=self.engines,
            others=self.others,
            pins=self.pins,
            deadline_s=self.deadline_s,
            tp_across_nodes=self.tp_across_nodes,
            max_cp=self.max_cp,
        )
        return plan.model_copy(update={"num_steps": self.num_steps})


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
    model = local_model(found.model)
    model = with_dtype(model, lambda: cluster.computes_faster("bfloat16"))
    inputs = PlanInputs(replace(found, model=model), model.hub or model_name)
    models = inputs.models(options.models)
    _check_models(inputs.graph, models)
    _check_dtypes(models, options.models, cluster)
    workload = inputs.workload(asked.workload)
    lags, refused = _lags(inputs.graph, found.schedule.max_lag, options.lags, composed)
    found.engines.check_generates(inputs.graph)
    engines, others = found.engines.planned()
    calls = calls_of(inputs.graph, workload, models)
    return PlanRequest(
        graph=inputs.graph,
        models=models,
        cluster=cluster,
        workload=workload,
        lags=lags,
        refused_lags=refused,
        notes=(
            *inputs.left_out(models),
            *cluster.notes(model.dtype for model in models.values() if model is not None),
            *(calibration.notes_for(models.values()) if calibration is not None else ()),
            *_not_predicted(found.schedule),
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
    )


def _not_predicted(schedule: Schedule) -> tuple[str, ...]:
    notes: list[str] = []
    if schedule.streaming:
        notes.append(
            "schedule.streaming is not predicted; steps are those of rows that go on together"
        )
    if schedule.segment_tokens:
        notes.append("schedule.segment_tokens is not predicted; steps are those of whole responses")
    if schedule.in_flight:
        notes.append("schedule.in_flight is not predicted; weights come between two steps")
    return tuple(notes)


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
    """Refuse a model in a dtype for which a device has no rate, before the search meets it.

    Raises:
        ConfigError: Naming the model's key, and what to set.
    """
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


def _lags(
    graph: Graph, configured: int, compared: list[int], composed: Mapping[str, Any]
) -> tuple[tuple[int, ...], dict[int, str]]:
    """The lags to plan for, and why not others: the one configured, or those to compare.

    Raises:
        FlowError: If the step's losses cannot correct for the one.
    """
    if _is_auto(composed):
        return _allowed(graph, compared)
    check_lag(graph, configured)
    return (configured,), {}


def _allowed(graph: Graph, lags: list[int]) -> tuple[tuple[int, ...], dict[int, str]]:
    """The lags that the step's losses can correct for, and why not the others."""
    refused: dict[int, str] = {}
    for lag in lags:
        try:
            check_lag(graph, lag)
        except FlowError as error:
            refused[lag] = error.what
    return tuple(lag for lag in dict.fromkeys(lags) if lag not in refused) or (0,), refused
