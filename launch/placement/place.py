"""Where a run's nodes run: as the configuration says, as a plan's file says, or on one rank.

What nobody has said is left to the planner; see `auto_place.py`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...configs.schema import ExecutorConfig, RoleConfig, WorkloadConfig
from ...configs.validate import nearest_key
from ...dataflow.errors import ConfigError, PlanError
from ...dataflow.graph.graph import Graph, Node
from ...dataflow.kinds import NodeKind
from ...dataflow.runtime.executor import Executor
from ...dataflow.runtime.placement import DeviceGroup, Placement, check_placement, follow
from ...planner.formatting import bytes_text, seconds_text
from ...planner.inputs.calls import CALL_KINDS, Workload, calls_of
from ...planner.inputs.cluster import ClusterSpec, halvings, part
from ...planner.inputs.layout import Layout
from ...planner.inputs.model_shape import ModelShape
from ...planner.plan.plan import GroupPlan, Plan, one_group_plan
from ...planner.report.plan_texts import cluster_text, placement_text
from ...workers.engines.registry import ENGINES, trainers
from ...workers.executors.assignment import Machine, NoRoom, assign, shares_of
from ...workers.executors.registry import PARALLEL_EXECUTOR, ExecutorKind
from ...workers.weight_sync.channel import DEFAULT_TRANSPORT
from ..inputs.compose import AUTO
from ..inputs.engines import Engines
from ..inputs.record import Stage
from ..inputs.run import Run, executor_kind
from ..inputs.sizes import train_items
from .machine import PlannedMachine, planned_machine, threads_of
from .plan_inputs import PlanInputs

if TYPE_CHECKING:
    from ...planner.search.options import Option

_SIZES = {"tensor_parallel": "tp", "pipeline_parallel": "pp"}
"""Sections of `executor` that divide models, and the size of a layout that each is."""

_SEVERAL = f"executor={PARALLEL_EXECUTOR}"
"""The setting for a run in several processes."""


def written_plan(run: Run) -> Plan | None:
    """The plan that the configuration gives, or None if the planner is to choose.

    Raises:
        ConfigError: If a group of `executor.nodes` is not one of `executor.groups`, or both groups
            and a plan's file are given.
        PlanError: If the plan cannot be read or is none for this executor.
    """
    section = run.executor
    for name, group in section.nodes.items():
        if group not in section.groups:
            raise ConfigError(
                f"'executor.nodes.{name}': there is no group '{group}'"
                f"{nearest_key(group, section.groups)}\n"
                f"    executor.groups has: {', '.join(section.groups) or 'none'}"
            )
    for key in ("tensor_parallel", "pipeline_parallel", "devices", "served"):
        for group in () if section.groups else getattr(section, key):
            raise ConfigError(
                f"'executor.{key}.{group}' is set, but there are no executor.groups\n"
                "    name the groups, or leave it out"
            )
    if section.groups:
        return _hand_written(run)
    if run.config.placement != AUTO:
        return _from_file(Path(run.config.placement), section)
    if not _has_processes(section):
        return one_group_plan(device=section.device)
    return None


def _has_processes(section: ExecutorConfig) -> bool:
    return executor_kind(section.kind).has_processes


def _hand_written(run: Run) -> Plan:
    section = run.executor
    if run.config.placement != AUTO:
        raise ConfigError(
            f"'placement' is '{run.config.placement}', but there are executor.groups as well\n"
            "    leave one of them out"
        )
    for key in ("tensor_parallel", "pipeline_parallel", "devices", "served"):
        for group, size in getattr(section, key).items():
            if group not in section.groups:
                raise ConfigError(
                    f"'executor.{key}.{group}': there is no group '{group}'"
                    f"{nearest_key(group, section.groups)}\n"
                    f"    executor.groups has: {', '.join(section.groups) or 'none'}"
                )
            if key in _SIZES:
                _check_divides(
                    run.engines, f"executor.{key}.{group}", Layout(**{_SIZES[key]: size})
                )
    for group, num_ranks in section.groups.items():
        if not _has_processes(section) and num_ranks != 1:
            raise PlanError(
                f"'executor.groups.{group}' is {num_ranks}, but executor={section.kind} has one "
                f"rank\n    set {_SEVERAL}, or 1"
            )
    groups = tuple(_group(section, name) for name in section.groups)
    return Plan(groups=groups, nodes=section.nodes)


def _check_divides(engines: Engines, at: str, layout: Layout) -> None:
    """Refuse a division of a group's models that neither what trains nor what generates runs."""
    rollout = engines.rollout
    why = engines.train.why_not(layout, "train")
    if why is None or (rollout is not None and rollout.why_not(layout, "generate") is None):
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


def _from_file(file: Path, section: ExecutorConfig) -> Plan:
    plan = Plan.read(file)
    for group in plan.groups:
        several = len(plan.groups) > 1 or group.num_ranks > 1
        if several and not _has_processes(section):
            total = sum(group.num_ranks for group in plan.groups)
            raise PlanError(
                f"plan file {file} has {total} ranks, but executor={section.kind} has one\n"
                f"    set {_SEVERAL}"
            )
        if group.device.partition(":")[0] != section.device.partition(":")[0]:
            raise PlanError(
                f"plan file {file}: group '{group.name}' is on '{group.device}', but "
                f"'executor.device' is '{section.device}'\n"
                f"    set executor.device={group.device}, or plan for another cluster"
            )
    return plan


def placement_of(graph: Graph, plan: Plan, run: Run) -> Placement:
    """The placement of the main stage."""
    given = run.config.placement
    where = "the plan" if given == AUTO else f"plan file {given}"
    check_layouts(plan, graph, run.engines, where)
    placement = divide_groups(plan, graph, run.engines).placement(graph)
    idle = _idle(graph, placement)
    if idle and run.executor.groups:
        raise PlanError(
            f"'executor.groups.{idle[0]}' would have nothing to do in {graph.name}\n"
            f"    give it nodes: executor.nodes.NODE={idle[0]}, or leave it out"
        )
    if idle:
        raise PlanError(
            f"group '{idle[0]}' of the plan would have nothing to do in {graph.name}\n"
            "    plan again for this algorithm, or leave the group out"
        )
    return placement


def _idle(graph: Graph, placement: Placement) -> list[str]:
    used = _used(graph, placement)
    return [group.name for group in placement.groups if group.name not in used]


def _used(graph: Graph, placement: Placement) -> set[str]:
    nodes = {placement.nodes[n.name] for n in graph.nodes if n.kind is not NodeKind.SOURCE}
    return nodes | {server for _, server in placement.serving(graph)}


def follow_main(
    graph: Graph,
    main: Graph,
    placement: Placement,
    per_step: Mapping[str, int],
    *,
    keep_ranks: bool,
) -> Placement:
    """The placement of an earlier stage: its roles run where the main stage has them.

    Groups that would stay idle are not started.
    """
    whole = follow(graph, main, placement)
    items = train_items(graph, per_step)
    used = _used(graph, whole)
    groups: list[DeviceGroup] = []
    for group in whole.groups:
        if group.name not in used:
            continue
        shared = [n for name, n in items.items() if whole.nodes[name] == group.name]
        ranks = group.num_ranks
        while not keep_ranks and any(number % ranks for number in shared):
            ranks -= 1
        groups.append(group.with_ranks(ranks))
    made = Placement(tuple(groups), whole.nodes, lcm(*(group.num_ranks for group in groups)))
    check_placement(graph, made)
    return made


def with_threads(
    section: ExecutorConfig, plan: Plan, measured: int | None = None
) -> ExecutorConfig:
    """The section with the threads that each rank of a plan has, where none are given.

    A plan for some CPUs takes each of its devices for an equal share of the cores, because ranks of
    all groups work at the same time.
    """
    cluster = plan.cluster
    given = section.num_threads is not None or section.groups
    many = _has_processes(section)
    if given or not many or section.device != "cpu" or not isinstance(cluster, ClusterSpec):
        return section
    largest = max(group.devices_per_node for group in cluster.node_groups)
    threads = measured or threads_of(largest)
    return section.model_copy(update={"num_threads": threads})


def make_executor(section: ExecutorConfig) -> Executor:
    """The executor that the section names.

    Raises:
        ConfigError: If what it needs, or the device, is not there.
    """
    kind = executor_kind(section.kind)
    _check_device(section, kind)
    return executor_of(section, kind)


def _check_device(section: ExecutorConfig, kind: ExecutorKind) -> None:
    """Refuse CUDA where there is none: on the cluster that was joined, or on this machine."""
    if not section.device.startswith("cuda"):
        return
    machines = kind.machines() if kind.is_installed else ()
    if machines:
        if not any(machine.total.get("GPU", 0) >= 1 for machine in machines):
            raise ConfigError(
                f"'executor.device' is '{section.device}', but none of the {len(machines)} nodes "
                "of the cluster that was joined has a GPU\n    set executor.device=cpu"
            )
        return
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"'executor.device' is '{section.device}', but torch finds no CUDA device here\n"
            "    set executor.device=cpu"
        )


def executor_of(section: ExecutorConfig, kind: ExecutorKind) -> Executor:
    """The same, whether the device is there or not."""
    if not kind.has_processes and section.transport != DEFAULT_TRANSPORT:
        raise ConfigError(
            f"'executor.transport' is '{section.transport}', but in one process no weights "
            f"travel\n    set {_SEVERAL}, or leave it out"
        )
    return kind.make(section.num_threads, section.transport)


@dataclass(frozen=True)
class _Kind:
    """The kind of process that a call needs.

    Attributes:
        engine: What trains there; or for generation by another engine the role, because a process
            has at most one worker that only generates.
        generates: Whether that is the case.
        tensor_parallel: Processes that share matrices.
        pipeline_parallel: Stages.
    """

    engine: str
    generates: bool
    tensor_parallel: int
    pipeline_parallel: int

    def name(self, group: str, beside: Sequence[_Kind]) -> str:
        if self == beside[0]:
            return group
        sizes = f"tp{self.tensor_parallel}pp{self.pipeline_parallel}"
        several = {kind.engine for kind in beside if kind.generates == self.generates} != {
            self.engine
        }
        of = f"-{self.engine}" if several else ""
        return f"{group}{of}-rollout" if self.generates else f"{group}{of}-{sizes}"


def check_layouts(plan: Plan, graph: Graph, engines: Engines, where: str) -> None:
    """Refuse layouts that the engines do not run."""
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


def divide_groups(plan: Plan, graph: Graph, engines: Engines) -> Plan:
    """The plan with a group for every kind of process.

    The first kind of a group, the one that trains if there is any, keeps its name and whatever
    does not say what it needs. Groups that nothing is to be divided in stay as they are.
    """
    groups: list[GroupPlan] = []
    nodes = dict(plan.nodes)
    free = 1 + max((d for group in plan.groups for d in group.devices), default=-1)
    for group in plan.groups:
        kinds = {n.name: _kind(n, group, plan, graph, engines) for n in _of(plan, graph, group)}
        every = _in_order(graph, kinds)
        if len(every) < 2:
            groups.append(_sized(group, every[0]) if every else group)
            continue
        devices = group.devices or tuple(range(free, free + group.num_ranks))
        free = max(free, max(devices) + 1)
        shared = group.model_copy(update={"devices": devices})
        names = {kind: kind.name(group.name, every) for kind in every}
        groups += [_sized(shared, kind, names[kind]) for kind in every]
        nodes |= {name: names[kind or every[0]] for name, kind in kinds.items()}
    if tuple(groups) == plan.groups:
        return plan
    default = plan.default_group or plan.groups[0].name
    return Plan.model_validate(
        {**dict(plan), "groups": tuple(groups), "nodes": nodes, "default_group": default}
    )


def _of(plan: Plan, graph: Graph, group: GroupPlan) -> list[Node]:
    return [
        node
        for node in graph.nodes
        if node.kind is not NodeKind.SOURCE and plan.group_of(node) == group.name
    ]


def _kind(node: Node, group: GroupPlan, plan: Plan, graph: Graph, engines: Engines) -> _Kind | None:
    apart = engines.apart(graph, node)
    layout = plan.layouts.get(node.name)
    if layout is None and not apart and not _trains(node, graph, engines):
        return None
    sizes = (group.tensor_parallel, group.pipeline_parallel)
    if layout is not None:
        sizes = engines.runs(graph, node).division(layout)
    role = node.role or ""
    return _Kind(role if apart else engines.trainer(role).name, apart, *sizes)


def _trains(node: Node, graph: Graph, engines: Engines) -> bool:
    if node.kind is NodeKind.TRAIN or node.role in engines.of_roles:
        return True
    return any(other.role == node.role and engines.apart(graph, other) for other in graph.nodes)


def _in_order(graph: Graph, kinds: dict[str, _Kind | None]) -> list[_Kind]:
    """The kinds of a group: first that of its first train call, then in program order."""
    trained = [kinds[n.name] for n in graph.nodes if n.kind is NodeKind.TRAIN and n.name in kinds]
    return [kind for kind in dict.fromkeys([*trained, *kinds.values()]) if kind is not None]


def _sized(group: GroupPlan, kind: _Kind, name: str = "") -> GroupPlan:
    return GroupPlan.model_validate(
        {
            **dict(group),
            "name": name or group.name,
            "tensor_parallel": kind.tensor_parallel,
            "pipeline_parallel": kind.pipeline_parallel,
        }
    )


_DEVICE = "device"
"""The label under which a described machine says what its devices are."""


@dataclass(frozen=True)
class Seat:
    """Where a process would go.

    Attributes:
        group: Its group.
        process: Its number there.
        rank: The data-parallel rank that it belongs to.
        node: The machine; "" if any will do.
        device: The device that the plan gives it; None if it gives none.
        roles: What it builds.
    """

    group: str
    process: int
    rank: int
    node: str
    device: int | None
    roles: tuple[str, ...]


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
    groups = [_labeled(plan, group) for group in placement.groups]
    shares = shares_of(groups, all_cpus=True)
    try:
        found = assign(shares, _machines(cluster), {}, free_only=False)
    except NoRoom as error:
        raise PlanError(
            f"{error}\n    the plan does not fit cluster '{cluster.name}'; plan again for it"
        ) from None
    return {s.number: found[next(iter(s.devices))] for s in shares if s.number is not None}


def _labeled(plan: Plan, group: DeviceGroup) -> DeviceGroup:
    """With what the plan's devices are among the labels of its nodes."""
    cluster = plan.cluster
    if not isinstance(cluster, ClusterSpec) or not group.nodes:
        return group
    nodes = (
        replace(node, labels={_DEVICE: cluster.spec_of(device).name, **node.labels})
        for node, device in zip(group.nodes, group.devices, strict=True)
    )
    return replace(group, nodes=tuple(nodes))


def _machines(cluster: ClusterSpec) -> list[Machine]:
    resource = "CPU" if cluster.device_type == "cpu" else "GPU"
    return [
        Machine(
            id=f"node {number}",
            address=f"node {number}",
            total={resource: group.devices_per_node},
            free={resource: group.devices_per_node},
            labels={_DEVICE: group.device.name, **group.labels},
        )
        for number, group in enumerate(
            group for group in cluster.node_groups for _ in range(group.num_nodes)
        )
    ]


def seats(graph: Graph, placement: Placement, nodes: Mapping[int, str]) -> Sequence[Seat]:
    """Where every process would go."""
    return [
        Seat(
            group.name,
            process,
            group.rank_of(process),
            nodes.get(group.nodes[process].number, "") if group.nodes else "",
            group.devices[process] if group.devices else None,
            placement.hosted_roles(graph, group.name),
        )
        for group in placement.groups
        for process in range(group.num_processes)
    ]


_DEADLINE_S = 5.0
"""For all searches together; afterwards the best plan so far is taken."""


@dataclass(frozen=True)
class PlacementChoice:
    """The plan that the planner chose.

    Attributes:
        plan: Where nodes run.
        num_threads: Torch threads of each rank, if the calibration says; None to share out cores.
        note: A line about it, and one for each role that was left out.
    """

    plan: Plan
    num_threads: int | None
    note: str


def choose(run: Run) -> PlacementChoice:
    """Plan the main stage for this machine.

    Where the planner knows the model, an infeasible run is refused. Where it does not, everything
    is placed on one rank, and the note says why.

    Args:
        run: The run.

    Raises:
        ConfigError: If a calibration is named that is for other devices, nothing is known of
            several GPUs, or nothing generates.
        PlanError: If the run needs more memory than there is, or the calibration cannot be read.
    """
    graph, section = run.main.graph, run.executor
    run.engines.check_generates(graph)
    inputs = PlanInputs(run)
    try:
        models = inputs.models({})
        workload = inputs.workload(WorkloadConfig())
        calls = calls_of(graph, workload, models)
    except (ConfigError, PlanError) as error:
        return _one_rank(section, str(error).splitlines()[0])
    if not calls:
        return _one_rank(section, f"no role of {graph.name} has a model")
    machine = planned_machine(run)
    if isinstance(machine, str):
        return _one_rank(section, machine)
    plan = _best(run, models, workload, machine)
    threads = machine.calibration.num_threads if machine.calibration else None
    dtypes = (model.dtype for model in models.values() if model is not None)
    measured = machine.calibration.notes_for(models.values()) if machine.calibration else ()
    said = (
        *filter(None, [machine.note]),
        *inputs.left_out(models),
        *machine.cluster.notes(dtypes),
        *measured,
    )
    notes = "".join(f"\nplacement: {note}" for note in said)
    return PlacementChoice(plan, threads, _said(graph, plan) + notes)


def _one_rank(section: ExecutorConfig, why: str) -> PlacementChoice:
    plan = one_group_plan(device=section.device)
    return PlacementChoice(
        plan, None, f"placement: everything on one rank; nothing was planned: {why}"
    )


def _said(graph: Graph, plan: Plan) -> str:
    assert plan.prediction is not None
    return (
        f"placement: {placement_text(graph, plan)}; {seconds_text(plan.prediction.step_time_s)} "
        f"per step predicted ({plan.prediction.calibration})"
    )


def _best(
    run: Run,
    models: Mapping[str, ModelShape | None],
    workload: Workload,
    machine: PlannedMachine,
) -> Plan:
    """Return the fastest plan over all devices, half of them, a quarter, ... and one."""
    graph = run.main.graph
    items = train_items(graph, run.main.config.per_step)
    engines, others = run.engines.planned()
    # Imported here: a run in one process plans nothing, and the search is 23 modules.
    from ...planner.plan.planner import plan_step
    from ...planner.search.pins import Pins

    pins = Pins(allows=_Divides(items, workload))
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
                pins=pins,
                deadline_s=max(0.5, (until_s - time.monotonic()) / left),
            )
        except PlanError as error:
            refused.append(error)
        else:
            found.append(plan)
    if not found:
        raise refused[0]
    best = min(found, key=_step_time_s)
    ranks = [
        group.device_group.num_ranks for group in divide_groups(best, graph, run.engines).groups
    ]
    chunks = lcm(*ranks) // max(ranks)
    return best.model_copy(update={"cluster": machine.cluster, "chunks_per_rank": chunks})


def _step_time_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_time_s


@dataclass(frozen=True)
class _Divides:
    """Allows options whose ranks divide a step's prompts."""

    items: Mapping[str, int]
    workload: Workload

    def __call__(self, call_group: str, option: Option) -> bool:
        return all(
            self.items.get(name, layout.dp) % layout.dp == 0
            and layout.dp <= self.workload.num_prompts
            for name, layout in option.layouts.items()
        )


def planned_options(plan: Plan, step: Stage, engines: Engines) -> dict[str, dict[str, Any]]:
    """Role -> fields of its worker's spec that the plan decides, for the engine that trains."""
    graph = step.graph
    found: dict[str, dict[str, Any]] = {}
    for name, tokens in plan.micro_batch_tokens.items():
        role = graph[name].role
        if role is not None:  # the least of its calls: all of them share one worker
            own = found.setdefault(role, {})
            own["micro_batch_tokens"] = min(tokens, own.get("micro_batch_tokens", tokens))
    said: dict[tuple[str, str], str] = {}
    for name, layout in plan.layouts.items():
        node = graph[name]
        if node.role is None or engines.apart(graph, node):
            continue
        for key, value in engines.runs(graph, node).options(layout).items():
            at = f"layout {layout} of '{name}'"
            _check_given(step, engines, node.role, key, value, at)
            other = said.setdefault((node.role, key), name)
            if found.setdefault(node.role, {}).setdefault(key, value) != value:
                raise PlanError(
                    f"the layouts of '{other}' and '{name}' ask for {key}={found[node.role][key]} "
                    f"and {key}={value}, but one role has one {key}\n"
                    "    give its calls the same layout"
                )
    return found


def _check_given(
    step: Stage, engines: Engines, role: str, key: str, value: Any, layout: str
) -> None:
    own = step.config.roles.get(role, RoleConfig()).options
    given: tuple[tuple[str, Mapping[str, Any]], ...] = (
        (f"{step.at}.roles.{role}.options", own),
        ("engine.options", engines.options_of(role)),
    )
    for at, options in given:
        if options.get(key, value) != value:
            raise ConfigError(
                f"'{at}.{key}' is {options[key]}, but {layout} makes it {value}\n"
                "    leave it out, or place the run by hand: executor.groups"
            )
