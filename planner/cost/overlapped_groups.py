"""Number of loops of stepping and asking that one process should run at the same time.

A loop steps and then asks, again and again. Part of each is the process computing, of which it can
do one thing at a time (the interpreter's lock); the rest is waiting: for a step that sleeps or is
computed elsewhere, and for the answer. `n` loops turning side by side wait together and compute one
after another, so a turn of all of them takes

    turn(n) = max(step_s + ask_s, n * (step_cpu_s + ask_cpu_s))        n = 1: step_s + ask_s

where each loop but a lone one also computes `SWITCH_S`, the handing over of the lock. `m` groups
are done in ceil(m / n) rounds.
"""

from __future__ import annotations

import math

from ...dataflow.options import NonNegativeFloat, option_class

# seconds that a thread takes to get the interpreter's lock from another, twice a turn
SWITCH_S = 1e-4

# more loops must promise to be faster by this fraction: measured times are not exact
LEAST_GAIN = 0.05


@option_class
class LoopTimes:
    """Average times of one turn of a loop while it ran alone."""

    step_s: NonNegativeFloat  # elapsed seconds of a step
    step_cpu_s: NonNegativeFloat  # seconds of them in which the process computed
    ask_s: NonNegativeFloat  # elapsed seconds until the answer was there
    ask_cpu_s: NonNegativeFloat  # seconds of them in which the process computed

    def __post_init__(self) -> None:
        if not self.step_s + self.ask_s > 0:
            raise ValueError("step_s and ask_s are 0; expected measured seconds")

    @property
    def turn_s(self) -> float:
        return self.step_s + self.ask_s

    @property
    def cpu_s(self) -> float:
        return min(self.step_cpu_s + self.ask_cpu_s, self.turn_s)


def round_s(times: LoopTimes, num_overlapped: int, num_groups: int) -> float:
    """Seconds in which all groups take one step, with `num_overlapped` loops at the same time."""
    if num_overlapped == 1:
        return num_groups * times.turn_s
    turn_s = max(times.turn_s + SWITCH_S, num_overlapped * (times.cpu_s + SWITCH_S))
    return math.ceil(num_groups / num_overlapped) * turn_s


def choose_num_overlapped(times: LoopTimes, num_groups: int, most: int = 64) -> int:
    """The number of loops that is expected to be fastest; the smallest of those about as fast."""
    if num_groups < 1:
        raise ValueError(f"num_groups is {num_groups}; expected at least 1")
    sizes = range(1, min(num_groups, most) + 1)
    fastest_s = min(round_s(times, size, num_groups) for size in sizes)
    enough_s = fastest_s * (1 + LEAST_GAIN)
    return next(size for size in sizes if round_s(times, size, num_groups) <= enough_s)
