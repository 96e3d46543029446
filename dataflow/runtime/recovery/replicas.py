"""Groups whose ranks have nothing to do with each other: they may die alone, and come and go."""

from __future__ import annotations

from collections.abc import Mapping

from ..executor import Program, groups_of, servers_of

__all__ = ["replica_groups", "why_not_elastic"]


def replica_groups(programs: Mapping[str, Program]) -> set[str]:
    """The groups that change nothing, and that no other talks to: each of their ranks is a replica.

    Args:
        programs: All that run on the same workers, by name.
    """
    servers = servers_of(programs)
    connected = {*servers, *(name for names in servers.values() for name in names)}
    return {
        group.name
        for group in groups_of(programs)
        if group.name not in connected and not _changes(programs, group.name)
    }


def why_not_elastic(programs: Mapping[str, Program], name: str) -> str:
    """Why replicas of a group can neither join nor leave during a run; "" if they can."""
    group = next((one for one in groups_of(programs) if one.name == name), None)
    if group is None:
        names = ", ".join(sorted(one.name for one in groups_of(programs)))
        return f"there is no such group; the run has {names}"
    if name not in replica_groups(programs):
        return "it trains, keeps a state or serves another group, so its ranks belong together"
    if group.devices:
        return "it takes turns on its devices with another group"
    if group.pipeline_parallel > 1:
        return "its ranks have pipeline stages, whose processes are numbered by the number of ranks"
    return ""


def _changes(programs: Mapping[str, Program], group: str) -> bool:
    """Whether any program changes weights, or a state, in the group."""
    return any(
        group in {*one.placement.state_homes(one.graph).values()}
        or any(one.placement.home(one.graph, role) == group for role in one.graph.trains_per_step)
        for one in programs.values()
    )
