"""Lower bounds on the time per step, monotone in every duration.

`step_time.py` plays the schedule; here is what no schedule can beat, whatever runs first:

- a group works off all of its calls in every step;
- a chain of waits from a call to the same call d steps later fits into d steps (a critical cycle);
- one step takes its makespan, and `max_lag + 1` steps are in flight at most.

The makespan is bounded as in job shops: every call has a head (what must have happened before it)
and a tail; a group with the calls S needs at least the smallest head of S, all of S one after
another, and the smallest tail of S (Carlier, "The one-machine sequencing problem", 1982). Heads
count the same for the groups that a call's ancestors run on.

Everything is computed for many vectors of durations at once: arrays are calls x vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import islice
from typing import Any

import networkx as nx
import numpy as np

from .allocation import Floats
from .options import CallNode
from .step_time import Wait, waits

MAX_CYCLES = 300  # critical cycles looked at; any subset of them bounds


@dataclass(frozen=True)
class _Chain:
    order: tuple[int, ...]  # the calls
    direct: tuple[tuple[int, ...], ...]  # per call of `order`, what it waits for itself
    # per call of `order`, the sets of two or more calls that it waits for, directly or not, and
    # that share a group
    shared: tuple[tuple[tuple[int, ...], ...], ...]


class StepBound:
    """Bounds of a step whose calls are placed; made once per placement."""

    def __init__(self, calls: Sequence[CallNode], groups: Sequence[int], max_lag: int) -> None:
        self._in_flight = max_lag + 1
        self._members = [
            [i for i, other in enumerate(groups) if other == group]
            for group in dict.fromkeys(groups)
        ]
        found = [wait for wait in waits(calls, groups, max_lag) if wait.call != wait.on]
        # A call runs its steps in order: who waits for a later step of it waits for this one too.
        before = {
            i: {w.on for w in found if w.call == i and w.distance <= 0} for i in range(len(calls))
        }
        after = {i: {j for j in before if i in before[j]} for i in before}
        order = tuple(TopologicalSorter(before).static_order())
        earlier, later = _closed(before, order), _closed(after, order[::-1])
        everything = set(before)
        self._forward = _chain(order, before, earlier, everything, groups)
        self._backward = _chain(order[::-1], after, later, everything, groups)
        self._spans: list[tuple[int, int, int, _Chain]] = []
        self._cycles = np.zeros((0, len(calls)))
        if max_lag:
            for first, last, distance in _repeats(found, earlier):
                between = (later[first] & earlier[last]) | {first, last}
                chain = _chain(order, before, earlier, between, groups)
                self._spans.append((first, last, distance, chain))
            self._cycles = _cycles(found, after, max_lag)

    def __call__(self, durations_s: Floats) -> Floats:
        bound = np.zeros(durations_s.shape[1])
        for members in self._members:
            np.maximum(bound, durations_s[members].sum(0), out=bound)
        np.maximum(bound, self._makespan_s(durations_s) / self._in_flight, out=bound)
        for first, last, distance, chain in self._spans:
            heads = _heads(chain, durations_s, start=first)
            np.maximum(bound, (heads[last] + durations_s[last]) / distance, out=bound)
        if len(self._cycles):
            np.maximum(bound, (self._cycles @ durations_s).max(0), out=bound)
        return bound

    def _makespan_s(self, durations_s: Floats) -> Floats:
        heads = _heads(self._forward, durations_s)
        tails = _heads(self._backward, durations_s)
        longest = (heads + durations_s + tails).max(0)
        for members in self._members:
            if len(members) > 1:
                one = _one_machine(heads[members], durations_s[members], tails[members])
                np.maximum(longest, one, out=longest)
        return longest


def _closed(before: Mapping[int, set[int]], order: Sequence[int]) -> dict[int, set[int]]:
    closed: dict[int, set[int]] = {}
    for call in order:
        closed[call] = before[call].union(*(closed[other] for other in before[call]))
    return closed


def _chain(
    order: Sequence[int],
    before: Mapping[int, set[int]],
    earlier: Mapping[int, set[int]],
    part: set[int],
    groups: Sequence[int],
) -> _Chain:
    calls = tuple(call for call in order if call in part)
    shared: list[tuple[tuple[int, ...], ...]] = []
    for call in calls:
        sets: dict[int, list[int]] = {}
        for other in sorted(earlier[call] & part):
            sets.setdefault(groups[other], []).append(other)
        shared.append(tuple(tuple(members) for members in sets.values() if len(members) > 1))
    return _Chain(calls, tuple(tuple(sorted(before[c] & part)) for c in calls), tuple(shared))


def _repeats(
    found: Sequence[Wait], earlier: Mapping[int, set[int]]
) -> Iterator[tuple[int, int, int]]:
    nearest: dict[tuple[int, int], int] = {}
    for wait in found:
        key = (wait.call, wait.on)
        if wait.distance > 0 and wait.call in earlier[wait.on]:
            nearest[key] = min(nearest.get(key, wait.distance), wait.distance)
    for (first, last), distance in nearest.items():
        yield first, last, distance


def _cycles(found: Sequence[Wait], after: Mapping[int, set[int]], max_lag: int) -> Floats:
    distances: dict[tuple[int, int], int] = {}
    for wait in found:
        if wait.distance == max_lag + 1 and after[wait.on]:
            continue  # A step is complete when its last calls are.
        key = (wait.on, wait.call)
        distances[key] = min(distances.get(key, wait.distance), wait.distance)
    kept: list[tuple[set[int], int]] = []
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_edges_from(distances)
    for cycle in islice(nx.simple_cycles(graph), MAX_CYCLES):
        pairs = zip(cycle, [*cycle[1:], cycle[0]], strict=True)
        calls, steps = set(cycle), sum(distances[pair] for pair in pairs)
        assert steps > 0, "calls wait for each other in a circle"
        # A cycle through more calls in as few steps bounds at least as much.
        if not any(calls <= other and steps >= fewer for other, fewer in kept):
            kept = [(o, n) for o, n in kept if not (o <= calls and n >= steps)]
            kept.append((calls, steps))
    rows = np.zeros((len(kept), len(after)))
    for row, (calls, steps) in zip(rows, kept, strict=True):
        row[list(calls)] = 1.0 / steps
    return rows


def _heads(chain: _Chain, durations_s: Floats, start: int | None = None) -> Floats:
    heads = np.zeros_like(durations_s)
    for call, direct, shared in zip(chain.order, chain.direct, chain.shared, strict=True):
        if call == start:
            continue
        head: Any = heads[call]
        for before in direct:
            np.maximum(head, heads[before] + durations_s[before], out=head)
        for members in shared:
            first, work = heads[list(members)], durations_s[list(members)]
            later = first[None, :, :] >= first[:, None, :]
            np.maximum(head, (first + (later * work[None]).sum(1)).max(0), out=head)
    return heads


def _one_machine(heads: Floats, work: Floats, tails: Floats) -> Floats:
    later = heads[None, :, :] >= heads[:, None, :]
    longer = tails[None, :, :] >= tails[:, None, :]
    both = later[:, None] & longer[None, :]
    needed = heads[:, None] + (both * work[None, None]).sum(2) + tails[None, :]
    # Pairs of a head and a tail to which no call belongs bound nothing.
    needed[~both.any(2)] = 0.0
    return needed.max((0, 1))
