"""The order in which calls that are sampled together are answered, whatever the timing.

An answer's place is (size, call): the tokens of its longest response, then the number of its call.
Of responses that an earlier step has begun only those tokens count that are added. That depends on
lengths alone, so any number of workers on any machine answer in the same order; and a call whose
responses are short does not wait for one whose are long.

When all responses of a call have ended, its place is known. It is answered as soon as no other call
can still take a place before it: one that is not complete will be at least as large as its longest
response so far, and as what every response still to come is known to reach.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate, pairwise


class OrderedAnswers:
    """Told which responses have ended, says which calls are to be answered.

    Args:
        num_rows: Responses of each call. Rows are numbered through all calls, in their order.
        begun: Tokens that each response has before; none by default.
    """

    def __init__(self, num_rows: Sequence[int], begun: Sequence[int] | None = None) -> None:
        self._call_of = [call for call, num in enumerate(num_rows) for _ in range(num)]
        self._begun = [0] * len(self._call_of) if begun is None else begun
        self._has_ended = bytearray(len(self._call_of))
        self._missing = {call: num for call, num in enumerate(num_rows) if num}
        self._longest = [0] * len(num_rows)
        self._complete = [(0, call) for call, num in enumerate(num_rows) if not num]
        # Rows of each call, the one that had the fewest tokens last: the first to be looked at.
        bounds = pairwise(accumulate(num_rows, initial=0))
        self._by_begun = [
            sorted(range(*own), key=self._begun.__getitem__, reverse=True) for own in bounds
        ]

    @property
    def num_missing(self) -> int:
        """Responses that have not ended."""
        return sum(self._missing.values())

    def ended(
        self, rows: Sequence[int], lengths: Sequence[int], at_least: int
    ) -> list[tuple[int, int]]:
        """Note that some responses have ended; none, if only `at_least` has grown.

        Args:
            rows: Which.
            lengths: Tokens of each, with those that it had before.
            at_least: Tokens that each of the others has at its end, or more, counted alike.

        Returns:
            (size, call) of the calls that are to be answered now, in order.

        Raises:
            ValueError: If a row has ended before.
        """
        for row, length in zip(rows, lengths, strict=True):
            self._end(row, length)
        first = min(((self._reached(call, at_least), call) for call in self._missing), default=None)
        answers: list[tuple[int, int]] = []
        while self._complete and (first is None or self._complete[0] < first):
            answers.append(heapq.heappop(self._complete))
        return answers

    def _reached(self, call: int, at_least: int) -> int:
        """The least size that a call which is not complete may come to have."""
        rows = self._by_begun[call]
        while self._has_ended[rows[-1]]:
            rows.pop()
        return max(at_least - self._begun[rows[-1]], self._longest[call])

    def _end(self, row: int, length: int) -> None:
        if self._has_ended[row]:
            raise ValueError(f"response {row} ended twice; an engine gives every response once")
        self._has_ended[row] = True
        call = self._call_of[row]
        self._longest[call] = max(self._longest[call], length - self._begun[row])
        self._missing[call] -= 1
        if not self._missing[call]:
            del self._missing[call]
            heapq.heappush(self._complete, (self._longest[call], call))
