"""The search's answer by looking at everything; shares nothing with it but the objective."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from penstock.planner.inputs.cluster import ClusterSpec, Mesh
from penstock.planner.search.options import CallNode, Option, OptionTable

from .tables import kinds_of, period

Kinds = tuple[tuple[str, int, int], ...]
Key = frozenset[tuple[frozenset[str], Kinds]]
"""Groups of call groups, each with the kinds of its devices: what makes two plans different."""


@dataclass(frozen=True)
class Best:
    """The least time over all options for one way of grouping and dividing."""

    key: Key
    step_time_s: float


def set_partitions(call_groups: Sequence[str]) -> Iterator[list[list[str]]]:
    if not call_groups:
        yield []
        return
    for rest in set_partitions(call_groups[1:]):
        yield [[call_groups[0]], *rest]
        for k in range(len(rest)):
            yield [*rest[:k], [call_groups[0], *rest[k]], *rest[k + 1 :]]


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `total` as an ordered sum of `parts` numbers, 0 included."""
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


def divisions(cluster: ClusterSpec, num_groups: int) -> Iterator[tuple[Mesh, ...]]:
    """All ways to give every device to a group, node by node, each kind of way once."""
    nodes = [
        (k, group.devices_per_node)
        for k, group in enumerate(cluster.node_groups)
        for _ in range(group.num_nodes)
    ]
    seen: set[tuple[Kinds, ...]] = set()
    for given in product(*(list(compositions(size, num_groups)) for _, size in nodes)):
        meshes: list[Mesh] = []
        for group in range(num_groups):
            held = [
                (k, size, counts[group]) for (k, size), counts in zip(nodes, given, strict=True)
            ]
            used = [(k, size, count) for k, size, count in held if count]
            whole = all(count == size for _, size, count in used)
            if not used or not (whole or len(used) == 1):
                break
            totals = [0] * len(cluster.node_groups)
            for k, _, count in used:
                totals[k] += count
            meshes.append(Mesh(cluster, tuple(totals)))
        else:
            key = tuple(kinds_of(mesh) for mesh in meshes)
            if key not in seen:
                seen.add(key)
                yield tuple(meshes)


def choices(
    calls: Sequence[CallNode], table: OptionTable, call_groups: Sequence[str], mesh: Mesh,
    *, everything: bool
) -> list[tuple[Option, ...]]:  # fmt: skip
    """Options per call group that fit together; unless `everything`, only those beaten by none."""
    sources = {call.role: call.call_group for call in calls if call.trains}
    roles = {call.call_group: call.role for call in calls}
    # Those whose weights are trained in the group have no options without what trains them.
    home = {name: sources.get(roles[name], name) for name in call_groups}
    lists = [
        table.options(
            call_group,
            mesh,
            beside=tuple(n for n in roles if n in home and n != call_group == home[n]),
        )
        for call_group in call_groups
        if home[call_group] == call_group or home[call_group] not in call_groups
    ]
    fitting = [
        chosen
        for chosen in product(*lists)
        if sum(option.resident_bytes for option in chosen)
        + max(b for option in chosen for b in option.transient_bytes.values())
        <= mesh.memory_bytes
    ]
    if everything:
        return fitting
    vectors = [[s for option in chosen for s in option.durations_s.values()] for chosen in fitting]
    return [
        chosen
        for chosen, mine in zip(fitting, vectors, strict=True)
        if not any(
            other != mine and all(a <= b for a, b in zip(other, mine, strict=True))
            for other in vectors
        )
    ]


def all_plans(
    calls: tuple[CallNode, ...], table: OptionTable, cluster: ClusterSpec, max_lag: int,
    *, everything: bool = False
) -> list[Best]:  # fmt: skip
    """Every way of grouping and dividing that is feasible, fastest first."""
    call_groups = list(dict.fromkeys(call.call_group for call in calls))
    found: list[Best] = []
    for groups in set_partitions(call_groups):
        for meshes in divisions(cluster, len(groups)):
            least_s = _least_s(calls, table, groups, meshes, max_lag, everything=everything)
            if least_s is not None:
                key = frozenset(
                    (frozenset(group), kinds_of(mesh))
                    for group, mesh in zip(groups, meshes, strict=True)
                )
                found.append(Best(key, least_s))
    return sorted(found, key=lambda best: best.step_time_s)


def _least_s(
    calls: tuple[CallNode, ...], table: OptionTable, groups: Sequence[Sequence[str]],
    meshes: Sequence[Mesh], max_lag: int, *, everything: bool = False
) -> float | None:  # fmt: skip
    """The least time over all options; None if nothing fits."""
    group_of = {call_group: k for k, group in enumerate(groups) for call_group in group}
    per_group = [
        choices(calls, table, group, mesh, everything=everything)
        for group, mesh in zip(groups, meshes, strict=True)
    ]
    times: list[float] = []
    for chosen in product(*per_group):
        durations_s: dict[str, float] = {}
        for options in chosen:
            for option in options:
                durations_s |= option.durations_s
        times.append(period(calls, group_of, durations_s, max_lag))
    return min(times, default=None)


def least_with_devices(
    calls: tuple[CallNode, ...], table: OptionTable, cluster: ClusterSpec, max_lag: int,
    devices: Mapping[str, Sequence[int]],
) -> float | None:  # fmt: skip
    """The least time when some call groups must have just these devices; device by device."""
    call_groups = list(dict.fromkeys(call.call_group for call in calls))
    node_of = [cluster.node_of(d) for d in range(cluster.num_devices)]
    group_of_node = [k for k, g in enumerate(cluster.node_groups) for _ in range(g.num_nodes)]
    least_s: float | None = None
    for groups in set_partitions(call_groups):
        number = {call_group: k for k, group in enumerate(groups) for call_group in group}
        for owner in product(range(len(groups)), repeat=cluster.num_devices):
            held = [{d for d, k in enumerate(owner) if k == g} for g in range(len(groups))]
            if any(held[number[call_group]] != set(ids) for call_group, ids in devices.items()):
                continue
            meshes: list[Mesh] = []
            for ids in held:
                nodes = {node_of[d] for d in ids}
                whole = len(ids) == sum(node in nodes for node in node_of)
                if not ids or not (whole or len(nodes) == 1):
                    break
                totals = [0] * len(cluster.node_groups)
                for d in ids:
                    totals[group_of_node[node_of[d]]] += 1
                meshes.append(Mesh(cluster, tuple(totals)))
            else:
                found_s = _least_s(calls, table, groups, meshes, max_lag)
                if found_s is not None and (least_s is None or found_s < least_s):
                    least_s = found_s
    return least_s
