"""The planner's objective: seconds per step, as the scheduler will run it.

Each group runs one call at a time, without interruption, and never idles while a call is ready;
among ready calls the oldest step goes first, then program order. The long-run time of a step
follows by playing this until it repeats.

It is not monotone: as with any list schedule a call that gets faster can delay another one. Lower
bounds must come from `bounds.py`, not from here.

What a call waits for are the scheduler's rules, written as distances: `Wait(call, on, distance)`
says that `call` of step s starts after `on` of step s - distance has ended; a negative distance is
a later step. The rules are those of `weight_versions` in `dataflow/scheduler` for a group that runs
one call at a time and weights that move in no time:

- a call waits for what it takes, in its own step;
- a step's first calls wait until the step `max_lag + 1` before is complete;
- a reader waits for the training that makes its version, a training for the one before;
- a training waits until everybody who reads its role in its own group has read the version that it
  overwrites, and a copy in another group moves on when everybody there has read the older one.

Every call runs its steps in order, so counting how often each call has ended decides all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from .options import CallNode


@dataclass(frozen=True, slots=True)
class Wait:
    """`call` of step s waits for `on` of step s - distance."""

    call: int  # index of the call that waits
    on: int  # index of the call it waits for
    distance: int  # in steps
    # whether weights move to another group in between. What else becomes ready when the training
    # ends is then served first.
    published: bool = False


@dataclass(frozen=True, slots=True)
class Read:
    """A call's read of its role: the version of `offset` trainings into step s - `lag`."""

    offset: int
    lag: int


def reads_of(calls: Sequence[CallNode], max_lag: int) -> tuple[Read | None, ...]:
    """Per call the version it reads, a training's own included; None for a role never trained."""
    trained = {call.role for call in calls if call.trains}
    made = dict.fromkeys(trained, 0)
    ahead: dict[str, bool] = {}
    reads: list[Read | None] = []
    for call in calls:
        exact = call.trains or (call.role in trained and not call.reads_older)
        ahead[call.name] = not exact and all(ahead[name] for name in call.after)
        if call.role not in trained:
            reads.append(None)
            continue
        reads.append(Read(made[call.role], max_lag if ahead[call.name] else 0))
        made[call.role] += call.trains
    return tuple(reads)


def waits(calls: Sequence[CallNode], groups: Sequence[int], max_lag: int) -> tuple[Wait, ...]:
    index = {call.name: i for i, call in enumerate(calls)}
    found: list[Wait] = []
    for i, call in enumerate(calls):
        found += [Wait(i, index[name], 0) for name in call.after]
        if not call.after:
            found += [Wait(i, j, max_lag + 1) for j in range(len(calls))]
    reads = reads_of(calls, max_lag)
    for role in dict.fromkeys(call.role for call in calls if call.trains):
        found += _waits_of_role(calls, groups, reads, role)
    return tuple(found)


def _waits_of_role(
    calls: Sequence[CallNode], groups: Sequence[int], reads: Sequence[Read | None], role: str
) -> list[Wait]:
    trains = [i for i, call in enumerate(calls) if call.role == role and call.trains]
    home = groups[trains[0]]
    readers = [
        (i, read)
        for i, (call, read) in enumerate(zip(calls, reads, strict=True))
        if call.role == role and not call.trains and read is not None
    ]
    found = [Wait(i, trains[q - 1], 0 if q else 1) for q, i in enumerate(trains)]
    for i, read in readers:
        distance = read.lag if read.offset else read.lag + 1
        found.append(Wait(i, trains[read.offset - 1], distance, groups[i] != home))
        if groups[i] == home:
            found += [
                Wait(train, i, -read.lag if read.offset <= q else 1 - read.lag)
                for q, train in enumerate(trains)
            ]
            continue
        for j, other in readers:
            if groups[j] == groups[i]:
                # The newest step in which `other` reads less than `read` does in step s.
                behind = -((other.offset - read.offset) // len(trains))
                found.append(Wait(i, j, read.lag - other.lag - behind + 1))
    return found


# steps after which a schedule that has not repeated is averaged over its second half
MAX_STEPS = 400

_SAME = 1e-9  # two states are equal if no remaining time differs by more than this share of a step


@dataclass(frozen=True, slots=True)
class Cycle:
    """Period of the schedule: `steps` steps in `seconds`, for the first time after `after`."""

    steps: int
    seconds: float
    after: int


class StepTimer:
    """Plays a step's calls on their groups; made once per placement, used for many durations."""

    def __init__(self, calls: Sequence[CallNode], groups: Sequence[int], max_lag: int) -> None:
        self._num_calls, self._max_lag = len(calls), max_lag
        numbers = {group: k for k, group in enumerate(dict.fromkeys(groups))}
        self._group = [numbers[group] for group in groups]
        self._members = [
            [i for i in range(len(calls)) if self._group[i] == k] for k in range(len(numbers))
        ]
        found = waits(calls, groups, max_lag)
        # A training whose weights move is counted twice: when it ends, and when they have moved.
        moved = list(dict.fromkeys(wait.on for wait in found if wait.published))
        self._moved: list[int] = [
            len(calls) + moved.index(i) if i in moved else -1 for i in range(len(calls))
        ]
        self._num_counts = len(calls) + len(moved)
        needs: list[dict[int, int]] = [{} for _ in calls]
        for wait in found:
            on = self._moved[wait.on] if wait.published else wait.on
            needs[wait.call][on] = min(needs[wait.call].get(on, wait.distance), wait.distance)
        self._needs = [tuple(need.items()) for need in needs]
        first = [i for i, call in enumerate(calls) if not call.after]
        # With max_lag=0 steps do not overlap, and all steps are alike unless weights that arrive
        # at the start of a step find other first calls of their group begun.
        moves = {wait.call for wait in found if wait.published}
        self._alike = max_lag == 0 and not any(
            i in moves and any(self._group[i] == self._group[j] for j in first if j != i)
            for i in first
        )

    def seconds(self, durations_s: Sequence[float]) -> float:
        cycle = self.cycle(durations_s)
        return cycle.seconds / cycle.steps

    def cycle(self, durations_s: Sequence[float]) -> Cycle:
        play = _Play(self._num_calls, self._num_counts, len(self._members))
        same_s = _SAME * sum(durations_s)
        seen: list[tuple[float, tuple[int, ...], list[float]]] = []
        self._start(play, durations_s)
        while True:
            ended = play.finish_next()
            if min(play.ended[: self._num_calls]) > play.complete:
                play.complete += 1
                if self._alike:
                    return Cycle(1, play.now_s, 0)
                state = (play.now_s, play.state(ended), play.remaining_s())
                cycle = _repeats(seen, state, same_s)
                if cycle is not None:
                    return cycle
                seen.append(state)
            self._start(play, durations_s)
            if self._moved[ended] >= 0:
                play.ended[self._moved[ended]] += 1
                self._start(play, durations_s)

    def _start(self, play: _Play, durations_s: Sequence[float]) -> None:
        started, ended = play.started, play.ended
        for group, members in enumerate(self._members):
            if play.running[group] >= 0:
                continue
            best, best_step = -1, MAX_STEPS * 2
            for i in members:
                step = started[i]
                if step < best_step:
                    for on, distance in self._needs[i]:
                        if ended[on] <= step - distance:
                            break
                    else:
                        best, best_step = i, step
            if best >= 0:
                started[best] += 1
                play.running[group] = best
                play.ends_s[group] = play.now_s + durations_s[best]


class _Play:
    __slots__ = ("complete", "ended", "ends_s", "now_s", "running", "started")

    def __init__(self, num_calls: int, num_counts: int, num_groups: int) -> None:
        self.now_s, self.complete = 0.0, 0
        self.started, self.ended = [0] * num_calls, [0] * num_counts
        self.running, self.ends_s = [-1] * num_groups, [inf] * num_groups

    def finish_next(self) -> int:
        end_s = min(self.ends_s)
        assert end_s < inf, "no call can start: they wait for each other in a circle"
        group = self.ends_s.index(end_s)
        self.now_s = end_s
        call = self.running[group]
        self.running[group], self.ends_s[group] = -1, inf
        self.ended[call] += 1
        return call

    def state(self, ended: int) -> tuple[int, ...]:
        counts = [count - self.complete for count in (*self.started, *self.ended)]
        return (ended, *counts, *self.running)

    def remaining_s(self) -> list[float]:
        return [end_s - self.now_s for end_s in self.ends_s if end_s < inf]


def _repeats(
    seen: list[tuple[float, tuple[int, ...], list[float]]],
    state: tuple[float, tuple[int, ...], list[float]],
    same_s: float,
) -> Cycle | None:
    now_s, counts, remaining_s = state
    for k in range(len(seen) - 1, -1, -1):
        then_s, other_counts, other_s = seen[k]
        if other_counts == counts and all(
            abs(a - b) <= same_s for a, b in zip(remaining_s, other_s, strict=True)
        ):
            return Cycle(len(seen) - k, now_s - then_s, k)
    if len(seen) < MAX_STEPS:
        return None
    half = MAX_STEPS // 2
    return Cycle(MAX_STEPS - half, now_s - seen[half][0], half)
