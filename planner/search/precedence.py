"""Which call of which step waits for which: the scheduler's rules, written as distances.

`Wait(call, on, distance)` says that `call` of step s starts after `on` of step s - distance has
ended; a negative distance is a later step. The rules are those of `weight_versions` in
`dataflow/scheduler` for a group that runs one call at a time and weights that move in no time:

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
    """What a call reads of its role: the version of `offset` trainings into step s - `lag`."""

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
    """All waits of a step."""
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
