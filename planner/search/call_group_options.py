"""Options of single call groups, and combinations of them that fit into memory together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .options import Option

# combinations of a group's options that are looked at; beyond, the search keeps a gap
MOST_COMBINED = 20_000


@dataclass(frozen=True, slots=True)
class CallGroupOption:
    """An option, reduced to what the search compares."""

    durations_s: tuple[float, ...]  # seconds of the call group's calls, in program order
    resident_bytes: int  # per device, always
    transient_bytes: int  # per device, in the hungriest call
    option: Option  # the option

    def covers(self, other: CallGroupOption) -> bool:
        return (
            self.resident_bytes <= other.resident_bytes
            and self.transient_bytes <= other.transient_bytes
            and all(a <= b for a, b in zip(self.durations_s, other.durations_s, strict=True))
        )


def work_s(options: Sequence[CallGroupOption]) -> float:
    """Seconds of all calls, one after another."""
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
    numbers = np.lexsort((*rows.T[::-1], rows.sum(1)))
    left, kept = rows[numbers], list[int]()
    while len(numbers):
        kept.append(int(numbers[0]))
        more = (left < left[0]).any(1)
        left, numbers = left[more], numbers[more]
    return kept
