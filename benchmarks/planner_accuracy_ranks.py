"""Two processes that make the calls of a calibration whenever they are asked to.

`penstock profile` makes all calls of one kind one after the other. Where the machine is slower in
one minute than in the next, that says little of steps that run later; so here every call is made
once between steps, again and again.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from penstock.launch.profile.rank import ProfileCall, make_policy

__all__ = ["CalibrationRanks"]

_NUM_RANKS = 2
_LONGEST_S = 300.0


class CalibrationRanks:
    """Processes with one thread each, which work at the same time.

    Args:
        calls: What they do.
    """

    def __init__(self, calls: Sequence[ProfileCall]) -> None:
        self._times: list[list[float]] = [[] for _ in calls]
        spawn = multiprocessing.get_context("spawn")
        together = spawn.Barrier(_NUM_RANKS, timeout=_LONGEST_S)
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        for _ in range(_NUM_RANKS):
            here, there = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(list(calls), there, together), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)
        self._answers()  # once to warm up

    def sample(self) -> None:
        """Make every call once."""
        for pipe in self._pipes:
            pipe.send(True)
        for times, *ranks in zip(self._times, *self._answers(), strict=True):
            times.append(max(ranks))

    def _answers(self) -> list[list[float]]:
        found: list[list[float]] = []
        for pipe in self._pipes:
            if not pipe.poll(_LONGEST_S):
                raise SystemExit("a process that times calls does not answer")
            found.append(pipe.recv())
        return found

    @property
    def medians_s(self) -> list[float]:
        """Of each call, of the slower rank."""
        return [statistics.median(times) for times in self._times]

    def close(self) -> None:
        """End them."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(False)
            process.join(_LONGEST_S)


def _serve(calls: list[ProfileCall], pipe: Any, together: Any) -> None:
    torch.set_num_threads(1)
    policies = {call.model: make_policy(call, "cpu") for call in calls}
    bodies = [call.prepared(policies[call.model]) for call in calls]
    while True:
        taken: list[float] = []
        for body in bodies:
            together.wait()
            begin = time.perf_counter()
            body()
            taken.append(time.perf_counter() - begin)
        pipe.send(taken)
        if not pipe.recv():
            return
