"""From a step, its models, a cluster and a workload to the plan that runs it.

`plan_step` is the planner: everything it needs is data, and what it returns is data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from ...dataflow.errors import InfeasibleError, PlanError
from ...dataflow.graph.graph import Graph, Node
from ...dataflow.kinds import NodeKind
from ..cost.calibration import Constants
from ..cost.engine_model import RoleEngines, tokens_on_device
from ..cost.memory import GroupLedger, Parts
from ..cost.time_model import TimeModel
from ..cost.time_parts import CallTime
from ..cost.verification import Verifier
from ..formatting import bytes_text, seconds_text
from ..inputs.calls import Call, Lengths, Workload, calls_of, needs_of
from ..inputs.cluster import ClusterSpec, Mesh, check_cores
from ..inputs.layout import Layout, check_layout, pinned_layout
from ..inputs.model_shape import ModelShape, adapter_params
from ..inputs.task_profile import TaskProfile
from ..search.choices import sources_of
from ..search.option_table import CallPlan, ModelTable, call_nodes
from ..search.options import Assignment, CallNode, GroupAssignment, SearchResult
from ..search.pins import Pins
from ..search.search import search
from .plan import (
    GroupMemory,
    GroupPlan,
    NodePrediction,
    OtherSchedule,
    Plan,
    Prediction,
    RunnerUp,
    StreamedStep,
)
from .simulate import simulate

# step times that differ by a smaller share are equal: floats were summed in another order
_SAME = 1e-9
_CLOSE = 0.005  # step times that differ by a smaller share look the same with three digits


def place_ops(
    graph: Graph,
    calls: Mapping[str, str],
    durations_s: Mapping[str, float],
    *,
    max_lag: int = 0,
    target_s: float = 0.0,
) -> dict[str, str]:
    """A group for every node, such that the scheduler loses as little time as can be.

    Few rules are tried, the best is improved node by node, and all are judged by playing the step
    through. With one group there is nothing to choose.
    """
    known = {node.name for node in graph.nodes if node.kind is not NodeKind.SOURCE}
    unknown = sorted(calls.keys() - known)
    if unknown:
        raise PlanError(f"'{unknown[0]}' is placed, but graph '{graph.name}' has no such node")
    if not calls:
        raise PlanError(f"no node of graph '{graph.name}' is placed, so there is no group")
    calls = {**_with_their_roles(graph, calls), **calls}
    groups = tuple(dict.fromkeys(calls.values()))
    free = [n for n in graph.nodes if n.kind is not NodeKind.SOURCE and n.name not in calls]
    best: dict[str, str] = {}
    best_s = float("inf")
    for nodes in _by_rule(graph, calls, free, groups):
        if len(groups) == 1:
            return nodes
        taken_s = simulate(graph, nodes, durations_s, max_lag=max_lag).step_time_s
        if taken_s < best_s * (1 - _SAME):
            best, best_s = nodes, taken_s
        if best_s <= target_s * (1 + _SAME):
            return best
    for names in _together(free):
        for group in groups:
            nodes = {**best, **dict.fromkeys(names, group)}
            taken_s = simulate(graph, nodes, durations_s, max_lag=max_lag).step_time_s
            if taken_s < best_s * (1 - _SAME):
                best, best_s = nodes, taken_s
        if best_s <= target_s * (1 + _SAME):
            break
    return best


def _with_their_roles(graph: Graph, calls: Mapping[str, str]) -> dict[str, str]:
    sampled = {graph[n].role: g for n, g in calls.items() if graph[n].kind is NodeKind.ROLLOUT}
    others = {graph[n].role: g for n, g in calls.items() if graph[n].kind is not NodeKind.ROLLOUT}
    homes = {**sampled, **others}
    makers = [node for node in graph.nodes if node.kind is NodeKind.TRAIN and node.role in homes]
    return {node.name: homes[node.role] for node in makers}


def _by_rule(
    graph: Graph, calls: Mapping[str, str], free: list[Node], groups: tuple[str, ...]
) -> Iterator[dict[str, str]]:
    yield {**calls, **_follow(graph, calls, free, groups[0], backward=False)}
    yield {**calls, **_follow(graph, calls, free, groups[0], backward=True)}
    for group in groups:
        yield {**calls, **dict.fromkeys((node.name for node in free), group)}


def _follow(
    graph: Graph, calls: Mapping[str, str], free: list[Node], default: str, *, backward: bool
) -> dict[str, str]:
    placed = dict(calls)
    for node in reversed(free) if backward else free:
        if backward:
            near = [placed[name] for name in graph.consumers(node.name) if name in placed]
        else:
            near = [placed[ref.node] for _, ref in node.inputs if ref.node in placed][::-1]
        placed[node.name] = near[0] if near else default
    made = {node.name: placed[node.name] for node in free}
    for names in _together(free):
        made |= dict.fromkeys(names, made[names[0]])
    return made


def _together(free: list[Node]) -> list[tuple[str, ...]]:
    trained = {node.role for node in free if node.kind is NodeKind.TRAIN}
    call_groups: dict[str, list[str]] = {}
    for node in free:
        key = f"role {node.role}" if node.role in trained else node.name
        call_groups.setdefault(key, []).append(node.name)
    return [tuple(names) for names in call_groups.values()]


_MOST_TIMES = 64  # nodes that may be suggested, as a multiple of those there are
_NODE = 8  # most devices of a node that may be suggested; most nodes have so many
_RANK = 16  # rank of adapters that are suggested


def refusal(
    calls: Sequence[Call], table: ModelTable, cluster: ClusterSpec, error: InfeasibleError
) -> InfeasibleError:
    """Return the error to raise in place of the search's own.

    The attempt that is shown has every call group on all devices, each in the way that needs least:
    nothing else spreads the states of every model further.
    """
    mesh = Mesh(cluster, tuple(group.num_devices for group in cluster.node_groups))
    attempt = _attempt(calls, table, mesh)
    if attempt is None or attempt.peak[1].total <= mesh.memory_bytes:
        return error
    ways = [
        _again(calls, table, cluster),
        _more_devices(calls, table, cluster),
        _adapters(calls, table, cluster),
    ]
    change = "; or ".join(filter(None, ways))
    if not change:
        reserved = max(group.device.reserved_bytes for group in cluster.node_groups)
        needed = bytes_text(attempt.peak[1].total + reserved)
        change = f"devices with {needed} of memory, shorter responses, or smaller models"
    return InfeasibleError(f"{error}\n{attempt.refusal(mesh.memory_bytes, change)}")


def _attempt(calls: Sequence[Call], table: ModelTable, mesh: Mesh) -> GroupLedger | None:
    resident: dict[str, Parts] = {}
    transient: dict[str, Parts] = {}
    call_groups = tuple(dict.fromkeys(call.call_group for call in calls))
    sources = sources_of(call_nodes(calls))
    for call_group in call_groups:
        if call_group in sources:
            continue
        beside = tuple(name for name in call_groups if sources.get(name) == call_group)
        options = table.options(call_group, mesh, beside=beside)
        if not options:
            return None
        least = min(options, key=lambda option: option.least_bytes)
        held, plans = table.explain(call_group, mesh, least, beside=beside)
        resident |= {name: parts for name, parts in held.items() if parts.total}
        transient |= {name: plan.transient for name, plan in plans.items()}
    ordered = {call.name: transient[call.name] for call in calls}
    return GroupLedger("all", mesh.num_devices, resident, ordered)


def _fits(calls: Sequence[Call], table: ModelTable, cluster: ClusterSpec) -> bool:
    mesh = Mesh(cluster, tuple(group.num_devices for group in cluster.node_groups))
    attempt = _attempt(calls, table, mesh)
    return attempt is not None and attempt.peak[1].total <= mesh.memory_bytes


def _again(calls: Sequence[Call], table: ModelTable, cluster: ClusterSpec) -> str:
    held = [name for name, fields in table.pins.items() if fields.get("checkpointing") is False]
    pins = dict(table.pins) | {name: {**table.pins[name], "checkpointing": True} for name in held}
    if not held or not _fits(calls, table.variant(pins=pins), cluster):
        return ""
    return ", ".join(f"plan.pins.layouts.{name}.checkpointing=true (now false)" for name in held)


def _adapters(calls: Sequence[Call], table: ModelTable, cluster: ClusterSpec) -> str:
    if any(call.model.adapter_params for call in calls):
        return ""
    adapted: list[Call] = []
    for call in calls:
        added = {"adapter_params": adapter_params(call.model, _RANK)} if call.trained else {}
        adapted.append(replace(call, model=call.model.model_copy(update=added)))
    fits = _fits(adapted, table.variant(calls=adapted), cluster)
    return f"model.lora.rank={_RANK}, which trains adapters" if fits else ""


def _more_devices(calls: Sequence[Call], table: ModelTable, cluster: ClusterSpec) -> str:
    node, *others = cluster.node_groups
    if others:
        return ""
    now = node.num_nodes
    wider = range(node.devices_per_node + 1, _NODE + 1) if now == 1 else ()
    tried = [("devices_per_node", number) for number in wider]
    tried += [("num_nodes", number) for number in range(now + 1, now * _MOST_TIMES + 1)]
    for key, number in tried:
        group = node.model_copy(update={key: number})
        larger = cluster.model_copy(update={"node_groups": (group,)})
        if _fits(calls, table.variant(), larger):
            return f"cluster.{key}={number} (now {getattr(node, key)})"
    return ""


def part_lengths(response: Lengths, num_rows: int, num_parts: int) -> tuple[Lengths, ...]:
    """Return the lengths of each part's rows, the part with the shortest longest row first."""
    below: list[float] = []
    for share in response.shares:
        below.append(share + (below[-1] if below else 0.0))
    found: list[Lengths] = []
    for part in range(num_parts):
        least = ((part + 0.5) / num_parts) ** (1.0 / num_rows)
        last = next((i for i, share in enumerate(below) if share >= least), len(below) - 1)
        weights = [(num_rows - 1) * share / below[last] for share in response.shares[: last + 1]]
        weights[last] += 1.0
        kept = [(t, w) for t, w in zip(response.tokens, weights, strict=False) if w]
        found.append(Lengths(tokens=tuple(t for t, _ in kept), weights=tuple(w for _, w in kept)))
    return tuple(found)


def part_times(
    call: Call, duration_s: float, time: Callable[[Call], CallTime], num_parts: int
) -> tuple[float, ...]:
    """Return the seconds of each part of a call.

    For a generation that is the time since the part before it. A train call sums gradients over
    ranks and takes the optimizer's step with its last part.
    """
    num_rows = max(1, round(call.num_sequences / num_parts))
    lengths = part_lengths(call.response, num_rows, num_parts)
    if call.kind == "generate":
        return _answers(call, duration_s, time, lengths)
    parts = [_each(time(replace(call, num_sequences=num_rows, response=own))) for own in lengths]
    # The last part bears what is done once, such as moving and loading weights.
    parts[-1] += max(0.0, duration_s - _each(time(call)))
    return tuple(parts)


def _each(time: CallTime) -> float:
    return time.total_s - time.grad_sync_s - time.optimizer_s


def _answers(
    call: Call, duration_s: float, time: Callable[[Call], CallTime], lengths: Sequence[Lengths]
) -> tuple[float, ...]:
    begun: list[float] = [0.0]
    for own in lengths:
        shorter = [(t, s) for t, s in zip(call.response.tokens, call.response.shares, strict=True)
                   if t < own.longest]  # fmt: skip
        left = 1.0 - sum(share for _, share in shorter)
        cut = Lengths(
            tokens=(*(t for t, _ in shorter), own.longest),
            weights=(*(share for _, share in shorter), left),
        )
        begun.append(max(begun[-1], time(replace(call, response=cut)).total_s))
    return tuple((after - before) * duration_s / begun[-1] for before, after in pairwise(begun))


def runner_up(second: Assignment | None, best: Assignment) -> RunnerUp | None:
    """Describe the second best plan; None if there is none.

    Its busiest group alone may need longer than a whole step of the best plan; or groups wait for
    each other. The best plan's own groups are not compared: a step of it may be waiting too.
    """
    if second is None:
        return None
    return RunnerUp(
        description="; ".join(
            f"{_listed(group.call_groups)} on {len(group.devices)}" for group in second.groups
        ),
        step_time_s=second.step_time_s,
        why=_why(second, best.step_time_s),
    )


def _why(second: Assignment, best_s: float) -> str:
    slower_s = second.step_time_s - best_s
    if slower_s <= _SAME * best_s:
        return "as fast as the best plan; of plans that take the same time the first one found wins"
    group = max(second.groups, key=_busy_s)
    on, busy_s = f"{_listed(group.call_groups)} on {len(group.devices)} devices", _busy_s(group)
    close = f"only {seconds_text(slower_s)} slower: " if slower_s < _CLOSE * best_s else ""
    if busy_s > best_s * (1 + _SAME):
        than = "longer than" if close else f"longer than the {seconds_text(best_s)} of"
        whole = " takes" if close else ""
        return (
            f"{close}its group of {on} is busy {seconds_text(busy_s)} of each step, {than} a whole "
            f"step of the best plan{whole}"
        )
    return (
        f"{close}its busiest group, {on}, works {seconds_text(busy_s)} of each step and waits the "
        "rest for other groups"
    )


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _busy_s(group: GroupAssignment) -> float:
    return sum(s for option in group.options.values() for s in option.durations_s.values())


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
    task: TaskProfile | None = None,
) -> Plan:
    """The fastest plan of a step, with what it is expected to do and how sure that is.

    A role without a model costs what `task` says of it, or else nothing.
    """
    pins = pins or Pins()
    known = {} if task is None else task.verifiers
    calls = calls_of(graph, workload, models, known)
    num_rows = max((call.num_sequences for call in calls), default=1)
    verifiers = tuple(
        Verifier(node.name, role, one, num_rows, pins.num_processes.get(role, one.num_processes))
        for node in graph.nodes
        if (one := known.get(node.name)) and models.get(role := node.role or "") is None
    )
    if verifiers:
        check_cores(cluster)
    needs = needs_of(graph, {call.name for call in (*calls, *verifiers)})
    own = (CallNode(one.name, one.name, needs[one.name], one.role) for one in verifiers)
    order = [node.name for node in graph.nodes]
    nodes = tuple(sorted((*call_nodes(calls), *own), key=lambda node: order.index(node.name)))
    table = ModelTable(
        calls,
        constants,
        engines=engines,
        others=others,
        max_cp=max_cp,
        tp_across_nodes=tp_across_nodes,
        pins=pins.layouts,
        verifiers=verifiers,
    )
    for call in calls:
        problem = table.engine_of(call).refuses(call, Layout())
        if problem is not None:
            raise PlanError(
                f"'{call.name}' of model '{call.model.name}' cannot be planned: {problem}\n"
                "    choose another engine, or another model"
            )
    _check_pins({call.name: call for call in calls}, pins, cluster, tp_across_nodes, table)
    try:
        found = search(nodes, table, cluster, max_lag=max_lag, pins=pins, deadline_s=deadline_s)
    except InfeasibleError as error:
        raise refusal(calls, table, cluster, error) from None
    writer = _Writer(graph, calls, nodes, table, cluster, found, verifiers, task)
    return writer.plan(workload, constants, streaming)


def _check_pins(
    calls: Mapping[str, Call],
    pins: Pins,
    cluster: ClusterSpec,
    tp_across_nodes: bool,
    table: ModelTable,
) -> None:
    node_size = max(group.devices_per_node for group in cluster.node_groups)
    for name, fields in pins.layouts.items():
        if name not in calls:
            raise PlanError(
                f"pin layouts names call '{name}'; the step's calls are {', '.join(calls)}"
            )
        layout, call, where = pinned_layout(fields), calls[name], f"pin layouts.{name}"
        check_layout(
            layout, call.model, node_size=node_size, tp_across_nodes=tp_across_nodes, where=where
        )
        problem = table.engine_of(call).refuses(call, layout)
        if problem is not None:
            raise PlanError(f"pin layouts.{name} is {layout}, but {problem}")


def _group(name: str, device: str, group: GroupAssignment) -> GroupPlan:
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


class _Explained(NamedTuple):
    group: GroupAssignment
    held: Mapping[str, Parts]  # call group -> what is held between calls
    plans: Mapping[str, CallPlan]  # call -> how it runs
    tokens: Mapping[str, int]  # forward or train call -> of its micro-batches


@dataclass(frozen=True)
class _Writer:
    graph: Graph
    calls: tuple[Call, ...]
    nodes: tuple[CallNode, ...]
    table: ModelTable
    cluster: ClusterSpec
    found: SearchResult
    verifiers: tuple[Verifier, ...]
    task: TaskProfile | None

    def plan(self, workload: Workload, constants: Constants, num_parts: int) -> Plan:
        best = self.found.best
        names = self._names(best)
        calls = {
            node.name: name
            for name, group in zip(names, best.groups, strict=True)
            for node in self.nodes
            if node.call_group in group.call_groups
        }
        explained = {
            name: self._explained(group) for name, group in zip(names, best.groups, strict=True)
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
                call.name: explained[name].tokens[call.name]
                for call in self.calls
                if call.kind != "generate"
                for name in [calls[call.name]]
            },
            role_options=dict(self._processes(best)),
            max_lag=best.max_lag,
            cluster=self.cluster,
            prediction=self._prediction(
                explained, workload, constants, self._streamed(nodes, constants, num_parts)
            ),
        )

    def _processes(self, best: Assignment) -> Iterator[tuple[str, dict[str, int]]]:
        """Processes in which each rank verifies: a rank of several devices has those of all."""
        for one in self.verifiers:
            group = next(group for group in best.groups if one.name in group.call_groups)
            if one.profile.most is not None:
                _, number = one.on(group.mesh, lagged=best.max_lag > 0)
                if one.num_processes is None:
                    made = _group("group", self.cluster.device_type, group)
                    number *= made.tensor_parallel * made.pipeline_parallel
                yield one.role, {"num_processes": min(number, one.profile.most)}

    def _explained(self, group: GroupAssignment) -> _Explained:
        sources = sources_of(self.nodes)
        held: dict[str, Parts] = {}
        plans: dict[str, CallPlan] = {}
        for call_group, option in group.options.items():
            if not option.layouts:  # it verifies, and holds nothing on a device
                continue
            here = [name for name in group.call_groups if sources.get(name) == call_group]
            parts, found = self.table.explain(
                call_group,
                group.mesh,
                option,
                beside=tuple(here),
                lagged=self.found.best.max_lag > 0,
            )
            plans |= found
            held |= parts
        tokens: dict[str, int] = {}
        room = group.mesh.memory_bytes - sum(parts.total for parts in held.values())
        of_worker: dict[str, list[Call]] = {}
        for call in self.calls:
            if call.name in plans and call.kind != "generate":
                tokens[call.name] = self.table.micro_batch_tokens(call, plans[call.name].layout)
                of_worker.setdefault(call.role, []).append(call)
        for calls in [] if group.mesh.is_cpu else of_worker.values():
            plans |= self._filled(calls, plans, tokens, room)
        return _Explained(group, held, plans, tokens)

    def _filled(
        self,
        calls: Sequence[Call],
        plans: Mapping[str, CallPlan],
        tokens: dict[str, int],
        room: int,
    ) -> dict[str, CallPlan]:
        """The calls of a worker in the largest micro-batches that fit, with their memory."""
        engine = self.table.engine_of(calls[0])
        memory = engine.memory
        if engine.packs_tokens is None:
            return {}
        own = {call.name: plans[call.name] for call in calls}
        # A call may also hold a view, or a model that waits in host memory otherwise.
        beside = {
            call.name: own[call.name].transient.less(
                memory.transient(call, own[call.name].layout, on_cpu=False)
            )
            for call in calls
        }
        left = room - max(parts.total for parts in beside.values())
        most = tokens_on_device(engine, [(call, own[call.name].layout) for call in calls], left)
        if most is None or most == engine.packs_tokens:
            return {}
        for call in calls:
            adds = memory.packed(call, own[call.name].layout, most)
            own[call.name] = own[call.name]._replace(transient=beside[call.name].plus(adds))
            tokens[call.name] = most
        return own

    def _streamed(
        self, nodes: Mapping[str, str], constants: Constants, num_parts: int
    ) -> StreamedStep | None:
        if not num_parts or any(call.segment_tokens for call in self.calls):
            return None
        best = self.found.best
        parts: dict[str, tuple[float, ...]] = {
            one.name: (best.durations_s[one.name] / num_parts,) * num_parts
            for one in self.verifiers
        }
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
        if len(assignment.groups) == 1:
            return ["all"]
        # A group's name leaves out evaluations of a model that is trained in the group.
        sources = sources_of(self.nodes)
        held = [
            [u for u in group.call_groups
             if u.endswith(".generate") or sources.get(u) not in group.call_groups]
            for group in assignment.groups
        ]  # fmt: skip
        return ["_".join(map(_short, names)) if names[1:] else names[0] for names in held]

    def _prediction(
        self,
        explained: Mapping[str, _Explained],
        workload: Workload,
        constants: Constants,
        streamed: StreamedStep | None,
    ) -> Prediction:
        found = self.found
        times: dict[str, CallPlan] = {}
        memory: dict[str, GroupMemory] = {}
        for name, (group, held, plans, _) in explained.items():
            times |= plans
            memory[name] = GroupMemory(
                resident_bytes={n: _bytes(parts) for n, parts in held.items() if parts.total},
                transient_bytes={c.name: _bytes(plans[c.name].transient) for c in self.calls
                                 if c.name in plans},
                capacity_bytes=group.mesh.memory_bytes,
            )  # fmt: skip
        nodes: dict[str, NodePrediction] = {}
        for call in self.calls:
            plan = times[call.name]
            parts_s = {**plan.time.parts(), **({"weight_move": plan.move_s} if plan.move_s else {})}
            nodes[call.name] = NodePrediction(duration_s=plan.duration_s, parts_s=parts_s)
        for one in self.verifiers:
            s = found.best.durations_s[one.name]
            nodes[one.name] = NodePrediction(duration_s=s, parts_s={"verification": s})
        return Prediction(
            step_time_s=found.step_time_s,
            lower_bound_s=min(found.lower_bound_s, found.step_time_s),
            search_time_s=found.search_time_s,
            stopped_at_deadline=found.stopped_at_deadline,
            calibration=constants.source,
            constants=constants,
            task=self.task if self.verifiers else None,
            nodes=nodes,
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
            streamed=streamed,
            models={call.role: call.model.name for call in self.calls},
            workload=workload,
        )


def _short(call_group: str) -> str:
    return call_group.replace(".generate", "_rollout").replace(".", "_")


def _bytes(parts: Parts) -> dict[str, int]:
    return {name: size for name, size in parts._asdict().items() if size}
