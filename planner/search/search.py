"""Search for the best placement: an exact branch and bound over groups, devices and options.

minimize    seconds per step, as the scheduler will run it (`step_time.py`)
over        partitions of the call groups into groups,
            devices for every group: whole nodes, or a part of one; every device used
            (`allocation.py`),
            an option for every call group (`choices.py`)
subject to  per group: all its resident bytes + the largest transient of a call <= memory.

Every partition starts as one box of allocations. The box of least bound is split first; what cannot
beat the second best plan known is dropped, so the runner-up is exact too. What is dropped or still
open when the search ends says how good a plan could be at most. Ties go to the plan found first,
and what is found first does not depend on the clock.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from ...dataflow.errors import PlanError
from ..inputs.cluster import ClusterSpec
from .allocation import Index, Space
from .choices import Choices
from .options import (
    Assignment,
    CallNode,
    GroupAssignment,
    OptionTable,
    Partition,
    SearchResult,
    partitions,
)
from .partition_search import Branch, Found, fair_shares, improved, plunge
from .pins import Pins
from .shortfall import explain_infeasible

_SEEDS = 8
"""Partitions from which a plan is built and improved before the search begins."""

_SAME = 1e-9
"""Times that differ by a smaller share are equal: they were summed in another order."""

_AT_ONCE = 512
"""Boxes looked at together; more cost less each, fewer are looked at in vain."""


class _Late(Exception):
    """The deadline has passed."""


class _Clock:
    def __init__(self, now_s: Callable[[], float], deadline_s: float | None) -> None:
        self._now_s, self._began_s = now_s, now_s()
        self._deadline_s = inf if deadline_s is None else deadline_s

    @property
    def elapsed_s(self) -> float:
        return self._now_s() - self._began_s

    def check(self) -> None:
        if self.elapsed_s > self._deadline_s:
            raise _Late


def search(
    calls: Sequence[CallNode],
    table: OptionTable,
    cluster: ClusterSpec,
    *,
    max_lag: int | tuple[int, ...],
    pins: Pins | None = None,
    deadline_s: float | None = None,
    now_s: Callable[[], float] = time.perf_counter,
) -> SearchResult:
    """The best assignment of a step's calls to a cluster.

    Args:
        calls: In program order.
        table: The ways in which call groups can run.
        cluster: The devices.
        max_lag: Steps that rollouts may be behind, or several to choose from.
        pins: What must be so.
        deadline_s: Seconds after which the best plan known is returned with its gap; shared out
            among the schedules.
        now_s: The clock.

    Raises:
        InfeasibleError: If no assignment is feasible, saying what lacks how much.
        PlanError: If the deadline passes before any is known; or if an argument makes no sense.
    """
    lags = (max_lag,) if isinstance(max_lag, int) else tuple(dict.fromkeys(max_lag))
    pins = pins or Pins()
    if not lags or min(lags) < 0:
        raise PlanError(
            f"max_lag is {max_lag}; expected a number of steps, 0 or more, or several of them"
        )
    if not calls:
        raise PlanError("there is nothing to place: the step has no call of a model")
    if deadline_s is not None and not deadline_s > 0:
        raise PlanError(f"deadline_s is {deadline_s}; expected a positive number of seconds")
    pins.check(calls, cluster)
    clock = _Clock(now_s, None)
    space = Space(cluster)
    choices = {
        lagged: Choices(calls, table, space, pins, lagged=lagged)
        for lagged in sorted({lag > 0 for lag in lags})
    }
    results: list[SearchResult] = []
    seeds: list[Found] = []
    for left, lag in zip(range(len(lags), 0, -1), lags, strict=True):
        # What a schedule leaves of its time goes to those after it.
        share_s = None if deadline_s is None else max(0.0, deadline_s - clock.elapsed_s) / left
        run = _Run(choices[lag > 0], lag, _Clock(now_s, share_s))
        results.append(run.result(seeds))
        # A good plan for one lag is mostly good for the next, and prunes it from the start.
        seeds = run.known
    least_s = min(result.step_time_s for result in results) * (1 + _SAME)
    best = next(result for result in results if result.step_time_s <= least_s)
    others = sorted((r for r in results if r is not best), key=lambda r: r.best.max_lag)
    return replace(
        best,
        num_asked=sum(of.num_asked for of in choices.values()),
        search_time_s=clock.elapsed_s,
        other_lags=tuple(others),
    )


class _Run:
    """The search under one schedule.

    Attributes:
        known: The best plan and the best other one, as far as they are known.
    """

    def __init__(self, choices: Choices, max_lag: int, clock: _Clock) -> None:
        self._choices, self._max_lag, self._clock = choices, max_lag, clock
        self._branches: list[Branch] = []
        self._queue: list[tuple[float, int]] = []
        self._proven_s = 0.0
        self.known: list[Found] = []

    @property
    def _below_s(self) -> float:
        """Only plans that take less are of interest; boxes with another bound are dropped."""
        return self.known[1].step_time_s if len(self.known) > 1 else inf

    @property
    def _promising_below_s(self) -> float:
        """Plans that take less may be worth improving."""
        return 2.0 * self.known[0].step_time_s if self.known else inf

    def result(self, seeds: Sequence[Found]) -> SearchResult:
        late = False
        try:
            self._begin(seeds)
            while self._step():
                self._clock.check()
        except _Late:
            late = True
        if not self.known:
            if late:
                raise PlanError(
                    f"no plan was found in {self._clock.elapsed_s:.3g} s; give deadline_s more time"
                )
            raise explain_infeasible(self._choices, self._partitions())
        best, *others = (self._assignment(found) for found in self.known)
        dropped_s = min(branch.dropped_s for branch in self._branches)
        return SearchResult(
            best,
            # What was dropped, or cut short, may hold plans that are better than the one returned.
            min(self._proven_s, dropped_s, best.step_time_s),
            others[0] if others else None,
            self._choices.num_asked,
            self._clock.elapsed_s,
            late,
            sum(branch.num_cut_short for branch in self._branches),
        )

    def _partitions(self) -> list[Partition]:
        pins = self._choices.pins
        found = list(
            partitions(list(self._choices.calls_of), pins.all_together(), pins.all_apart())
        )
        assert found, "pins that contradict each other were not refused"
        return found

    def _begin(self, seeds: Sequence[Found]) -> None:
        self._branches = [Branch(self._choices, p, self._max_lag) for p in self._partitions()]
        for branch in self._branches:
            for seed in seeds:
                if seed.partition == branch.partition:
                    self._evaluate(branch, seed.allocation)
        self._share_fairly()
        self._choices.load(self._clock.check)
        for k, branch in enumerate(self._branches):
            branch.add(branch.root())
            self._push(k)
        self._proven_s = min((least_s for least_s, _ in self._queue), default=inf)
        for _, k in heapq.nsmallest(_SEEDS, self._queue):
            self._clock.check()
            branch = self._branches[k]
            allocation = plunge(branch)
            found = branch.evaluate(allocation, self._promising_below_s) if allocation else None
            if found is not None:
                self._note(found)
                for better in improved(branch, found, self._clock.check):
                    self._note(better)

    def _share_fairly(self) -> None:
        """Everything on all devices, then every partition with devices by what its calls take.

        It asks little of the table, so that there is something to return at an early deadline.
        """
        space = self._choices.space
        whole = tuple(size - 1 for size in space.shape)
        work = {
            call_group: min((sum(option.durations_s) for option in options), default=0.0)
            for call_group in self._choices.calls_of
            for options in [self._choices.options((call_group, ()), whole)]
        }
        for branch in self._branches:
            shares = [sum(work[call_group] for call_group in group) for group in branch.partition]
            allocation = fair_shares(space, shares)
            if allocation is not None:
                found = branch.evaluate(allocation, self._promising_below_s)
                if found is not None:
                    self._note(found)
            if self.known:
                self._clock.check()

    def _step(self) -> bool:
        """Look at the most promising boxes of one partition; False if none is left.

        The least bound of all open boxes is what is proven, also while they are being looked at.
        """
        self._proven_s = self._queue[0][0] if self._queue else inf
        if self._proven_s >= self._below_s:
            return False
        _, k = heapq.heappop(self._queue)
        branch = self._branches[k]
        boxes = branch.take(_AT_ONCE, self._below_s)
        point = boxes.is_point
        for row in point.nonzero()[0]:
            self._clock.check()
            # A plan found in another row of this very batch may have ruled it out meanwhile.
            if boxes.bound[row] < self._below_s:
                self._evaluate(branch, boxes.point(int(row)), last=True)
            else:
                branch.dropped_s = min(branch.dropped_s, float(boxes.bound[row]))
        branch.add(branch.split(boxes.where(~point)))
        self._push(k)
        return True

    def _push(self, k: int) -> None:
        if self._branches[k].least_s < inf:
            heapq.heappush(self._queue, (self._branches[k].least_s, k))

    def _evaluate(
        self, branch: Branch, allocation: tuple[Index, ...], *, last: bool = False
    ) -> None:
        found = branch.evaluate(allocation, self._below_s, last=last)
        if found is not None:
            self._note(found)

    def _note(self, found: Found) -> None:
        """Keep the best two plans that differ in groups or device counts."""
        same = [
            known
            for known in self.known
            if (known.partition, known.allocation) == (found.partition, found.allocation)
        ]
        if not same:
            # Sorting is stable: of equals the plan found first stays ahead.
            self.known = sorted([*self.known, found], key=lambda f: f.step_time_s)[:2]

    def _assignment(self, found: Found) -> Assignment:
        space = self._choices.space
        fixed = self._choices.pins.fixed(found.partition)
        devices = space.devices(found.allocation, fixed)
        groups = tuple(
            GroupAssignment(
                names,
                space.mesh(index),
                ids,
                {name: found.options[name] for name in names if name in found.options},
            )
            for names, index, ids in zip(found.partition, found.allocation, devices, strict=True)
        )
        return Assignment(groups, self._max_lag, found.step_time_s)
