"""In which order a step's chunks are trained on, where each is as soon as it can be.

Chunks are consumed by (size, chunk), the size being the length of the longest row. That is an order
of lengths alone, so the result of a run does not depend on timing; and because short rows end
first, hardly any chunk waits for another. A rank answers the chunks that it samples together in
this order. So the next chunk of a rank sorts after the last one that it answered, and a chunk has
its place as soon as no rank can still answer one that sorts before it.

Where rows take newer weights in flight, lengths depend on timing, and chunks are consumed as they
come.
"""

from __future__ import annotations

import heapq

from ..errors import StateError

_Key = tuple[int, int]
_FIRST: _Key = (-1, -1)


class Consumption:
    """The order of one step's chunks, as far as it is known.

    Args:
        num_chunks: Chunks of the step.
        num_ranks: Ranks that sample them; rank r has chunks r, r + num_ranks, ...
        by_arrival: Whether a chunk's place is that of its answer.

    Attributes:
        order: The chunks whose places are known, in order.
        sizes: Chunk -> its size, of every chunk answered.
        by_arrival: See above.
    """

    def __init__(self, num_chunks: int, num_ranks: int, *, by_arrival: bool = False) -> None:
        self.by_arrival = by_arrival
        self.order: list[int] = []
        self.sizes: dict[int, int] = {}
        self._num_chunks = num_chunks
        self._unplaced: list[_Key] = []
        self.spread(num_ranks)

    def answered(self, chunk: int, size: int) -> None:
        """Note that a chunk has been sampled.

        Raises:
            StateError: If its rank answered one before that sorts after it.
        """
        if self.by_arrival:
            self.sizes[chunk] = size
            self.order.append(chunk)
            return
        rank, key = chunk % len(self._last), (size, chunk)
        if key <= self._last[rank]:
            raise StateError(
                f"chunk {chunk} of size {size} was answered after chunk {self._last[rank][1]} of "
                f"size {self._last[rank][0]}; a rank answers by (size, chunk)"
            )
        self.sizes[chunk] = size
        self._last[rank] = key
        self._left[rank] -= 1
        heapq.heappush(self._unplaced, key)
        if self._left[rank]:
            heapq.heappush(self._slowest, (key, rank))
        known = self._known()
        while self._unplaced and (known is None or self._unplaced[0] <= known):
            self.order.append(heapq.heappop(self._unplaced)[1])

    def spread(self, num_ranks: int) -> None:
        """Rank r of so many has what is left of chunks r, r + num_ranks, ... from now on.

        No rank is at work on any. What has its place keeps it: nothing that is left sorts before.
        """
        left = [chunk for chunk in range(self._num_chunks) if chunk not in self.sizes]
        self._left = [0] * num_ranks
        for chunk in left:
            self._left[chunk % num_ranks] += 1
        self._last = [_FIRST] * num_ranks
        self._slowest = [(_FIRST, rank) for rank, count in enumerate(self._left) if count]

    def _known(self) -> _Key | None:
        """The last answer of the rank that is furthest behind; None if all chunks are answered."""
        while self._slowest:
            last, rank = self._slowest[0]
            if self._left[rank] and last == self._last[rank]:
                return last
            heapq.heappop(self._slowest)  # it has answered since
        return None
