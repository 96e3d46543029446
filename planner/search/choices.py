"""The options of every call group on every mesh, and what several together make of them.

Memory binds the call groups of a group together: the resident bytes of all and the largest
transient of any call must fit. A group's *front* on a mesh is every choice of one option per call
group that fits and that no other choice that fits equals or beats in every duration. The search
looks at those alone: a list schedule can be faster with a call slowed down (3 of 3,785 random steps
were, all with max_lag=1), but such a plan hangs on a coincidence of times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .allocation import Floats, Index, RangeMin, Space
from .options import CallNode, Option, OptionTable
from .pins import Pins

# a call group, and those of its group that read the weights that it trains
Head: TypeAlias = tuple[str, tuple[str, ...]]

# combinations of a group's options that are looked at; beyond, the search keeps a gap
MOST_COMBINED = 20_000


@dataclass(frozen=True, slots=True)
class CallGroupOption:
    durations_s: tuple[float, ...]  # seconds of the call group's calls, in program order
    resident_bytes: int  # per device, always
    transient_bytes: int  # per device, in the hungriest call
    option: Option  # the option, with the calls beside it if there are

    def covers(self, other: CallGroupOption) -> bool:
        return (
            self.resident_bytes <= other.resident_bytes
            and self.transient_bytes <= other.transient_bytes
            and all(a <= b for a, b in zip(self.durations_s, other.durations_s, strict=True))
        )


def work_s(options: Sequence[CallGroupOption]) -> float:
    return sum(sum(option.durations_s) for option in options)


def together_fastest(
    pools: Sequence[Sequence[CallGroupOption]], memory_bytes: int
) -> tuple[CallGroupOption, ...] | None:
    """Every call group's first option, if it is the fastest in every call and they all fit."""
    first = tuple(pool[0] for pool in pools)
    needed = sum(o.resident_bytes for o in first) + max(o.transient_bytes for o in first)
    if needed > memory_bytes:
        return None
    for option, pool in zip(first, pools, strict=True):
        for other in pool[1:]:
            if any(b < a for a, b in zip(option.durations_s, other.durations_s, strict=True)):
                return None
    return first


@dataclass(frozen=True)
class _Least:
    resident_bytes: tuple[int, ...]
    transient_bytes: tuple[int, ...]
    work_s: tuple[float, ...]

    @staticmethod
    def of(pools: Sequence[Sequence[CallGroupOption]]) -> _Least:
        resident, transient, seconds = [0], [0], [0.0]
        for pool in reversed(pools):
            resident.append(resident[-1] + min(o.resident_bytes for o in pool))
            transient.append(max(transient[-1], min(o.transient_bytes for o in pool)))
            seconds.append(seconds[-1] + min(sum(o.durations_s) for o in pool))
        return _Least(tuple(resident), tuple(transient), tuple(seconds))


def fitting(
    pools: Sequence[Sequence[CallGroupOption]], memory_bytes: int, below_s: float
) -> tuple[list[tuple[CallGroupOption, ...]], bool]:
    """One option per call group such that all fit and take less than `below_s` together."""
    least = _Least.of(pools)
    found: list[tuple[CallGroupOption, ...]] = []

    def extend(
        chosen: tuple[CallGroupOption, ...], resident: int, transient: int, sum_s: float
    ) -> bool:
        if len(chosen) == len(pools):
            found.append(chosen)
            return len(found) < MOST_COMBINED
        left = len(pools) - len(chosen) - 1
        for option in pools[len(chosen)]:
            held = resident + option.resident_bytes
            most = max(transient, option.transient_bytes)
            total_s = sum_s + sum(option.durations_s)
            needed = held + least.resident_bytes[left] + max(most, least.transient_bytes[left])
            # Even with the least of all that is left, nothing that begins like this is of use.
            if needed > memory_bytes or total_s + least.work_s[left] >= below_s:
                continue
            if not extend((*chosen, option), held, most, total_s):
                return False
        return True

    complete = extend((), 0, 0, 0.0)
    return found, complete


def least_work(
    pools: Sequence[Sequence[CallGroupOption]], memory_bytes: int, below_s: float
) -> tuple[CallGroupOption, ...] | None:
    """The combination that fits and takes least, if that is less than `below_s`.

    One call group after another, keeping the beginnings that no other one beats in time, resident
    and transient bytes: what comes after does not care for more.
    """
    least = _Least.of(pools)
    begun: list[tuple[CallGroupOption, ...]] = [()]
    totals = np.zeros((1, 3))
    for count, pool in enumerate(pools, 1):
        left = len(pools) - count
        added = np.array([(sum(o.durations_s), o.resident_bytes, o.transient_bytes) for o in pool])
        longer = totals[:, None, :] + added[None, :, :]
        longer[:, :, 2] = np.maximum(totals[:, None, 2], added[None, :, 2])
        needed = longer[:, :, 1] + least.resident_bytes[left]
        needed = needed + np.maximum(longer[:, :, 2], least.transient_bytes[left])
        can = (needed <= memory_bytes) & (longer[:, :, 0] + least.work_s[left] < below_s)
        first, last = can.nonzero()
        totals = longer[first, last]
        kept = _unbeaten(totals)
        totals = totals[kept]
        begun = [(*begun[first[k]], pool[last[k]]) for k in kept]
    return begun[int(totals[:, 0].argmin())] if begun else None


def unbeaten(combined: Sequence[tuple[CallGroupOption, ...]]) -> list[tuple[CallGroupOption, ...]]:
    """Those that no other one equals or beats in every call, the least work first."""
    if len(combined) < 2:
        return list(combined)
    rows = np.array([[s for option in row for s in option.durations_s] for row in combined])
    return [combined[k] for k in _unbeaten(rows)]


def _unbeaten(rows: NDArray[np.float64]) -> list[int]:
    # By their sums: what comes later cannot beat what is kept.
    numbers = np.lexsort((*rows.T[::-1], rows.sum(1)))
    left, kept = rows[numbers], list[int]()
    while len(numbers):
        kept.append(int(numbers[0]))
        more = (left < left[0]).any(1)
        left, numbers = left[more], numbers[more]
    return kept


@dataclass(frozen=True, slots=True)
class Choice:
    durations_s: tuple[float, ...]  # seconds of the group's calls, in program order
    options: tuple[Option, ...]  # of each of the group's heads


@dataclass(frozen=True)
class Front:
    choices: tuple[Choice, ...]  # none of them is beaten in every duration
    complete: bool = True  # whether they are all; otherwise there were too many to look at


@dataclass(frozen=True)
class _Arrays:
    durations_s: Floats
    resident_bytes: Floats
    transient_bytes: Floats


def sources_of(calls: Sequence[CallNode]) -> dict[str, str]:
    """Call group -> the one that trains its weights, where its role is trained by another."""
    trainers = {call.role: call.call_group for call in calls if call.trains}
    return {
        call.call_group: trainers[call.role]
        for call in calls
        if call.role in trainers and trainers[call.role] != call.call_group
    }


class Choices:
    def __init__(
        self,
        calls: Sequence[CallNode],
        table: OptionTable,
        space: Space,
        pins: Pins,
        *,
        lagged: bool = False,
    ) -> None:
        self.calls, self.space, self.pins = tuple(calls), space, pins
        self._lagged = lagged
        self.sources = sources_of(calls)
        self.num_asked = 0
        self._table = table
        self.calls_of = {
            call_group: tuple(i for i, call in enumerate(calls) if call.call_group == call_group)
            for call_group in dict.fromkeys(call.call_group for call in calls)
        }
        self.indices: tuple[Index, ...] = tuple(
            tuple(int(k) for k in index) for index in np.argwhere(space.legal)
        )
        self.memory_bytes = {i: space.mesh(i).memory_bytes for i in self.indices}
        self._options: dict[tuple[Head, Index], tuple[CallGroupOption, ...]] = {}
        self._arrays: dict[Head, _Arrays] = {}
        self._groups: dict[tuple[str, ...], GroupChoices] = {}

    def heads(self, group: Sequence[str]) -> tuple[Head, ...]:
        """Call groups of a group that choose for themselves and for those that read their weights.

        The others are where the weights are that they read.
        """
        beside: dict[str, list[str]] = {}
        for name in group:
            beside.setdefault(self.sources[name] if self._has_source(name, group) else name, [])
        for name in group:
            if self._has_source(name, group):
                beside[self.sources[name]].append(name)
        return tuple((name, tuple(others)) for name, others in beside.items())

    def _has_source(self, call_group: str, group: Sequence[str]) -> bool:
        return self.sources.get(call_group) in group

    def every_head(self, call_group: str) -> Iterator[Head]:
        """A call group alone, and with each choice of those that read its weights."""
        readers = [name for name in self.calls_of if self.sources.get(name) == call_group]
        for count in range(len(readers) + 1):
            for beside in combinations(readers, count):
                yield call_group, beside

    def calls_of_head(self, head: Head) -> tuple[int, ...]:
        call_group, beside = head
        return tuple(sorted(i for name in (call_group, *beside) for i in self.calls_of[name]))

    def options(self, head: Head, index: Index) -> tuple[CallGroupOption, ...]:
        key = (head, index)
        if key not in self._options:
            self.num_asked += 1
            call_group, beside = head
            found = self._table.options(
                call_group, self.space.mesh(index), beside=beside, lagged=self._lagged
            )
            self._options[key] = self._reduced(head, found)
        return self._options[key]

    def _reduced(self, head: Head, options: Sequence[Option]) -> tuple[CallGroupOption, ...]:
        names = [self.calls[i].name for i in self.calls_of_head(head)]
        reduced = [
            CallGroupOption(
                tuple(option.durations_s[name] for name in names),
                option.resident_bytes,
                max(option.transient_bytes[name] for name in names),
                option,
            )
            for option in options
            if self.pins.accepts(head[0], option)
        ]
        reduced.sort(key=lambda o: (sum(o.durations_s), o.resident_bytes))
        kept: list[CallGroupOption] = []
        for option in reduced:
            if not any(better.covers(option) for better in kept):
                kept = [other for other in kept if not option.covers(other)] + [option]
        return tuple(kept)

    def load(self, check: Callable[[], None]) -> None:
        for index in self.indices:
            for call_group in self.calls_of:
                for head in self.every_head(call_group):
                    check()
                    self.options(head, index)

    def arrays(self, head: Head) -> _Arrays:
        if head not in self._arrays:
            rows = [self.options(head, index) for index in self.indices]
            shape = (len(rows), max(1, *(len(row) for row in rows)))
            durations_s = np.full((*shape, len(self.calls_of_head(head))), np.inf)
            resident, transient = np.full(shape, np.inf), np.full(shape, np.inf)
            for n, row in enumerate(rows):
                for k, option in enumerate(row):
                    durations_s[n, k] = option.durations_s
                    resident[n, k] = option.resident_bytes
                    transient[n, k] = option.transient_bytes
            self._arrays[head] = _Arrays(durations_s, resident, transient)
        return self._arrays[head]

    def group(self, call_groups: tuple[str, ...]) -> GroupChoices:
        if call_groups not in self._groups:
            self._groups[call_groups] = GroupChoices(self, call_groups)
        return self._groups[call_groups]

    def may_have(self, call_groups: Sequence[str]) -> NDArray[np.bool_]:
        wanted = {self.pins.num_devices[u] for u in call_groups if u in self.pins.num_devices}
        counts = (self.space.num_devices(index) for index in self.indices)
        return np.array([all(count == n for n in wanted) for count in counts], np.bool_)


class GroupChoices:
    """Layouts of some call groups that share a mesh."""

    def __init__(self, choices: Choices, call_groups: tuple[str, ...]) -> None:
        self.call_groups = call_groups
        self.calls = tuple(sorted(i for name in call_groups for i in choices.calls_of[name]))
        self._choices = choices
        self.heads = choices.heads(call_groups)
        self._range_min: RangeMin | None = None
        self._fronts: dict[Index, tuple[float, Front]] = {}
        # Where a call group's calls stand among the group's.
        flat = [i for head in self.heads for i in choices.calls_of_head(head)]
        self._order = [flat.index(i) for i in self.calls]

    @property
    def range_min(self) -> RangeMin:
        if self._range_min is None:
            self._range_min = RangeMin(self._least())
        return self._range_min

    def _least(self) -> Floats:
        choices = self._choices
        memory = np.array([choices.memory_bytes[index] for index in choices.indices], np.float64)
        may = choices.may_have(self.call_groups)
        arrays = [choices.arrays(head) for head in self.heads]
        resident = np.array([a.resident_bytes.min(1) for a in arrays])
        transient = np.array([a.transient_bytes.min(1) for a in arrays])
        found = np.full((len(self.calls), *choices.space.shape), np.inf)
        at = tuple(np.array(choices.indices).T)
        can = may & np.isfinite(resident).all(0)
        for k, (head, a) in enumerate(zip(self.heads, arrays, strict=True)):
            others = np.delete(resident, k, 0).sum(0)
            largest = np.delete(transient, k, 0).max(0, initial=0.0)
            needed = a.resident_bytes + others[:, None]
            needed += np.maximum(a.transient_bytes, largest[:, None])
            fits = can[:, None] & (needed <= memory[:, None])
            least = np.where(fits[:, :, None], a.durations_s, np.inf).min(1)
            for j, call in enumerate(choices.calls_of_head(head)):
                found[(self.calls.index(call), *at)] = least[:, j]
        return found

    def front(self, index: Index, below_s: float) -> Front:
        known_s, front = self._fronts.get(index, (-inf, Front(())))
        if below_s > known_s or (below_s < known_s and not front.complete):
            front = self._front(index, below_s)
            self._fronts[index] = (below_s, front)
        return front

    def least_work(self, index: Index, below_s: float) -> Front:
        pools = self._pools(index)
        found = least_work(pools, self._choices.memory_bytes[index], below_s) if pools else None
        return Front((self._choice(found),) if found else ())

    def _front(self, index: Index, below_s: float) -> Front:
        memory, pools = self._choices.memory_bytes[index], self._pools(index)
        if not pools:
            return Front(())
        fastest = together_fastest(pools, memory)
        if fastest is not None:
            return Front((self._choice(fastest),) if work_s(fastest) < below_s else ())
        found, complete = fitting(pools, memory, below_s)
        if not complete:
            least = least_work(pools, memory, below_s)
            found += [least] if least else []
        return Front(tuple(self._choice(options) for options in unbeaten(found)), complete)

    def _pools(self, index: Index) -> list[tuple[CallGroupOption, ...]]:
        choices = self._choices
        wanted = {choices.pins.num_devices.get(name) for name in self.call_groups} - {None}
        pools = [choices.options(head, index) for head in self.heads]
        return pools if all(pools) and not wanted - {choices.space.num_devices(index)} else []

    def _choice(self, options: tuple[CallGroupOption, ...]) -> Choice:
        flat = [seconds for option in options for seconds in option.durations_s]
        return Choice(
            tuple(flat[k] for k in self._order), tuple(option.option for option in options)
        )
