"""Where a stage's nodes run, from the executor's section of the configuration."""

from __future__ import annotations

from ..configs.schema import RunConfig
from ..configs.validate import nearest_key
from ..dataflow.errors import ConfigError, PlanError
from ..dataflow.executor import Executor, InProcess
from ..dataflow.graph import Graph, NodeKind
from ..dataflow.placement import Placement
from ..planner.plan import GroupPlan, Plan

__all__ = ["make_executor", "placement_of"]


def placement_of(graph: Graph, config: RunConfig, *, main: bool) -> Placement:
    """The placement of one stage.

    Args:
        graph: The stage's graph.
        config: The run's configuration.
        main: Whether it is the main stage. The others take of `executor.nodes` what they have, and
            start no group that would stay idle.

    Raises:
        ConfigError: If a group of `executor.nodes` is not one of `executor.groups`.
        PlanError: If nodes or groups do not fit the graph or the executor.
    """
    section = config.executor
    for name, group in section.nodes.items():
        if group not in section.groups:
            raise ConfigError(
                f"'executor.nodes.{name}': there is no group '{group}'"
                f"{nearest_key(group, section.groups)}\n"
                f"    executor.groups has: {', '.join(section.groups)}"
            )
    if section.kind == "in_process":
        for group, num_ranks in section.groups.items():
            if num_ranks != 1:
                raise PlanError(
                    f"'executor.groups.{group}' is {num_ranks}, but executor=in_process has one "
                    "rank\n    set executor=ray, or 1"
                )
    known = {node.name for node in graph.nodes} | set(graph.roles)
    nodes = {name: group for name, group in section.nodes.items() if main or name in known}
    first = next(iter(section.groups))
    busy = {first, *nodes.values()} if not main else set(section.groups)
    groups = tuple(
        GroupPlan(name=name, num_ranks=num_ranks, device=section.device)
        for name, num_ranks in section.groups.items()
        if name in busy
    )
    placement = Plan(groups=groups, nodes=nodes).placement(graph)
    _check_idle(graph, placement)
    return placement


def _check_idle(graph: Graph, placement: Placement) -> None:
    used = {placement.nodes[n.name] for n in graph.nodes if n.kind is not NodeKind.SOURCE}
    for group in placement.groups:
        if group.name not in used:
            raise PlanError(
                f"'executor.groups.{group.name}' would have nothing to do in {graph.name}\n"
                f"    give it nodes: executor.nodes.NODE={group.name}, or leave it out"
            )


def make_executor(config: RunConfig) -> Executor:
    """The executor that the configuration names.

    Raises:
        ConfigError: If Ray or the device is not there.
    """
    section = config.executor
    if section.device.startswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(
                f"'executor.device' is '{section.device}', but torch finds no CUDA device here\n"
                "    set executor.device=cpu"
            )
    if section.kind == "in_process":
        return InProcess()
    try:
        from ..workers.ray_executor import RayExecutor
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            "executor=ray needs the package ray, which is not installed\n"
            "    install penstock[ray], or set executor=in_process"
        ) from error
    return RayExecutor(num_threads=section.num_threads)
