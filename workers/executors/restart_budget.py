"""How often ranks that keep nothing are started again, and how long to wait before."""

from __future__ import annotations

from collections import Counter

from ...dataflow.errors import WorkerError
from ...dataflow.runtime.recovery.limits import Recovery

_Place = tuple[str, int | None]
"""A group and a rank of it, or None for all of its ranks together."""


class RestartBudget:
    """Forgives a rank its deaths as soon as it has answered.

    A rank that dies again and again without an answer in between has a cause that starting it again
    does not fix. Before the second time in a row it waits, and before each further one twice as
    long: what it had, a port or memory of a device, may not be free at once.

    Args:
        recovery: How many deaths in a row are too many; `max_restarts` limits how often a run goes
            back, which this is not.
    """

    def __init__(self, recovery: Recovery) -> None:
        self._recovery = recovery
        self._in_a_row: Counter[_Place] = Counter()

    def answered(self, group: str, rank: int) -> None:
        """The rank has done something that it was asked for: it lives.

        Args:
            group: Its group.
            rank: The rank; where all of a group are started again together, any of them.
        """
        self._in_a_row.pop((group, rank), None)
        self._in_a_row.pop((group, None), None)

    def pause_s(self, group: str, rank: int | None, said: str) -> float:
        """Seconds to wait before it is started again once more.

        Args:
            group: Whose rank has died.
            rank: The rank; None if all are started again.
            said: Who died, and how.

        Raises:
            WorkerError: If it is not to be started again.
        """
        limits, place = self._recovery, (group, rank)
        count = self._in_a_row[place]
        if count >= limits.max_repeats:
            raise WorkerError(
                f"{said}\n    it had been started again {count} times without an answer in "
                "between: that does not fix it (recovery.max_repeats)"
            )
        self._in_a_row[place] += 1
        return limits.wait_s(count)
