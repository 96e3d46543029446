"""The plan of a step that acts in environments or games and has no language model.

The search looks at every layout of acting: which copy of the policy answers, in how many processes
acting, training and answering happen, of how many groups, and how many of them each process
overlaps. A layout is bounded from below by its busiest group, by what it computes on the cores
there are, and by the calls from acting to training that follow each other; the scheduler plays
through those whose bound is below the best step so far, the most promising first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from ...dataflow.errors import InfeasibleError, PlanError
from ...dataflow.graph.graph import Graph
from ...dataflow.kinds import NodeKind
from ..cost.acting import ActingLayout, ActingTimes, acting_times
from ..formatting import bytes_text, seconds_text
from ..inputs.cluster import ClusterSpec, check_cores
from ..inputs.task_profile import ActingPins, Inference, TaskProfile
from .plan import GroupPlan, NodePrediction, OtherSchedule, Plan, Prediction, RunnerUp
from .simulate import simulate

_SAME = 1e-9  # step times that differ by a smaller share are equal
_MOST_GROUPS = 1 << 18  # into which the rows of a step may be divided
_MOST_OVERLAPPED = 64  # groups that a process steps at the same time


@dataclass(frozen=True)
class Tried:
    """A layout with what a step takes under it."""

    layout: ActingLayout
    max_lag: int
    times: ActingTimes
    bound_s: float  # the step is no faster
    step_time_s: float  # what it takes; its bound if it was not played through


def plan_acting(
    graph: Graph,
    profile: TaskProfile,
    cluster: ClusterSpec,
    *,
    max_lag: Sequence[int],
    num_groups: int | None,
    pins: ActingPins = ActingPins(),
) -> Plan:
    """The fastest placement of a step's acting, with what it is expected to take.

    Args:
        graph: The recorded step.
        profile: What its calls and its environments take.
        cluster: Where it is to run; only its cores and host memory are asked for.
        max_lag: How far acting may run ahead of training: what to compare.
        num_groups: Groups that the environments of a step fall into; None to choose.
        pins: Parts that are fixed.

    Raises:
        PlanError: If a cost or the number of cores is unknown; `InfeasibleError` if nothing fits.
    """
    began_s = time.monotonic()
    _check_known(graph, profile)
    check_cores(cluster)
    cores = cluster.num_cores
    num_gpus = None if cluster.device_type == "cpu" else cluster.num_devices
    found = [
        layout
        for layout in layouts(graph, profile, cores, num_groups, pins, num_gpus)
        if _fits(layout, profile, cluster)
    ]
    if not found:
        raise _nothing_fits(profile, cluster, cores, num_groups, pins)
    ranked = [search_acting(graph, profile, found, lag, cores) for lag in sorted(set(max_lag))]
    ranked.sort(key=lambda tried: tried[0].step_time_s)
    taken_s = time.monotonic() - began_s
    return _written(graph, profile, cluster, ranked, taken_s, chooses_groups=num_groups is None)


def search_acting(
    graph: Graph, profile: TaskProfile, found: Sequence[ActingLayout], max_lag: int, cores: int
) -> list[Tried]:
    """All layouts under one lag, the fastest first; the first two at least are played through."""
    tried, known = list[Tried](), dict[tuple[object, ...], Any]()
    chains = [chain for name in profile.loops for chain in _chains(graph, name)]
    for layout in found:
        times = acting_times(graph, profile, layout, cores, known)
        durations_s = times.durations_s
        # So long after acting the weights are there that acting of `max_lag` + 1 steps later reads.
        cycles_s = [sum(map(durations_s.__getitem__, c)) / (max_lag + 1) for c in chains]
        bound_s = max(times.cpu_s / cores, *times.busy_s.values(), *cycles_s)
        tried.append(Tried(layout, max_lag, times, bound_s, bound_s))
    played: list[Tried] = []
    best_s = second_s = math.inf
    for one in sorted(tried, key=lambda one: (one.bound_s, one.layout)):
        if one.bound_s <= second_s:
            one = play(graph, profile, one, cores)
            best_s, second_s = sorted((best_s, second_s, one.step_time_s))[:2]
        played.append(one)
    return sorted(played, key=lambda one: (one.step_time_s, one.layout.num_processes, one.layout))


def _chains(graph: Graph, acts: str) -> list[list[str]]:
    """Calls one after another, from one that acts to those that train what it reads."""
    read, found = {one.role for one in graph[acts].reads}, list[list[str]]()
    begun = [[acts]]
    for chain in begun:
        last = graph[chain[-1]]
        if last.kind is NodeKind.TRAIN and last.role in read:
            found.append(chain)
        begun += [[*chain, name] for name in graph.consumers(last.name)]
    return found


def play(graph: Graph, profile: TaskProfile, one: Tried, cores: int) -> Tried:
    """Have the engine's scheduler play a layout through."""
    groups = _groups(graph, profile, one.layout)
    plan = Plan(groups=groups, nodes=_nodes(graph, profile, one.layout))
    played_s = simulate(
        graph,
        plan.placement(graph).nodes,
        one.times.durations_s,
        max_lag=one.max_lag,
        num_steps=8,  # with few calls in a step the same timing comes again soon
        served={group.name: group.served for group in groups},
    ).step_time_s
    step_s = max(played_s, one.times.cpu_s / cores)
    return Tried(one.layout, one.max_lag, one.times, one.bound_s, step_s)


def layouts(
    graph: Graph,
    profile: TaskProfile,
    cores: int,
    num_groups: int | None,
    pins: ActingPins,
    num_gpus: int | None = None,
) -> Iterator[ActingLayout]:
    """Every layout that the step can have and the pins allow; GPUs train and answer."""
    rows = math.gcd(*profile.rows.values())
    # Groups have equal sizes, as the profile takes them for equally long.
    most_groups = min(rows // profile.team, _MOST_GROUPS)
    every = [
        n
        for n in range(profile.least_groups, most_groups + 1)
        if rows % n == 0 and rows // n % profile.team == 0
    ]
    at_once = _MOST_OVERLAPPED if profile.overlaps else 1
    measured = ("inline",) if profile.executor.publish_s is None else get_args(Inference)
    on_gpus, most = num_gpus is not None, num_gpus or cores
    most_trainers = most if _divides(graph, profile) else 1
    for groups in every if num_groups is None else [num_groups]:
        for inference in measured:
            inline = inference == "inline"
            for ranks in _numbers(min(most_trainers if inline else cores, groups), pins.num_ranks):
                if inline and rows % ranks:  # each rank trains on as many rows
                    continue
                servers = [0]
                if inference == "served":
                    servers = _numbers(min(most, ranks), pins.num_servers)
                pairs = [
                    (trainers, answering)
                    for answering in servers
                    for trainers in _numbers(
                        min(most_trainers, most - answering * on_gpus), pins.num_trainers
                    )
                    if rows % trainers == 0
                ]
                for overlapped in _numbers(min(-(-groups // ranks), at_once), pins.num_overlapped):
                    for pair in [(0, 0)] if inline else pairs:
                        layout = ActingLayout(inference, ranks, groups, overlapped, *pair)
                        if pins.allows(layout):
                            yield layout


def _numbers(most: int, pinned: int | None) -> list[int]:
    """1, 2, 3 and 4, powers of two beyond, and the most there may be; or what is pinned."""
    if pinned is not None:
        return [pinned] if pinned <= most else []
    powers = {1 << power for power in range(most.bit_length())}
    return sorted({*range(1, min(most, 4) + 1), *powers, most} - {0})


def _divides(graph: Graph, profile: TaskProfile) -> bool:
    """Return whether training on several ranks was measured, and nothing must be on one rank."""
    acting = {graph[name].role for name in profile.loops}
    kept = [r for r, contract in graph.roles.items() if contract.keeps_state and r not in acting]
    return not kept and all(
        profile.calls[node.name].two_ranks_s is not None
        for node in graph.nodes
        if node.kind is NodeKind.TRAIN
    )


# --- what is refused


def _check_known(graph: Graph, profile: TaskProfile) -> None:
    for node in graph.nodes:
        if node.kind is NodeKind.SOURCE or node.name in {*profile.loops, *profile.calls}:
            continue
        raise PlanError(
            f"the profile of the task has no cost of '{node.name}'\n    measure the step as it is "
            "now: penstock profile algorithm=... task=..."
        )


def _fits(layout: ActingLayout, profile: TaskProfile, cluster: ClusterSpec) -> bool:
    if _spreads(cluster) and layout.num_processes > cluster.num_devices:
        return False
    return layout.num_processes * profile.process_bytes <= _host_bytes(cluster)


def _spreads(cluster: ClusterSpec) -> bool:
    return len(cluster.nodes) > 1 and cluster.device_type == "cpu"


def _host_bytes(cluster: ClusterSpec) -> float:
    known = [group.host_bytes for group in cluster.nodes]
    return math.inf if None in known else float(sum(size or 0 for size in known))


def _nothing_fits(
    profile: TaskProfile,
    cluster: ClusterSpec,
    cores: int,
    num_groups: int | None,
    pins: ActingPins,
) -> InfeasibleError:
    ranks, groups = pins.num_ranks or 1, pins.num_groups or num_groups
    text = f"no placement of acting fits cluster '{cluster.name}'"
    if ranks > cores:
        return InfeasibleError(
            f"{text}: plan.pins.acting.num_ranks={ranks} processes act, and it has {cores} cores\n"
            "    pin fewer, or plan for a cluster with more cores (cluster.cores_per_node)"
        )
    if num_groups is not None and pins.num_groups not in (None, num_groups):
        return InfeasibleError(
            f"{text}: plan.pins.acting.num_groups={pins.num_groups}, and the task's rows fall into "
            f"{num_groups} group{'' if num_groups == 1 else 's'} (task.group_size)\n    set "
            "task.group_size=auto, or leave the pin out"
        )
    if groups is not None and ranks > groups:
        return InfeasibleError(
            f"{text}: {ranks} processes act in {groups} group{'' if groups == 1 else 's'} of "
            "environments, and a group is in one of them\n    pin fewer, or have more groups: "
            "task.group_size=auto"
        )
    if profile.executor.publish_s is None and (pins.inference or "inline") != "inline":
        return InfeasibleError(
            f"{text} with {pins}: the task was measured in one process "
            f"(executor={profile.executor.name})\n    measure it with executor=ray"
        )
    if profile.process_bytes > _host_bytes(cluster):
        return InfeasibleError(
            f"{text}: a process takes {bytes_text(profile.process_bytes)}, and its nodes have "
            f"{bytes_text(_host_bytes(cluster))} of host memory (cluster.host_bytes)"
        )
    if pins == ActingPins():
        return InfeasibleError(
            f"{text}: the rows of a step do not fall into {profile.least_groups} or more equal "
            "groups\n    raise algorithm.per_step"
        )
    return InfeasibleError(f"{text} with {pins}\n    leave out a pin")


# --- what is written


def _groups(
    graph: Graph, profile: TaskProfile, layout: ActingLayout, cluster: ClusterSpec | None = None
) -> tuple[GroupPlan, ...]:
    """The groups of a layout; over several nodes of CPUs their devices say on which each is."""
    actors = dict.fromkeys(role for call in profile.loops for role in graph[call].roles_given)
    sizes = {"learner": layout.num_trainers, "acting": layout.num_ranks}
    if layout.inference == "inline":
        sizes = {"all": layout.num_ranks}
    elif layout.inference == "served":
        sizes["policy"] = layout.num_servers
    server = {"served": "policy", "served by the trainer": "learner"}.get(layout.inference)
    spreads = cluster is not None and _spreads(cluster)
    groups: list[GroupPlan] = []
    first = 0
    for name, number in sizes.items():
        served = dict.fromkeys(actors, server) if server and name == "acting" else {}
        devices = tuple(range(first, first + number)) if spreads else ()
        groups.append(GroupPlan(name=name, num_ranks=number, served=served, devices=devices))
        first += number
    return tuple(groups)


def _nodes(graph: Graph, profile: TaskProfile, layout: ActingLayout) -> dict[str, str]:
    if layout.inference == "inline":
        return {}
    return {graph[call].role or call: "acting" for call in profile.loops}


def _written(
    graph: Graph,
    profile: TaskProfile,
    cluster: ClusterSpec,
    ranked: Sequence[Sequence[Tried]],
    search_time_s: float,
    *,
    chooses_groups: bool,
) -> Plan:
    """The plan of the first layout under the first lag, with the best of each other lag."""
    best, *rest = ranked[0]
    layout = best.layout
    prediction = Prediction(
        step_time_s=best.step_time_s,
        lower_bound_s=best.step_time_s,
        search_time_s=search_time_s,
        calibration=profile.source,
        task=profile,
        nodes={
            name: NodePrediction(duration_s=sum(parts.values()), parts_s=parts)
            for name, parts in best.times.parts_s.items()
        },
        runner_up=_runner_up(rest[0], best, cluster.num_cores) if rest else None,
        other_schedules=tuple(
            OtherSchedule(max_lag=first.max_lag, step_time_s=first.step_time_s)
            for first, *_ in ranked[1:]
        ),
    )
    roles = [graph[call].role or "" for call in profile.loops if profile.overlaps]
    rows = math.gcd(*profile.rows.values())
    return Plan(
        groups=_groups(graph, profile, layout, cluster),
        nodes=_nodes(graph, profile, layout),
        role_options={role: {"num_overlapped": layout.num_overlapped} for role in roles},
        group_size=rows // layout.num_groups if chooses_groups else None,
        max_lag=best.max_lag,
        cluster=cluster,
        prediction=prediction,
    )


def _runner_up(second: Tried, best: Tried, cores: int) -> RunnerUp:
    group = max(second.times.busy_s, key=lambda name: second.times.busy_s[name])
    busy_s, computed_s = second.times.busy_s[group], second.times.cpu_s / cores
    if second.step_time_s <= best.step_time_s * (1 + _SAME):
        why = "as fast as the best plan, which has fewer processes or was found first"
    elif computed_s >= busy_s:
        why = (
            f"its {second.layout.num_processes} processes compute {seconds_text(computed_s)} of "
            f"each step on the {cores} cores there are"
        )
    else:
        why = f"its {group} processes are busy {seconds_text(busy_s)} of each step"
    return RunnerUp(description=str(second.layout), step_time_s=second.step_time_s, why=why)
