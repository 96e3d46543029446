"""Calls of one node in one step that a worker serves together, answered one after another.

Which call is answered next is a function of the calls and the weights alone: the one whose longest
row is the shortest, by number among equals. So whoever has to begin again can leave out what was
answered before. Calls that take newer weights in flight are answered otherwise each time; there it
is said which were.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import StateError
from ..graph.role import Streamed, Worker
from .messages import NextAnswer, NodeCall

_Arguments = Mapping[str, Any]


PAUSE_AFTER = 16
"""Pauses of a worker in flight after which newer weights may come. More make a message rarer."""


@dataclass
class CallStream:
    """Calls that were begun, and their answers."""

    calls: tuple[NodeCall, ...]
    # The scope in which the worker serves them; entered anew for each answer.
    scope: Callable[[NextAnswer], AbstractContextManager[None]]
    # Binds the arguments of some of them, given by their places, and has the worker begin.
    begin: Callable[[NextAnswer, Sequence[int]], Iterator[Streamed | None]]
    # When the last answer was given, or the calls were begun; seconds since the epoch.
    since_s: float = field(default_factory=time.time)
    _answers: Iterator[Streamed | None] | None = None
    _num_answered: int = 0
    _served: Sequence[int] = ()

    def answer(self, work: NextAnswer, skipped: Callable[[], object]) -> Streamed | None:
        """The answer after `work.number` others; None if newer weights may come first."""
        if work.step != self.calls[0].step or work.number < self._num_answered:
            raise StateError(
                f"answer {work.number} of '{work.node}' of step {work.step} was asked for, but "
                f"{self._num_answered} of step {self.calls[0].step} have been given"
            )
        if self._answers is None and work.given is not None:
            # A rank that begins again has other weights; chunks that it has answered stay.
            self._num_answered = len(work.given)
        while True:
            with self.scope(work):
                found = self._next(work)
            if found is None:
                return None
            self._num_answered += 1
            if self._num_answered > work.number:
                break
            skipped()
        if self._num_answered == len(self.calls):
            self._end(work)
        return found

    def _next(self, work: NextAnswer) -> Streamed | None:
        if self._answers is None:
            given = work.given or ()
            places = range(len(self.calls))
            self._served = [place for place in places if self.calls[place].chunk not in given]
            self._answers = self.begin(work, self._served)
        for num_paused, found in enumerate(self._answers, start=1):
            if found is not None:
                return replace(found, call=self._served[found.call])
            if work.given is not None and num_paused >= PAUSE_AFTER:
                return None
        raise StateError(
            f"'{work.node}' answered {self._num_answered} of the {len(self.calls)} calls that it "
            "was to serve together"
        )

    def _end(self, work: NextAnswer) -> None:
        with self.scope(work):
            if any(found is not None for found in self._answers or ()):
                raise StateError(f"more than the {len(self.calls)} calls were answered")
        self._answers = iter(())


def one_by_one(
    worker: Worker, method: str, calls: Sequence[_Arguments], size: Callable[[int, Any], int]
) -> Iterator[Streamed | None]:
    """The answers of a worker to calls, by (size, call)."""
    if overrides(worker, method, "stream"):
        return _in_turn(getattr(worker, method), calls, size)
    return worker.stream(method, calls)


def overrides(worker: Worker, method: str, together: str) -> bool:
    """True if a worker's own `method` would be passed by if its calls were served together.

    So it is where a class defines the method anew below what serves calls together; `Worker`, which
    defines the latter as a refusal, comes last.
    """
    where = [vars(worker), *(vars(kind) for kind in type(worker).__mro__)]
    first = next((own for own in where if method in own or together in own), {})
    return method in first and together not in first


def _in_turn(
    method: Callable[..., Any], calls: Sequence[_Arguments], size: Callable[[int, Any], int]
) -> Generator[Streamed]:
    returned = [method(**arguments) for arguments in calls]
    answers = [Streamed(call, one, size(call, one)) for call, one in enumerate(returned)]
    yield from sorted(answers, key=lambda answer: (answer.size, answer.call))
