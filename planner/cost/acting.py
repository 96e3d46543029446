"""Seconds of a step that acts in environments or games, in any placement of acting.

A rollout is a loop of `turns`: step a group, ask the actor. One of A ranks has its share of G
groups and turns k of them at once (`overlapped_groups.py`), and all ranks together cannot compute
more than the cores there are:

    rollout = max(turns * round_s(k, groups of a rank), computing of all ranks / cores)

Served, every turn also waits for a request, and S processes answer all of them:

    rollout >= turns * G * (the actor's answer + the server's share of a request) / S

The other calls are as they were measured, on the ranks that train; each costs what its executor
adds to a call, once for each part of its rows that a rank is given. A step takes what the engine's
scheduler makes of these times, and never less than its cores need for all that is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TypeAlias

from ...dataflow.graph.graph import Graph
from ...dataflow.kinds import NodeKind
from ..inputs.task_profile import Inference, TaskProfile
from .overlapped_groups import LoopTimes, round_s

NOT_WORK = ("calls", "weight_move")  # parts of a call's seconds that no rank spends on it


@dataclass(frozen=True, order=True)
class ActingLayout:
    """A way to place a step's acting."""

    inference: Inference
    num_ranks: int  # processes that act; with `inline` they train as well
    num_groups: int  # groups that a step's environments or games fall into
    num_overlapped: int  # of its groups, those that a process steps at the same time
    num_trainers: int = 1  # processes that train and do not act; 0 with `inline`
    num_servers: int = 0  # processes that only answer, with `served`

    @property
    def num_processes(self) -> int:
        return self.num_ranks + self.num_trainers + self.num_servers

    def __str__(self) -> str:
        ranks = "process" if self.num_ranks == 1 else "processes"
        groups = "group" if self.num_groups == 1 else "groups"
        at_once = f", {self.num_overlapped} at once in each" if self.num_overlapped > 1 else ""
        trains = f", {self.num_trainers} that train" if self.num_trainers > 1 else ""
        answers = f", {self.num_servers} that answer" if self.num_servers > 1 else ""
        return (
            f"{self.inference}, {self.num_ranks} acting {ranks}, {self.num_groups} {groups} of "
            f"environments{at_once}{trains}{answers}"
        )


@dataclass(frozen=True)
class ActingTimes:
    """Predicted times of a step under one layout."""

    parts_s: Mapping[str, Mapping[str, float]]  # call -> part -> elapsed seconds
    cpu_s: float  # seconds of cores that a step computes, of all processes together
    busy_s: Mapping[str, float]  # "acting" and "learner" -> seconds of each step; one if inline

    @property
    def durations_s(self) -> dict[str, float]:
        return {name: sum(parts.values()) for name, parts in self.parts_s.items()}


def acting_times(
    graph: Graph,
    profile: TaskProfile,
    layout: ActingLayout,
    cores: int,
    known: dict[tuple[object, ...], _Cost] | None = None,
) -> ActingTimes:
    """Predict a layout; `known` keeps what layouts of the same step have in common."""
    known = {} if known is None else known
    parts: dict[str, Mapping[str, float]] = {}
    busy = dict.fromkeys(("acting", "learner"), 0.0)
    cpu_s, apart = 0.0, layout.inference != "inline"
    for node in graph.nodes:
        if node.kind is NodeKind.SOURCE:
            continue
        acts = node.name in profile.loops
        # Each part of the rows that acting ranks hand over is a call of its own.
        num_parts = layout.num_ranks if apart and node.scope != "batch" else 1
        trainers = layout.num_trainers if apart else layout.num_ranks
        key = (node.name, layout) if acts else (node.name, num_parts, trainers)
        if acts and layout.inference != "served by the trainer":
            key = (node.name, replace(layout, num_trainers=1))
        if key not in known:
            known[key] = (
                rollout_parts(profile, node.name, layout, cores)
                if acts
                else _call_parts(profile, node.name, num_parts, trainers)
            )
        parts[node.name], computed_s = known[key]
        where = "acting" if acts and apart else "learner"
        busy[where] += sum(parts[node.name].values())
        cpu_s += computed_s
    return ActingTimes(parts, cpu_s, {name: s for name, s in busy.items() if s or apart})


_Cost: TypeAlias = tuple[Mapping[str, float], float]  # parts of elapsed seconds; seconds of cores


def _call_parts(profile: TaskProfile, call: str, num_parts: int, trainers: int) -> _Cost:
    work_s = profile.calls[call].on(trainers)
    found = {"work": work_s, "calls": -(-num_parts // trainers) * profile.executor.call_s}
    computed_s = work_s * trainers + num_parts * profile.executor.call_s
    return {name: seconds for name, seconds in found.items() if seconds}, computed_s


def rollout_parts(profile: TaskProfile, call: str, layout: ActingLayout, cores: int) -> _Cost:
    """Parts of the elapsed seconds of a rollout, and the seconds of cores that it computes."""
    executor, rows = profile.executor, math.gcd(*profile.rows.values())
    loop = profile.loop(call, math.ceil(rows / layout.num_groups))
    num_groups = layout.num_groups * profile.rows[call] // rows  # all calls' are of one size
    served = layout.inference.startswith("served")
    asks_s = executor.request_s if served else 0.0
    # The asking side computes about half of a request, and holds the interpreter meanwhile.
    asks_cpu_s = executor.request_cpu_s / 2.0 if served else 0.0
    alone = LoopTimes(
        step_s=loop.step_s,
        step_cpu_s=loop.step_cpu_s,
        ask_s=loop.ask_s + asks_s,
        ask_cpu_s=asks_cpu_s if served else loop.ask_cpu_s,
    )
    groups = math.ceil(num_groups / layout.num_ranks)
    scale = profile.corrections.get(call, 1.0)
    turning_s = scale * loop.turns * round_s(alone, layout.num_overlapped, groups)
    turns = loop.turns * num_groups
    per_turn_s = loop.step_cpu_s + loop.other_cpu_s + loop.ask_cpu_s
    per_turn_s += executor.request_cpu_s if served else 0.0
    computed_s = scale * turns * per_turn_s
    answering = layout.num_servers or layout.num_trainers
    answering_s = scale * turns * (loop.ask_cpu_s + asks_cpu_s) / answering if served else 0.0
    # Blom's approximation of the largest of n standard normal numbers, for the slowest of n ranks
    slowest = NormalDist().inv_cdf((layout.num_ranks - 0.375) / (layout.num_ranks + 0.25))
    spread_s = scale * slowest * loop.spread_s * math.sqrt(loop.turns * groups)
    rolled_s = max(turning_s + spread_s, computed_s / cores, answering_s)
    shares = {"environments": loop.step_s, "actor": loop.ask_s, "requests": asks_s}
    whole = sum(shares.values()) or 1.0
    parts = {name: rolled_s * share / whole for name, share in shares.items()}
    parts["calls"] = executor.call_s
    if layout.inference in ("copied", "served"):
        parts["weight_move"] = executor.publish_s or 0.0
    parts = {name: seconds for name, seconds in parts.items() if seconds}
    return parts, computed_s + executor.call_s * layout.num_ranks
