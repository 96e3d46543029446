"""Placement of a run's nodes: as the configuration or a plan's file says, or on one rank.

What is not said there is left to the planner.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, lcm
from pathlib import Path
from typing import Any, NamedTuple

from ...configs.schema import ExecutorConfig, RoleConfig, WorkloadConfig
from ...dataflow.errors import ConfigError, PlanError, nearest
from ...dataflow.graph.graph import Graph, Node
from ...dataflow.kinds import NodeKind
from ...dataflow.runtime.executor import Executor
from ...dataflow.runtime.placement import DeviceGroup, Placement, check_placement, follow
from ...planner.cost.engine_model import DEVICE_SHARE, tokens_on_device
from ...planner.formatting import aligned, bytes_text, seconds_text
from ...planner.inputs.calls import CALL_KINDS, Call, Lengths, Workload, calls_of
from ...planner.inputs.cluster import ClusterSpec, halvings, part
from ...planner.inputs.layout import Layout
from ...planner.inputs.model_shape import ModelShape
from ...planner.inputs.task_profile import TaskProfile
from ...planner.plan.plan import GroupPlan, Plan, one_group_plan
from ...planner.report.plan_texts import cluster_text, placement_text
from ...workers.engines.engine import MICRO_BATCH_TOKENS
from ...workers.engines.registry import ENGINES, trainers
from ...workers.executors.assignment import Machine, NoRoom, assign, shares_of
from ...workers.executors.registry import PARALLEL_EXECUTOR
from ...workers.weight_sync.channel import DEFAULT_TRANSPORT
from ..inputs.data import check_tables
from ..inputs.engines import Engines
from ..inputs.record import Stage
from ..inputs.run import AUTO, Run, executor_kind
from ..inputs.sizes import check_stage, train_items
from .acting import acting_nodes, acting_plan, task_profile, verifier_costs, with_group_size
from .machine import (
    PlannedMachine,
    analytic_cpus,
    gpus_here,
    idle_gpus,
    planned_machine,
    threads_of,
)
from .models import PlanInputs

_SIZES = {"tensor_parallel": "tp", "pipeline_parallel": "pp"}
"""Sections of `executor` that divide models, and the size of a layout that each is."""

_SEVERAL = f"executor={PARALLEL_EXECUTOR}"  # the setting for a run in several processes
_DEVICE = "device"  # the label under which a described machine says what its devices are
_DEADLINE_S = 5.0  # for all searches together; afterwards the best plan so far is taken


def written_plan(run: Run) -> Plan | None:
    """The plan that the configuration gives, or None if the planner is to choose."""
    section, groups = run.executor, run.executor.groups
    for name, group in section.nodes.items():
        if group not in groups:
            raise _no_group(f"executor.nodes.{name}", group, section)
    for key in ("tensor_parallel", "pipeline_parallel", "devices", "served"):
        for group, size in getattr(section, key).items():
            if not groups:
                raise ConfigError(
                    f"'executor.{key}.{group}' is set, but there are no executor.groups\n"
                    "    name the groups, or leave it out"
                )
            if run.config.placement == AUTO and group not in groups:
                raise _no_group(f"executor.{key}.{group}", group, section)
            if run.config.placement == AUTO and key in _SIZES:
                layout = Layout(**{_SIZES[key]: size})
                trains = len(groups) == 1
                _check_divides(run.engines, f"executor.{key}.{group}", layout, trains=trains)
    several = executor_kind(section.kind).has_processes
    if groups:
        if run.config.placement != AUTO:
            raise ConfigError(
                f"'placement' is '{run.config.placement}', but there are executor.groups as well\n"
                "    leave one of them out"
            )
        for group, num_ranks in groups.items():
            if not several and num_ranks != 1:
                raise PlanError(
                    f"'executor.groups.{group}' is {num_ranks}, but executor={section.kind} has "
                    f"one rank\n    set {_SEVERAL}, or 1"
                )
        return Plan(groups=tuple(_group(section, name) for name in groups), nodes=section.nodes)
    if run.config.placement != AUTO:
        return _from_file(Path(run.config.placement), section, several=several)
    return None if several else one_group_plan(device=section.device)


def _no_group(at: str, group: str, section: ExecutorConfig) -> ConfigError:
    return ConfigError(
        f"'{at}': there is no group '{group}'{nearest(group, section.groups)}\n"
        f"    executor.groups has: {', '.join(section.groups) or 'none'}"
    )


def _check_divides(engines: Engines, at: str, layout: Layout, *, trains: bool) -> None:
    generates = None if trains else engines.rollout
    why = engines.train.why_not(layout, "train")
    if why is None or (generates is not None and generates.why_not(layout, "generate") is None):
        return
    able = [name for name in trainers() if ENGINES[name].why_not(layout, "train") is None]
    raise ConfigError(
        f"'{at}' is {layout.num_devices}, but {why}\n"
        f"    set {' or '.join(f'engine={name}' for name in able)}, or 1"
    )


def _group(section: ExecutorConfig, name: str) -> GroupPlan:
    tensor = section.tensor_parallel.get(name, 1)
    stages = section.pipeline_parallel.get(name, 1)
    num_processes = section.groups[name] * tensor * stages
    devices = section.devices.get(name, [])
    if devices and len(devices) != num_processes:
        raise ConfigError(
            f"'executor.devices.{name}' names {len(devices)} devices for {num_processes} "
            "processes\n    each has one: groups x tensor_parallel x pipeline_parallel of them"
        )
    return GroupPlan(
        name=name,
        num_ranks=num_processes,
        device=section.device,
        tensor_parallel=tensor,
        pipeline_parallel=stages,
        devices=tuple(devices),
        served=section.served.get(name, {}),
    )


def _from_file(file: Path, section: ExecutorConfig, *, several: bool) -> Plan:
    plan = Plan.read(file)
    total = sum(group.num_ranks for group in plan.groups)
    if not several and (len(plan.groups) > 1 or total > 1):
        raise PlanError(
            f"plan file {file} has {total} ranks, but executor={section.kind} has one\n"
            f"    set {_SEVERAL}"
        )
    for group in plan.groups:
        if group.device.partition(":")[0] != section.device.partition(":")[0]:
            raise PlanError(
                f"plan file {file}: group '{group.name}' is on '{group.device}', but "
                f"'executor.device' is '{section.device}'\n"
                f"    set executor.device={group.device}, or plan for another cluster"
            )
    return plan


def with_placement(run: Run, plan: Plan) -> Run:
    """The run with its stages' nodes placed: the main one's as the plan says, others' after it."""
    main, keep_ranks = run.main, bool(run.executor.groups)
    placement = placement_of(main.graph, plan, run)
    stages = [
        replace(stage, placement=follow_main(stage, main.graph, placement, keep_ranks=keep_ranks))
        for stage in run.stages[:-1]
    ]
    for stage in (*stages, replace(main, placement=placement)):
        check_tables(stage.graph, stage.at)
        check_stage(stage, run.config.schedule)
    plan = _with_micro_batches(run, plan, placement)
    options = planned_options(plan, main, run.engines, placement)
    main = replace(main, placement=placement, planned_options=options)
    return replace(run, stages=(*stages, main), plan=plan)


_LONG = Workload(
    num_prompts=4096,
    samples_per_prompt=1,
    prompt=Lengths.constant(1),
    response=Lengths.constant(1023),
)
"""Enough rows to fill any micro-batch, where a plan by hand says nothing of the rows."""


def _with_micro_batches(run: Run, plan: Plan, placement: Placement) -> Plan:
    """The plan with the tokens that each worker on a GPU computes at once, if it says nothing.

    What it does not say either, because a model or the device is not known here, each worker finds
    out for itself, as if it had its device alone.
    """
    graph, engines, room = run.main.graph, run.engines, _device_bytes(run, plan)
    if plan.micro_batch_tokens or not run.executor.device.startswith("cuda"):
        return plan
    try:
        calls = calls_of(graph, _LONG, PlanInputs(run).models({}))
    except (ConfigError, PlanError):
        return plan
    found: dict[str, int] = {}
    for group in placement.groups:
        held = 0
        asked: dict[str, list[tuple[Call, Layout]]] = {}
        for call in sorted(calls, key=lambda call: call.kind != "train"):
            node = graph[call.name]
            if placement.nodes[call.name] != group.name or call.role in engines.own:
                continue
            if call.kind == "generate" and (call.role in asked or engines.apart(graph, node)):
                continue
            options = {**engines.options_of(call.role), **run.main.roles[call.role].options}
            layout = plan.layouts.get(call.name, Layout()).model_copy(
                update={"checkpointing": options.get("activation_checkpointing", False)}
            )
            if call.role not in asked and not options.get("offload"):
                held += engines.runs(graph, node).planned.memory.resident(call, layout).total
            asked.setdefault(call.role, [])
            asked[call.role] += [(call, layout)] if call.kind != "generate" else []
        for role, of_role in asked.items():
            planned, tokens = engines.trainer(role).planned, None
            if room is not None:
                tokens = tokens_on_device(planned, of_role, room - held)
            elif len(asked) > 1:  # none of them has the device for itself
                tokens = MICRO_BATCH_TOKENS
            found |= {call.name: tokens for call, _ in of_role if tokens is not None}
    return plan.model_copy(update={"micro_batch_tokens": found})


def _device_bytes(run: Run, plan: Plan) -> int | None:
    """Bytes for tensors on each GPU of a run; None if it has none, or it is not known."""
    if not run.executor.device.startswith("cuda"):
        return None
    cluster = plan.cluster if isinstance(plan.cluster, ClusterSpec) else run.cluster
    if cluster is not None:
        devices = [group.device for group in cluster.node_groups]
        return min(device.memory_bytes - device.reserved_bytes for device in devices)
    return min((int(DEVICE_SHARE * gpu.memory_bytes) for gpu in gpus_here()), default=None)


def placed(run: Run) -> Run:
    """The run with the plan that is written, or one for this machine, and with threads."""
    if run.plan is None:
        run = choose(run)
        return with_group_size(with_placement(run, run.placed), run.placed)
    run = with_group_size(replace(run, note=idle_gpus(run.executor)), run.placed)
    return run.having(executor=_with_threads(run.executor, run.placed))


def placement_of(graph: Graph, plan: Plan, run: Run) -> Placement:
    given = run.config.placement
    where = "the plan" if given == AUTO else f"plan file {given}"
    check_layouts(plan, graph, run.engines, where)
    divided = divide_groups(plan, graph, run.engines, views=_may_view(run))
    placement = divided.placement(graph)
    if _may_view(run):
        placement = _with_views(placement, graph, run.engines)
    used = _used(graph, placement)
    for group in placement.groups:
        if group.name in used:
            continue
        if run.executor.groups:
            raise PlanError(
                f"'executor.groups.{group.name}' would have nothing to do in {graph.name}\n"
                f"    give it nodes: executor.nodes.NODE={group.name}, or leave it out"
            )
        raise PlanError(
            f"group '{group.name}' of the plan would have nothing to do in {graph.name}\n"
            "    plan again for this algorithm, or leave the group out"
        )
    return placement


def _may_view(run: Run) -> bool:
    """Return whether groups may live within others; with a lag older weights are needed."""
    schedule = run.config.schedule
    processes = executor_kind(run.executor.kind).has_processes
    return processes and not (schedule.max_lag or schedule.in_flight)


def _with_views(placement: Placement, graph: Graph, engines: Engines) -> Placement:
    """Have what generates and evaluates live in the processes that train on the same devices."""
    groups: list[DeviceGroup] = []
    for group in placement.groups:
        here = [node for node in graph.nodes if placement.nodes.get(node.name) == group.name]
        read = {one.role for node in here for one in node.reads}
        trained = [n for n in here if any(placement.home(graph, one.role) for one in n.reads)]
        homes = {placement.home(graph, role) for role in read} - {None}
        home = next((g for g in placement.groups if {g.name} == homes), group)
        alike = set(home.devices) == set(group.devices) != set()
        keeps = any(graph.roles[role].keeps_state for role in read)
        able = all(engines.views(graph, node) for node in trained)
        if home is group or keeps or not (alike and able):
            groups.append(group)
            continue
        apart = all(engines.apart(graph, node) for node in here)
        devices = _strided(home, group.tensor_parallel) if apart else home.devices
        groups.append(replace(group, within=home.name, devices=devices))
    return replace(placement, groups=tuple(groups))


def _strided(home: DeviceGroup, tensor: int) -> tuple[int, ...]:
    """Devices in the order in which tensor-parallel ranks lack least (HybridFlow, section 5.3).

    Place t of each rank is on a process that trains a part of what place t generates with.
    """
    if home.tensor_parallel % tensor:
        return home.devices
    share = home.tensor_parallel // tensor
    places: list[list[int]] = [[] for _ in range(tensor)]
    for process, device in enumerate(home.devices):
        places[process % home.tensor_parallel // share].append(device)
    return tuple(device for rank in zip(*places, strict=True) for device in rank)


def _used(graph: Graph, placement: Placement) -> set[str]:
    nodes = {placement.nodes[n.name] for n in graph.nodes if n.kind is not NodeKind.SOURCE}
    return nodes | {server for _, server in placement.serving(graph)}


def follow_main(stage: Stage, main: Graph, placement: Placement, *, keep_ranks: bool) -> Placement:
    """The placement of an earlier stage: its roles run where the main stage has them.

    Groups that would stay idle are not started.
    """
    graph = stage.graph
    whole = follow(graph, main, placement)
    items, used = train_items(graph, stage.config.per_step), _used(graph, whole)
    groups: list[DeviceGroup] = []
    for group in whole.groups:
        if group.name not in used:
            continue
        shared = [n for name, n in items.items() if whole.nodes[name] == group.name]
        ranks = group.num_ranks
        while not keep_ranks and any(number % ranks for number in shared):
            ranks -= 1
        groups.append(group.with_ranks(ranks))
    named = {group.name: set(group.devices) for group in groups}
    groups = [
        group if named.get(group.within) == set(group.devices) else replace(group, within="")
        for group in groups
    ]
    made = Placement(tuple(groups), whole.nodes, lcm(*(group.num_ranks for group in groups)))
    check_placement(graph, made)
    return made


def _with_threads(
    section: ExecutorConfig, plan: Plan, measured: int | None = None
) -> ExecutorConfig:
    """The section with the threads that each rank of a plan has, where none are given.

    A plan for some CPUs takes each of its devices for an equal share of the cores, because ranks of
    all groups work at the same time.
    """
    cluster, given = plan.cluster, section.num_threads is not None or section.groups
    many = executor_kind(section.kind).has_processes
    if given or not many or section.device != "cpu" or not isinstance(cluster, ClusterSpec):
        return section
    largest = max(group.devices_per_node for group in cluster.node_groups)
    return section.model_copy(update={"num_threads": measured or threads_of(largest)})


def make_executor(section: ExecutorConfig, *, dry: bool = False) -> Executor:
    """The executor that the section names; its device need not be there if `dry`.

    CUDA is looked for on the cluster that was joined, or else on this machine.
    """
    kind = executor_kind(section.kind)
    if section.device.startswith("cuda") and not dry:
        import torch

        machines = kind.machines() if kind.is_installed else ()
        if machines and not any(machine.total.get("GPU", 0) >= 1 for machine in machines):
            raise ConfigError(
                f"'executor.device' is '{section.device}', but none of the {len(machines)} nodes "
                "of the cluster that was joined has a GPU\n    set executor.device=cpu"
            )
        if not machines and not torch.cuda.is_available():
            raise ConfigError(
                f"'executor.device' is '{section.device}', but torch finds no CUDA device here\n"
                "    set executor.device=cpu"
            )
    if not kind.has_processes and section.transport != DEFAULT_TRANSPORT:
        raise ConfigError(
            f"'executor.transport' is '{section.transport}', but in one process no weights "
            f"travel\n    set {_SEVERAL}, or leave it out"
        )
    return kind.make(section.num_threads, section.transport)


class _Kind(NamedTuple):
    # what trains there; or for generation by another engine the role, because a process has at most
    # one worker that only generates
    engine: str
    generates: bool  # whether that is the case
    tensor_parallel: int
    pipeline_parallel: int
    own: str = ""  # role and layout of calls that are computed apart from others of their role

    def name(self, group: str, beside: Sequence[_Kind]) -> str:
        if self == beside[0]:
            return group
        if self.own:
            return f"{group}-{self.own}"
        alike = (kind.engine for kind in beside if kind.generates == self.generates)
        of = "" if set(alike) == {self.engine} else f"-{self.engine}"
        sizes = f"tp{self.tensor_parallel}pp{self.pipeline_parallel}"
        return f"{group}{of}-{'rollout' if self.generates else sizes}"


def check_layouts(plan: Plan, graph: Graph, engines: Engines, where: str) -> None:
    for node in graph.nodes:
        layout = plan.layouts.get(node.name)
        if layout is None or node.kind not in CALL_KINDS:
            continue
        problem = engines.runs(graph, node).why_not(layout, CALL_KINDS[node.kind])
        if problem is not None:
            other = plan.engines not in ("", engines.words)
            given = f"give the run the engines of the plan: {plan.engines}; or " if other else ""
            raise PlanError(
                f"{where}: node '{node.name}' has layout {layout}, but {problem}\n"
                f"    {given}plan for it: {engines.words}"
            )


def divide_groups(plan: Plan, graph: Graph, engines: Engines, *, views: bool = False) -> Plan:
    """The plan with a group for every kind of process.

    The first kind of a group, the one that trains if there is any, keeps its name and whatever
    does not say what it needs. Groups that nothing is to be divided in stay as they are. With
    `views` calls that may read a view of weights have a group that nothing else is in.
    """
    groups: list[GroupPlan] = []
    nodes = dict(plan.nodes)
    free = 1 + max((d for group in plan.groups for d in group.devices), default=-1)
    for group in plan.groups:
        here = [
            node
            for node in graph.nodes
            if node.kind is not NodeKind.SOURCE and plan.group_of(node) == group.name
        ]
        kinds = {node.name: _kind(node, group, plan, graph, engines, views) for node in here}
        trained = [kinds[node.name] for node in here if node.kind is NodeKind.TRAIN]
        every = [kind for kind in dict.fromkeys([*trained, *kinds.values()]) if kind is not None]
        fields = dict(group)
        if len(every) > 1:
            devices = group.devices or tuple(range(free, free + group.num_ranks))
            free = max(free, max(devices) + 1)
            fields["devices"] = devices
        elif not every:
            groups.append(group)
        names = {kind: kind.name(group.name, every) for kind in every}
        for kind in every:
            fields |= {
                "name": names[kind],
                "tensor_parallel": kind.tensor_parallel,
                "pipeline_parallel": kind.pipeline_parallel,
            }
            groups.append(GroupPlan.model_validate(fields))
        if len(every) > 1:
            nodes |= {name: names[kind or every[0]] for name, kind in kinds.items()}
    if tuple(groups) == plan.groups:
        return plan
    default = plan.default_group or plan.groups[0].name
    return Plan.model_validate(
        {**dict(plan), "groups": tuple(groups), "nodes": nodes, "default_group": default}
    )


def _kind(
    node: Node, group: GroupPlan, plan: Plan, graph: Graph, engines: Engines, views: bool
) -> _Kind | None:
    apart, role, layout = engines.apart(graph, node), node.role or "", plan.layouts.get(node.name)
    trains = (
        node.kind is NodeKind.TRAIN
        or role in engines.of_roles
        or any(n.role == node.role and engines.apart(graph, n) for n in graph.nodes)
    )
    if layout is None and not apart and not trains:
        return None
    sizes = (group.tensor_parallel, group.pipeline_parallel)
    if layout is not None:
        sizes = engines.runs(graph, node).division(layout)
    if apart:
        return _Kind(role, apart, *sizes)
    own = "" if layout is None else _own(node, layout, plan, graph, engines, views)
    return _Kind(engines.trainer(role).name, apart, *sizes, own)


def _own(
    node: Node, layout: Layout, plan: Plan, graph: Graph, engines: Engines, views: bool
) -> str:
    """Role and layout of a call for which a role's worker in a group is not enough; else ""."""
    calls = [
        other
        for other in graph.nodes
        if other.role == node.role and other.name in plan.layouts
        if plan.group_of(other) == plan.group_of(node) and not engines.apart(graph, other)
    ]
    first = min(calls, key=lambda other: other.kind is not NodeKind.TRAIN)
    engine, of_first = engines.runs(graph, node), plan.layouts[first.name]
    options, others = engine.options(layout), engine.options(of_first)
    alike = engine.division(layout) == engine.division(of_first)
    same = all(others.get(key, value) == value for key, value in options.items())
    viewed = views and first.kind is NodeKind.TRAIN and engines.views(graph, node)
    if (alike and same) or not (alike or viewed):
        return ""
    return f"{node.role}-{layout}".replace(" ", "-")


def check_devices(plan: Plan, cluster: ClusterSpec) -> None:
    """Refuse a plan for devices that a cluster does not have, or that are too small for it.

    Of a plan that was made for no cluster in particular nothing is known.
    """
    made_for = plan.cluster
    if not isinstance(made_for, ClusterSpec):
        return
    rooms = {
        group.device.name: group.device.memory_bytes - group.device.reserved_bytes
        for group in cluster.node_groups
    }
    memory = plan.prediction.memory if plan.prediction else {}
    for group in plan.groups:
        needed = memory[group.name].peak_bytes if group.name in memory else 0
        for name in dict.fromkeys(made_for.spec_of(device).name for device in group.devices):
            if name not in rooms:
                raise PlanError(
                    f"the plan is for another cluster: for {cluster_text(made_for)}, and this is "
                    f"{cluster_text(cluster)}\n    plan again, for the cluster that it is to run on"
                )
            if needed > rooms[name]:
                raise PlanError(
                    f"group '{group.name}' of the plan is predicted to hold {bytes_text(needed)} "
                    f"on each device, and a {name} of cluster '{cluster.name}' has "
                    f"{bytes_text(rooms[name])} for it\n    plan again, for the cluster that it is "
                    "to run on"
                )


def check_fits(plan: Plan, placement: Placement, cluster: ClusterSpec) -> Mapping[int, str]:
    """Number of a plan's node -> the node of the cluster that would stand for it."""
    made_for, groups = plan.cluster, list[DeviceGroup]()
    for group in placement.groups:
        nodes = group.nodes
        if isinstance(made_for, ClusterSpec) and nodes:
            # With what the plan's devices are among the labels of its nodes.
            both = zip(nodes, group.devices, strict=True)
            nodes = tuple(
                replace(node, labels={_DEVICE: made_for.spec_of(device).name, **node.labels})
                for node, device in both
            )
        groups.append(replace(group, nodes=nodes))
    resource = "CPU" if cluster.device_type == "cpu" else "GPU"
    of_nodes = [group for group in cluster.node_groups for _ in range(group.num_nodes)]
    machines = [
        Machine(
            id=f"node {number}",
            address=f"node {number}",
            total={resource: group.devices_per_node},
            free={resource: group.devices_per_node},
            labels={_DEVICE: group.device.name, **group.labels},
        )
        for number, group in enumerate(of_nodes)
    ]
    shares = shares_of(groups, all_cpus=True)
    try:
        found = assign(shares, machines, {}, free_only=False)
    except NoRoom as error:
        raise PlanError(
            f"{error}\n    the plan does not fit cluster '{cluster.name}'; plan again for it"
        ) from None
    return {s.number: found[next(iter(s.devices))] for s in shares if s.number is not None}


def process_lines(run: Run, nodes: Mapping[int, str]) -> list[str]:
    """Lines of a table: where every process of the main stage would go, and what it builds."""
    graph, placement = run.main.graph, run.main.placement
    memory = run.placed.memory_bytes_per_device
    rows = [["group", "process", "rank", "node", "device", "memory", "roles"]]
    for group in placement.groups:
        roles = ", ".join(placement.hosted_roles(graph, group.name)) or "-"
        for process in range(group.num_processes):
            node = nodes.get(group.nodes[process].number, "") if group.nodes else ""
            device = group.devices[process] if group.devices else None
            needed = None if device is None else memory.get(device)
            rows.append(
                [
                    group.name,
                    str(process),
                    str(group.rank_of(process)),
                    node.removeprefix("node ") or "any",
                    "any" if device is None else str(device),
                    "-" if needed is None else bytes_text(needed),
                    roles,
                ]
            )
    return aligned(rows)


def choose(run: Run) -> Run:
    """The run with a plan of its main stage for this machine, a note about it, and threads.

    Where the planner knows the model, an infeasible run is refused. Where it does not, everything
    is placed on one rank, and the note says why.
    """
    graph = run.main.graph
    inputs = PlanInputs(run)
    if acting_nodes(graph) and not any(inputs.models({}).values()):
        return _acting(run)
    try:
        models = inputs.models({})
        workload = inputs.workload(WorkloadConfig())
        calls = calls_of(graph, workload, models)
    except (ConfigError, PlanError) as error:
        return _one_rank(run, str(error).splitlines()[0])
    if not calls:
        return _one_rank(run, f"no role of {graph.name} has a model")
    machine = planned_machine(run)
    if isinstance(machine, str):
        return _one_rank(run, machine)
    task, notes = verifier_costs(run)
    plan = _best(run, inputs, models, workload, machine, task)
    assert plan.prediction is not None
    calibration = machine.calibration
    shapes = [model for model in models.values() if model is not None]
    said = [
        f"{placement_text(graph, plan)}; {seconds_text(plan.prediction.step_time_s)} "
        f"per step predicted ({plan.prediction.calibration})",
        *filter(None, [machine.note]),
        *inputs.left_out(models),
        *notes,
        *machine.cluster.notes(shape.dtype for shape in shapes),
        *(calibration.notes_for(shapes) if calibration else ()),
    ]
    note = "\n".join(f"placement: {line}" for line in said)
    # Ranks have the threads that they were measured with, or else share out the cores.
    threads = calibration.num_threads if calibration else None
    section = _with_threads(run.executor, plan, threads)
    return replace(run, plan=plan, note=note).having(executor=section)


def _acting(run: Run) -> Run:
    """The run with a plan of where acting happens, if its task was measured."""
    profile = task_profile(run)
    if isinstance(profile, str):
        return _one_rank(run, profile)
    cluster = run.cluster or analytic_cpus()
    plan = acting_plan(run, profile, cluster)
    assert plan.prediction is not None
    said = [
        f"{placement_text(run.main.graph, plan)}; {seconds_text(plan.prediction.step_time_s)} per "
        f"step predicted ({plan.prediction.calibration})"
    ]
    if cluster.num_cores != profile.cores:
        said.append(f"the task was measured on {profile.cores} cores, and here are "
                    f"{cluster.num_cores}")  # fmt: skip
    run = replace(run, plan=plan, note="\n".join(f"placement: {line}" for line in said))
    return run.having(executor=_with_threads(run.executor, plan))


def _one_rank(run: Run, why: str) -> Run:
    note = f"placement: everything on one rank; nothing was planned: {why}"
    return replace(run, plan=one_group_plan(device=run.executor.device), note=note)


def _best(
    run: Run,
    inputs: PlanInputs,
    models: Mapping[str, ModelShape | None],
    workload: Workload,
    machine: PlannedMachine,
    task: TaskProfile | None,
) -> Plan:
    graph = run.main.graph
    engines, others = run.engines.planned(run.executor.transport)
    # Imported here: a run in one process plans nothing, and the search is 23 modules.
    from ...planner.plan.planner import plan_step
    from ...planner.search.pins import Pins

    found: list[Plan] = []
    refused: list[PlanError] = []
    sizes = halvings(machine.cluster.num_devices)
    until_s = time.monotonic() + _DEADLINE_S
    for left, size in zip(range(len(sizes), 0, -1), sizes, strict=True):
        try:
            plan = plan_step(
                graph,
                models,
                part(machine.cluster, size),
                workload,
                max_lag=run.config.schedule.max_lag,
                constants=machine.constants(models),
                engines=engines,
                others=others,
                pins=Pins(allows=inputs.allows(workload)),
                deadline_s=max(0.5, (until_s - time.monotonic()) / left),
                task=task,
            )
        except PlanError as error:
            refused.append(error)
        else:
            found.append(plan)
    if not found:
        raise refused[0]
    best = min(found, key=lambda plan: plan.prediction.step_time_s if plan.prediction else inf)
    divided = divide_groups(best, graph, run.engines, views=_may_view(run))
    ranks = [group.device_group.num_ranks for group in divided.groups]
    chunks = lcm(*ranks) // max(ranks)
    return best.model_copy(update={"cluster": machine.cluster, "chunks_per_rank": chunks})


def planned_options(
    plan: Plan, step: Stage, engines: Engines, placement: Placement
) -> dict[str, dict[str, dict[str, Any]]]:
    """Role -> group -> fields of the spec of what trains and evaluates, as the plan decides."""
    graph = step.graph
    found: dict[str, dict[str, dict[str, Any]]] = {}

    def fields(node: Node) -> dict[str, Any]:
        return found.setdefault(node.role or "", {}).setdefault(placement.nodes[node.name], {})

    for role, chosen in plan.role_options.items():
        for node in (node for node in graph.nodes if node.role == role):
            fields(node).update(chosen)
    for name, tokens in plan.micro_batch_tokens.items():
        # The least of the calls that share a worker.
        own = fields(graph[name])
        own["micro_batch_tokens"] = min(tokens, own.get("micro_batch_tokens", tokens))
    for name, layout in plan.layouts.items():
        node, role = graph[name], graph[name].role
        if role is None or engines.apart(graph, node):
            continue
        given: tuple[tuple[str, Mapping[str, Any]], ...] = (
            (f"{step.at}.roles.{role}", step.config.roles.get(role, RoleConfig()).options),
            ("engine", engines.options_of(role)),
        )
        for key, value in engines.runs(graph, node).options(layout).items():
            for at, options in given:
                if options.get(key, value) != value:
                    raise ConfigError(
                        f"'{at}.options.{key}' is {options[key]}, but layout {layout} of '{name}' "
                        f"makes it {value}\n"
                        "    leave it out, or place the run by hand: executor.groups"
                    )
            assert fields(node).setdefault(key, value) == value, (
                "its calls have groups of their own"
            )
    return found
