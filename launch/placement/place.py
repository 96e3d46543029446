"""Where a run's nodes run: as the configuration says, as a plan's file says, or on one rank.

What nobody has said is left to the planner; see `auto_place.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from pathlib import Path

from ...configs.references import entry_or_own
from ...configs.schema import ExecutorConfig
from ...configs.validate import nearest_key
from ...dataflow.errors import ConfigError, PlanError
from ...dataflow.graph.graph import Graph, NodeKind
from ...dataflow.runtime.executor import Executor
from ...dataflow.runtime.placement import DeviceGroup, Placement, check_placement, follow
from ...planner.inputs.cluster import ClusterSpec
from ...planner.inputs.layout import Layout
from ...planner.plan.plan import GroupPlan, Plan, one_group_plan
from ...workers.engines.registry import ENGINES, trainers
from ...workers.executors.executor_kind import ExecutorKind
from ...workers.executors.registry import EXECUTORS, PARALLEL_EXECUTOR
from ...workers.weight_sync.registry import DEFAULT_TRANSPORT
from ..inputs.compose import AUTO, PlacementInputs
from ..inputs.engines import Engines
from ..inputs.sizes import train_items
from .divide import check_layouts, divided
from .machine import threads_of

_SIZES = {"tensor_parallel": "tp", "pipeline_parallel": "pp"}
"""Sections of `executor` that divide models, and the size of a layout that each is."""

_SEVERAL = f"executor={PARALLEL_EXECUTOR}"
"""What to set for a run in several processes."""


def written_plan(inputs: PlacementInputs, engines: Engines) -> Plan | None:
    """The plan that the configuration gives, or None if the planner is to choose.

    Raises:
        ConfigError: If a group of `executor.nodes` is not one of `executor.groups`, or both groups
            and a plan's file are given.
        PlanError: If the plan cannot be read or is none for this executor.
    """
    section = inputs.executor
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
        return _hand_written(inputs, engines)
    if inputs.placement != AUTO:
        return _from_file(Path(inputs.placement), section)
    if not _has_processes(section):
        return one_group_plan(device=section.device)
    return None


def _has_processes(section: ExecutorConfig) -> bool:
    return executor_kind(section.kind, "executor.kind").has_processes


def _hand_written(inputs: PlacementInputs, engines: Engines) -> Plan:
    section = inputs.executor
    if inputs.placement != AUTO:
        raise ConfigError(
            f"'placement' is '{inputs.placement}', but there are executor.groups as well\n"
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
                _check_divides(engines, f"executor.{key}.{group}", Layout(**{_SIZES[key]: size}))
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


def placement_of(graph: Graph, plan: Plan, inputs: PlacementInputs, engines: Engines) -> Placement:
    """The placement of the main stage.

    Raises:
        PlanError: If nodes, groups or layouts do not fit the graph or the engines, or a group has
            nothing to do.
    """
    where = "the plan" if inputs.placement == AUTO else f"plan file {inputs.placement}"
    check_layouts(plan, graph, engines, where)
    placement = divided(plan, graph, engines).placement(graph)
    idle = _idle(graph, placement)
    if idle and inputs.executor.groups:
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
    """Groups that have something to do."""
    nodes = {placement.nodes[n.name] for n in graph.nodes if n.kind is not NodeKind.SOURCE}
    return nodes | {server for _, server in placement.serving(graph)}


def followed(
    graph: Graph,
    main: Graph,
    placement: Placement,
    per_step: Mapping[str, int],
    *,
    keep_ranks: bool,
) -> Placement:
    """The placement of an earlier stage: its roles run where the main stage has them.

    Groups that would stay idle are not started.

    Args:
        graph: The earlier stage's.
        main: The main stage's graph.
        placement: And its placement.
        per_step: Items that a step of the earlier stage takes of each table.
        keep_ranks: Whether a group keeps all of its ranks. Otherwise, where they do not divide what
            a step trains on, it has the most that do.
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

    Args:
        section: The section `executor`.
        plan: Where the main stage runs.
        measured: Threads of a rank when the plan's devices were measured, if they were.
    """
    cluster = plan.cluster
    given = section.num_threads is not None or section.groups
    many = _has_processes(section)
    if given or not many or section.device != "cpu" or not isinstance(cluster, ClusterSpec):
        return section
    largest = max(group.devices_per_node for group in cluster.node_groups)
    threads = measured or threads_of(largest)
    return section.model_copy(update={"num_threads": threads})


def executor_kind(name: str, at: str) -> ExecutorKind:
    """The executor that a configuration names.

    Args:
        name: What is configured.
        at: Under which key.

    Raises:
        ConfigError: If it is one of the user's own that cannot be loaded.
    """
    return entry_or_own(name, EXECUTORS, at, "executor", ExecutorKind)


def make_executor(section: ExecutorConfig) -> Executor:
    """The executor that the section names.

    Raises:
        ConfigError: If what it needs, or the device, is not there.
    """
    kind = executor_kind(section.kind, "executor.kind")
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
    """The same, whether the device is there or not.

    Raises:
        ConfigError: If what it needs is not there.
    """
    if not kind.has_processes and section.transport != DEFAULT_TRANSPORT:
        raise ConfigError(
            f"'executor.transport' is '{section.transport}', but in one process no weights "
            f"travel\n    set {_SEVERAL}, or leave it out"
        )
    return kind.make(section.num_threads, section.transport)
