"""From a step, its models, a cluster and a workload to the plan that runs it.

`plan_step` is the planner: everything it needs is data, and what it returns is data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ...dataflow.errors import InfeasibleError, PlanError
from ...dataflow.graph.graph import Graph
from ..cost.constants import Constants
from ..cost.engine_model import EngineModel, RoleEngines
from ..cost.memory_ledger import Parts
from ..cost.time_model import TimeModel
from ..inputs.calls import Call, calls_of
from ..inputs.cluster import ClusterSpec
from ..inputs.layout import Layout, check_layout, pinned_layout
from ..inputs.model_shape import ModelShape
from ..inputs.workload import Workload
from ..search.option_table import CallPlan, ModelTable, call_nodes
from ..search.options import CallNode
from ..search.pins import Pins
from ..search.result import Assignment, GroupAssignment, SearchResult
from ..search.search import search
from .infeasible import refusal
from .place_ops import place_ops
from .plan import GroupPlan, Plan
from .prediction import GroupMemory, NodePrediction, OtherSchedule, Prediction, StreamedStep
from .runner_up import runner_up
from .simulate import simulate
from .streamed import part_times


def plan_step(
    graph: Graph,
    models: Mapping[str, ModelShape | None],
    cluster: ClusterSpec,
    workload: Workload,
    *,
    max_lag: int | tuple[int, ...],
    constants: Constants,
    engines: RoleEngines = RoleEngines(),
    others: Mapping[str, RoleEngines] | None = None,
    pins: Pins | None = None,
    deadline_s: float | None = None,
    tp_across_nodes: bool = False,
    max_cp: int = 1,
    streaming: int = 0,
) -> Plan:
    """The fastest plan of a step, with what it is expected to do and how sure that is.

    Args:
        graph: The recorded step.
        models: Role -> shape; None for a role without a model.
        cluster: What to place it on; every device is used.
        workload: Rows and tokens of a step.
        max_lag: Steps that generation may be behind, or several to choose from.
        constants: Constants of the model of time.
        engines: What runs the calls; every layout of a plan is one that its engine runs.
        others: Role -> what runs its calls instead.
        pins: Parts of the plan that are fixed.
        deadline_s: Seconds after which the best plan known is returned.
        tp_across_nodes: Allow tensor parallelism over the network.
        max_cp: Most ranks that may share a sequence.
        streaming: Parts in which a step's rows go on; the plan is the fastest without, and says
            what they make of it.

    Raises:
        PlanError: If a pin, a size or a model makes no sense, an engine does not run a call at
            all, or no plan fits.
    """
    pins = pins or Pins()
    calls = calls_of(graph, workload, models)
    nodes = call_nodes(calls)
    table = ModelTable(
        calls,
        constants,
        engines=engines,
        others=others,
        max_cp=max_cp,
        tp_across_nodes=tp_across_nodes,
        pins=pins.layouts,
    )
    of_calls = {call.name: table.engine_of(call) for call in calls}
    _check_engines(calls, of_calls)
    _check_pins(calls, pins, cluster, tp_across_nodes, of_calls)
    try:
        found = search(nodes, table, cluster, max_lag=max_lag, pins=pins, deadline_s=deadline_s)
    except InfeasibleError as error:
        raise refusal(calls, table, cluster, error) from None
    writer = _Writer(graph, calls, nodes, table, cluster, found)
    return writer.plan(workload, constants, streaming)


def _check_engines(calls: Sequence[Call], engines: Mapping[str, EngineModel]) -> None:
    """Refuse calls that their engine runs in no layout, not even on one device."""
    for call in calls:
        problem = engines[call.name].why_not(Layout(), call.kind, call.model)
        if problem is not None:
            raise PlanError(
                f"'{call.name}' of model '{call.model.name}' cannot be planned: {problem}\n"
                "    choose another engine, or another model"
            )


def _check_pins(
    calls: Sequence[Call],
    pins: Pins,
    cluster: ClusterSpec,
    tp_across_nodes: bool,
    engines: Mapping[str, EngineModel],
) -> None:
    named = {call.name: call for call in calls}
    node_size = max(group.devices_per_node for group in cluster.node_groups)
    for name, fields in pins.layouts.items():
        if name not in named:
            raise PlanError(
                f"pin layouts names call '{name}'; the step's calls are {', '.join(named)}"
            )
        layout = pinned_layout(fields)
        check_layout(
            layout,
            named[name].model,
            node_size=node_size,
            tp_across_nodes=tp_across_nodes,
            where=f"pin layouts.{name}",
        )
        problem = engines[name].why_not(layout, named[name].kind, named[name].model)
        if problem is not None:
            raise PlanError(f"pin layouts.{name} is {layout}, but {problem}")


def _group(name: str, device: str, group: GroupAssignment) -> GroupPlan:
    """The group as it is started: whole, if its calls do not agree how to divide a model."""
    sizes = {
        (layout.tp * layout.cp, layout.pp)
        for option in group.options.values()
        for layout in option.layouts.values()
    }
    tensor, stages = sizes.pop() if len(sizes) == 1 else (1, 1)
    return GroupPlan(
        name=name,
        device=device,
        devices=group.devices,
        tensor_parallel=tensor,
        pipeline_parallel=stages,
    )


@dataclass(frozen=True)
class _Writer:
    """Turns a search's result into a plan."""

    graph: Graph
    calls: tuple[Call, ...]
    nodes: tuple[CallNode, ...]
    table: ModelTable
    cluster: ClusterSpec
    found: SearchResult

    def plan(self, workload: Workload, constants: Constants, num_parts: int) -> Plan:
        best = self.found.best
        names = self._names(best)
        calls = {
            call.name: name
            for name, group in zip(names, best.groups, strict=True)
            for call in self.calls
            if call.call_group in group.call_groups
        }
        nodes = place_ops(
            self.graph,
            calls,
            best.durations_s,
            max_lag=best.max_lag,
            target_s=best.step_time_s,
        )
        layouts = {
            name: layout
            for option in best.options.values()
            for name, layout in option.layouts.items()
        }
        return Plan(
            groups=tuple(
                _group(name, self.cluster.device_type, group)
                for name, group in zip(names, best.groups, strict=True)
            ),
            nodes=nodes,
            layouts={call.name: layouts[call.name] for call in self.calls},
            micro_batch_tokens={
                call.name: self.table.micro_batch_tokens(call, layouts[call.name])
                for call in self.calls
                if call.kind != "generate"
            },
            max_lag=best.max_lag,
            cluster=self.cluster,
            prediction=self._prediction(names, workload, constants).model_copy(
                update={"streamed": self._streamed(nodes, constants, num_parts)}
            ),
        )

    def _streamed(
        self, nodes: Mapping[str, str], constants: Constants, num_parts: int
    ) -> StreamedStep | None:
        """The plan played through with rows that go on in parts; None if not, or with segments."""
        if not num_parts or any(call.segment_tokens for call in self.calls):
            return None
        best = self.found.best
        parts: dict[str, tuple[float, ...]] = {}
        for group in best.groups:
            layouts = {k: v for option in group.options.values() for k, v in option.layouts.items()}
            for call in self.calls:
                if call.name not in layouts:
                    continue
                model = TimeModel(constants, self.table.engine_of(call))
                time = partial(model.call_time, layout=layouts[call.name], mesh=group.mesh)
                duration_s = best.durations_s[call.name]
                parts[call.name] = part_times(call, duration_s, time, num_parts)
        played = simulate(self.graph, nodes, best.durations_s, max_lag=best.max_lag, parts_s=parts)
        return StreamedStep(num_parts=num_parts, step_time_s=played.step_time_s)

    def _names(self, assignment: Assignment) -> list[str]:
        """Groups are called after what they hold; a single one is "all"."""
        if len(assignment.groups) == 1:
            return ["all"]
        held = [group.call_groups for group in assignment.groups]
        return ["_".join(map(_short, names)) if names[1:] else names[0] for names in held]

    def _prediction(
        self, names: Sequence[str], workload: Workload, constants: Constants
    ) -> Prediction:
        found = self.found
        times: dict[str, CallPlan] = {}
        memory: dict[str, GroupMemory] = {}
        for name, group in zip(names, found.best.groups, strict=True):
            resident: dict[str, dict[str, int]] = {}
            transient: dict[str, dict[str, int]] = {}
            for held, plans in self._explained(group):
                times |= plans
                resident |= {name: _bytes(parts) for name, parts in held.items() if parts.total}
                transient |= {call: _bytes(plan.transient) for call, plan in plans.items()}
            memory[name] = GroupMemory(
                resident_bytes=resident,
                transient_bytes={c.name: transient[c.name] for c in self.calls
                                 if c.name in transient},
                capacity_bytes=group.mesh.memory_bytes,
            )  # fmt: skip
        return Prediction(
            step_time_s=found.step_time_s,
            lower_bound_s=min(found.lower_bound_s, found.step_time_s),
            search_time_s=found.search_time_s,
            stopped_at_deadline=found.stopped_at_deadline,
            calibration=constants.source,
            constants=constants,
            nodes={call.name: _node(times[call.name]) for call in self.calls},
            memory=memory,
            runner_up=runner_up(found.runner_up, found.best),
            other_schedules=tuple(
                OtherSchedule(
                    max_lag=other.best.max_lag,
                    segment_tokens=workload.segment_tokens or 0,
                    step_time_s=other.step_time_s,
                )
                for other in sorted(found.other_lags, key=lambda other: other.step_time_s)
            ),
            models={call.role: call.model.name for call in self.calls},
            workload=workload,
        )

    def _explained(
        self, group: GroupAssignment
    ) -> list[tuple[Mapping[str, Parts], dict[str, CallPlan]]]:
        explained: list[tuple[Mapping[str, Parts], dict[str, CallPlan]]] = []
        for call_group, option in group.options.items():
            role = call_group.removesuffix(".generate")
            with_source = role != call_group and role in group.call_groups
            found = self.table.explain(call_group, group.mesh, option, with_source=with_source)
            explained.append(found)
        return explained


def _short(call_group: str) -> str:
    return call_group.replace(".generate", "_rollout")


def _bytes(parts: Parts) -> dict[str, int]:
    return {name: size for name, size in parts._asdict().items() if size}


def _node(plan: CallPlan) -> NodePrediction:
    parts = dict(plan.time.parts())
    if plan.move_s:
        parts["weight_move"] = plan.move_s
    return NodePrediction(duration_s=plan.duration_s, parts_s=parts)
