"""A step of fixed shape as CUDA graphs, one for each number of cache positions it attends over.

A graph does again what was done while it was captured, at the same addresses. So whoever makes the
step keeps every tensor that it reads and writes, writes into them in place, and calls `clear` after
replacing one. Weights are the exception that is looked after here: those that come back from host
memory may lie elsewhere, and the graphs of the old place are dropped.

A step must not look at the device: it may not ask for a number, nor copy from or to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a device on which steps are captured: one, as cuBLAS keeps memory for each."""
    return torch.cuda.Stream(device)


class StepGraphs:
    """Runs a step: the first time for a number of positions as it is, from then on as a graph.

    All graphs share one pool of memory, for no two of them run at once and nothing is left in it
    from one to the next.

    It does not hold on to the step: what that writes into would live until Python looks for cycles.

    Args:
        device: A CUDA device.

    Attributes:
        num_captured: Graphs captured so far, dropped ones as well.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._weights_at = 0
        self._stream = capture_stream(device)
        self.num_captured = 0

    def run(self, step: Callable[[int], None], span: int, weights_at: int) -> None:
        """Do the step once.

        Args:
            step: Does something on the device, given the number of positions; always the same.
            span: Positions.
            weights_at: Address of the weights.
        """
        if weights_at != self._weights_at:
            self.clear()
            self._weights_at = weights_at
        graph = self._graphs.get(span)
        if graph is not None:
            graph.replay()
            return
        with torch.cuda.device(self._device):
            # Libraries set themselves up in their first call, which a graph must not record.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                step(span)
            torch.cuda.current_stream().wait_stream(self._stream)
            self._graphs[span] = self._captured(step, span)

    def clear(self) -> None:
        """Drop all graphs, and their memory."""
        self._graphs.clear()
        self._pool = None

    def _captured(self, step: Callable[[int], None], span: int) -> torch.cuda.CUDAGraph:
        """The step as a graph; nothing is computed."""
        if self._pool is None:  # not again one whose graphs are gone
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the device meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            step(span)
        self.num_captured += 1
        return graph
