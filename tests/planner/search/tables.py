"""Clusters and option tables made up for tests of the search."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st
from penstock.planner.inputs.cluster import ClusterSpec, DeviceSpec, LinkSpec, Mesh, NodeGroup
from penstock.planner.inputs.layout import Layout
from penstock.planner.search.options import CallNode, Option
from penstock.planner.search.step_time import StepTimer


def device(name: str, memory_bytes: int) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        memory_bytes=memory_bytes,
        flops_per_s={"bfloat16": 1e12},
        memory_bytes_per_s=1e12,
        host_bytes_per_s=1e10,
    )


def cluster_of(*groups: tuple[int, int, DeviceSpec]) -> ClusterSpec:
    """A cluster of `(number of nodes, devices per node, device)`."""
    link = LinkSpec(bytes_per_s=1e11, latency_s=1e-6)
    return ClusterSpec(
        name="made-up",
        node_groups=tuple(
            NodeGroup(num_nodes=nodes, devices_per_node=size, device=kind, within=link)
            for nodes, size, kind in groups
        ),
        between=link,
    )


@st.composite
def clusters(draw: st.DrawFn, max_devices: int = 8) -> ClusterSpec:
    """1 to 4 nodes, of one or two kinds, with memory that may or may not do."""
    memory = draw(st.sampled_from([16, 24, 40]))
    kinds = [device("a", memory), device("b", memory + 4)]
    groups: list[tuple[int, int, DeviceSpec]] = []
    left, nodes = max_devices, 4
    for _ in range(draw(st.integers(1, 3))):
        if not left or not nodes:
            break
        size = draw(st.integers(1, left))
        count = draw(st.integers(1, min(nodes, left // size)))
        groups.append((count, size, draw(st.sampled_from(kinds))))
        left, nodes = left - count * size, nodes - count
    return cluster_of(*groups)


def kinds_of(mesh: Mesh) -> tuple[tuple[str, int, int], ...]:
    """What a mesh is made of, wherever the cluster lists it: `(device, node size, devices)`."""
    counts: dict[tuple[str, int], int] = {}
    for group, count in zip(mesh.cluster.node_groups, mesh.counts, strict=True):
        if count:
            key = (group.device.name, group.devices_per_node)
            counts[key] = counts.get(key, 0) + count
    return tuple(sorted((*key, count) for key, count in counts.items()))


@dataclass(frozen=True)
class RandomTable:
    """Options sampled by call group and kind of mesh; some meshes have none."""

    calls: tuple[CallNode, ...]
    seed: int
    max_options: int = 3
    missing: float = 0.1

    def options(
        self, call_group: str, mesh: Mesh, *, beside: tuple[str, ...] = (), lagged: bool = False
    ) -> Sequence[Option]:
        rng = random.Random(repr((self.seed, call_group, kinds_of(mesh), beside or False)))
        if rng.random() < self.missing:
            return ()
        here = {call_group, *beside}
        names = [call.name for call in self.calls if call.call_group in here]
        return [
            Option(
                durations_s={n: rng.choice([0.2, 1, 4]) * rng.random() / mesh.num_devices**0.7
                             for n in names},
                resident_bytes=rng.randint(0, 8),
                transient_bytes={name: rng.randint(0, 8) for name in names},
                layouts={name: Layout(dp=mesh.num_devices, micro_batch=k + 1) for name in names},
            )
            for k in range(rng.randint(1, self.max_options))
        ]  # fmt: skip


def period(
    calls: Sequence[CallNode],
    group_of: Mapping[str, int],
    durations_s: Mapping[str, float],
    max_lag: int,
) -> float:
    """Seconds per step in the long run."""
    timer = StepTimer(calls, [group_of[call.call_group] for call in calls], max_lag)
    return timer.seconds([durations_s[call.name] for call in calls])
