"""Several groups of environments rolled out at the same time, by threads of one process.

While one group waits for its environments, or for the answer of a served actor, another
computes. What a group does depends on nothing but itself and its noise, so a rollout is the same,
however many groups are overlapped.

With one slot the groups are rolled out one after another by the calling thread, and environments
that hang can be interrupted (`StepAlarm`). Threads cannot be: with more slots a step that takes too
long ends the rollout with an error.
"""

from __future__ import annotations

import logging
import math
import queue
import resource
import threading
import time
from collections.abc import Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...algorithms.roles.environment import Actor, Acts
from ...dataflow.errors import WorkerError
from ...dataflow.options import PositiveInt
from ...planner.cost.overlapped_groups import LoopTimes, choose_num_overlapped
from .live import LiveGroup

NumOverlapped = PositiveInt | Literal["auto"]
"""Groups rolled out at the same time; "auto": the planner chooses from what the first rollout
takes."""

_POLL_S = 0.25  # between two looks at the steps under way
_LEAST_WAITS = 0.5  # a loop with fewer waits in a turn does not wait

_LOG = logging.getLogger("penstock.envs")

Columns = dict[str, NDArray[Any]]


class _Ended(Exception):
    """The rollout is over for everyone: another slot failed."""


class LoopTimer:
    """Adds up how long the answers of a loop's actors took, and everything between them.

    A thread that never waits of its own accord computes all the time. Its clock may say otherwise
    on a machine that is busy with other things, so that is not asked.
    """

    def __init__(self) -> None:
        self.num_turns = 0
        self.steps_s: list[float] = []  # everything between two answers, one by one
        self._ask_s = self._ask_cpu_s = 0.0
        self._begin_s, self._begin_cpu_s = time.perf_counter(), time.thread_time()
        self._begin_all_cpu_s, self._begin_waits = time.process_time(), _num_waits()
        self._since_s = self._begin_s

    def of(self, actor: Actor) -> Actor:
        """Return an actor that passes requests on to another one, whose answers are timed."""
        return _Timed(actor, self)

    def ask(self, actor: Actor, asked: tuple[Any, ...], named: dict[str, Any]) -> Acts:
        before_s, before_cpu_s = time.perf_counter(), time.thread_time()
        found = actor.act(*asked, **named)
        after_s = time.perf_counter()
        self.steps_s.append(before_s - self._since_s)
        self._since_s = after_s
        self._ask_s += after_s - before_s
        self._ask_cpu_s += time.thread_time() - before_cpu_s
        self.num_turns += 1
        return found

    def times(self) -> LoopTimes:
        turns = max(self.num_turns, 1)
        all_s = time.perf_counter() - self._begin_s
        all_cpu_s, ask_cpu_s = time.thread_time() - self._begin_cpu_s, self._ask_cpu_s
        if _num_waits() - self._begin_waits < turns * _LEAST_WAITS:
            all_cpu_s, ask_cpu_s = all_s, self._ask_s
        return LoopTimes(
            step_s=max(all_s - self._ask_s, 0.0) / turns,
            step_cpu_s=max(all_cpu_s - ask_cpu_s, 0.0) / turns,
            ask_s=self._ask_s / turns,
            ask_cpu_s=ask_cpu_s / turns,
        )

    def other_cpu_s(self) -> float:
        """Seconds of cores in a turn that other threads of this process have computed."""
        others_s = time.process_time() - self._begin_all_cpu_s
        others_s -= time.thread_time() - self._begin_cpu_s
        return max(0.0, others_s) / max(self.num_turns, 1)


class _Timed(Actor):
    def __init__(self, actor: Actor, timer: LoopTimer) -> None:
        self._actor, self._timer = actor, timer

    def act(self, *asked: Any, **named: Any) -> Acts:
        return self._timer.ask(self._actor, asked, named)


def _num_waits() -> float:
    """Voluntary context switches of this thread; inf where the system does not count them."""
    if not hasattr(resource, "RUSAGE_THREAD"):
        return math.inf
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


@dataclass
class _Slot(Actor):
    actor: Actor
    ended: threading.Event  # the rollout is over for everyone
    numbers: Sequence[int] = ()  # the environments being stepped
    stepping_s: float | None = None  # since when; None while nothing is

    def act(self, *asked: Any, **named: Any) -> Acts:
        self.stepping_s = None
        if self.ended.is_set():
            raise _Ended
        found = self.actor.act(*asked, **named)
        self.stepping_s = time.monotonic()
        return found


class OverlappedGroups:
    """Rolls out groups, `size` at a time, which the first rollout of several chooses if "auto"."""

    def __init__(self, size: NumOverlapped, step_limit_s: float | None) -> None:
        self.size: NumOverlapped = size
        self._step_limit_s = step_limit_s  # of one environment's step

    def uses_threads(self, num_groups: int) -> bool:
        """Return whether so many groups would be rolled out by other threads than the caller's."""
        return num_groups > 1 and self.size not in ("auto", 1)

    def roll(
        self, groups: Sequence[LiveGroup], noises: Sequence[NDArray[np.float64]], actor: Actor
    ) -> list[Columns]:
        """Roll out all groups; returns what `LiveGroup.roll` returns for each, in order."""
        if self.size == "auto" and len(groups) > 1:
            return self._measured(groups, noises, actor)
        if self.uses_threads(len(groups)):
            return self._at_once(groups, noises, actor)
        return [live.roll(actor, noise) for live, noise in zip(groups, noises, strict=True)]

    def _measured(
        self, groups: Sequence[LiveGroup], noises: Sequence[NDArray[np.float64]], actor: Actor
    ) -> list[Columns]:
        timer = LoopTimer()
        timed = timer.of(actor)
        found = [live.roll(timed, noise) for live, noise in zip(groups, noises, strict=True)]
        times = timer.times()
        self.size = choose_num_overlapped(times, len(groups))
        _LOG.info("%d of %d groups are overlapped: %s", self.size, len(groups), times)
        return found

    def _at_once(
        self, groups: Sequence[LiveGroup], noises: Sequence[NDArray[np.float64]], actor: Actor
    ) -> list[Columns]:
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        # Of each group its columns, or what was raised.
        done: queue.SimpleQueue[tuple[int, Columns | BaseException]] = queue.SimpleQueue()
        ended = threading.Event()
        for index in range(len(groups)):
            todo.put(index)

        def work(slot: _Slot) -> None:
            while not ended.is_set():
                try:
                    index = todo.get_nowait()
                except queue.Empty:
                    return
                slot.numbers = groups[index].numbers
                try:
                    found: Columns | BaseException = groups[index].roll(slot, noises[index])
                except BaseException as error:  # noqa: BLE001 - raised again by the calling thread
                    found = error
                slot.stepping_s = None
                done.put((index, found))

        assert self.size != "auto"
        slots = [_Slot(actor, ended) for _ in range(min(self.size, len(groups)))]
        threads = [
            threading.Thread(
                # A thread begins outside of any step; environments and actors may ask for theirs.
                target=copy_context().run,
                args=(work, slot),
                name=f"penstock-overlap-{i}",
                daemon=True,
            )
            for i, slot in enumerate(slots)
        ]
        for thread in threads:
            thread.start()
        found: dict[int, Columns] = {}
        try:
            while len(found) < len(groups):
                try:
                    index, columns = done.get(timeout=_POLL_S)
                except queue.Empty:
                    self._check(slots)
                    continue
                if isinstance(columns, BaseException):
                    raise columns
                found[index] = columns
        finally:
            ended.set()
            for thread in threads:
                thread.join(_POLL_S)  # One that hangs is left behind; the process ends soon.
        return [found[index] for index in range(len(groups))]

    def _check(self, slots: Sequence[_Slot]) -> None:
        for slot in slots:
            since_s = slot.stepping_s
            if since_s is None or self._step_limit_s is None:
                continue
            limit_s = self._step_limit_s * len(slot.numbers)
            if time.monotonic() - since_s > limit_s:
                raise WorkerError(
                    f"a step of environments {list(slot.numbers)} took longer than {limit_s:g} s "
                    f"(step_limit_s={self._step_limit_s:g} for each of them); with "
                    "num_overlapped=1 one that hangs is restarted"
                )
