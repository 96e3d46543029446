"""What programs ask of an executor's groups: what each builds, and where weights go from it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping

from ...dataflow.graph.role import Role
from ...dataflow.runtime.executor import Program
from ...dataflow.runtime.placement import DeviceGroup
from ...dataflow.runtime.worker_protocol import WorkerSpec

__all__ = ["hosted_bytes", "routes"]


def hosted_bytes(
    programs: Mapping[str, Program], workers: Mapping[str, WorkerSpec | Role], group: str
) -> bytes:
    """All that a group builds, pickled."""
    roles = {
        role for one in programs.values() for role in one.placement.hosted_roles(one.graph, group)
    }
    return pickle.dumps([(role, workers.get(role)) for role in sorted(roles)])


def routes(programs: Mapping[str, Program]) -> Iterator[tuple[DeviceGroup, DeviceGroup]]:
    """Each group that trains a role, with each other one that has a copy."""
    for one in programs.values():
        for role in one.graph.trains_per_step:
            home = one.placement.home(one.graph, role)
            for group in one.placement.groups:
                hosted = one.placement.hosted_roles(one.graph, group.name)
                if home is not None and group.name != home and role in hosted:
                    yield one.placement.group(home), group
