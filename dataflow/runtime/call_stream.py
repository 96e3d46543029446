"""Calls of one node in one step that a worker serves together, answered one after another.

Which call is answered next is a function of the calls and the weights alone: the one whose longest
row is the shortest, by number among equals. So whoever has to begin again can leave out what was
answered before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from ..errors import StateError
from ..graph.role import Role
from .messages import AnswerWork, CallWork
from .worker_protocol import Streamed, Streams

__all__ = ["CallStream", "one_by_one", "overrides"]

_Arguments = Mapping[str, Any]


@dataclass
class CallStream:
    """What has become of calls that were begun.

    Attributes:
        calls: The calls.
        scope: The scope in which the worker serves them; entered anew for each answer.
        begin: Binds their arguments, and has the worker begin.
        since_s: When the last answer was given, or the calls were begun; seconds since the epoch.
    """

    calls: tuple[CallWork, ...]
    scope: Callable[[], AbstractContextManager[None]]
    begin: Callable[[], Iterator[Streamed]]
    since_s: float = field(default_factory=time.time)
    _answers: Iterator[Streamed] | None = None
    _num_answered: int = 0

    def answer(self, work: AnswerWork, skipped: Callable[[], object]) -> Streamed:
        """The answer that comes after `work.number` others.

        Args:
            work: Which.
            skipped: Called after each answer that was given before, by a process that died.

        Raises:
            StateError: If it has been given, or the calls are of another step.
        """
        if work.step != self.calls[0].step or work.number < self._num_answered:
            raise StateError(
                f"answer {work.number} of '{work.node}' of step {work.step} was asked for, but "
                f"{self._num_answered} of step {self.calls[0].step} have been given"
            )
        while True:
            with self.scope():
                if self._answers is None:
                    self._answers = self.begin()
                found = next(self._answers, None)
            if found is None:
                raise StateError(
                    f"'{work.node}' answered {self._num_answered} of the {len(self.calls)} calls "
                    "that it was to serve together"
                )
            self._num_answered += 1
            if self._num_answered > work.number:
                break
            skipped()
        if self._num_answered == len(self.calls):
            self._end()
        return found

    def _end(self) -> None:
        """Have the worker give back what it holds for the calls, now and not with the next."""
        with self.scope():
            if next(self._answers or iter(()), None) is not None:
                raise StateError(f"more than the {len(self.calls)} calls were answered")
        self._answers = iter(())


def one_by_one(
    worker: Role, method: str, calls: Sequence[_Arguments], size: Callable[[int, Any], int]
) -> Iterator[Streamed]:
    """The answers of a worker to calls, by (size, call).

    Args:
        worker: One that streams serves them together, another one after the other; and so does one
            that `overrides` the method.
        method: Name of the method.
        calls: The arguments of each.
        size: The length of the longest row, of a call and what it returned.
    """
    if isinstance(worker, Streams) and not overrides(worker, method, "stream"):
        return worker.stream(method, calls)
    return _in_turn(getattr(worker, method), calls, size)


def overrides(worker: Role, method: str, together: str) -> bool:
    """Whether a worker's own `method` would be passed by if its calls were served together.

    So it is where a class inherits what serves calls together, and defines the method anew.

    Args:
        worker: The worker.
        method: Name of the method.
        together: Name of the one that serves calls of it together.
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
