"""What a call costs besides its work: dispatch, fetching its rows, storing what it made.

Measured with a step whose nodes do nothing: each hands a column on to the next, so a step takes as
long as its calls cost.
"""

from __future__ import annotations

import statistics
import time

import torch

from ...algorithms.roles.language import Prompts, PromptTokenIds
from ...dataflow.graph.tracer import build, op
from ...dataflow.runtime.engine import Engine
from ...dataflow.runtime.executor import Executor
from ...dataflow.runtime.placement import one_group

_CALLS = 8
_ROWS, _TOKENS = 64, 64
_WARM_UP = 3


@op(scope="row")
def hand_on(prompt: PromptTokenIds) -> PromptTokenIds:
    """The same."""
    return prompt


def relay_step(prompts: Prompts) -> PromptTokenIds:
    """Hand the prompts on from node to node."""
    column = prompts.prompt
    for _ in range(_CALLS):
        column = hand_on(column)
    return column


class _Rows:
    """The same prompts in every step."""

    def batch(self, step: int) -> Prompts:
        """All of them."""
        return Prompts(
            prompt=torch.zeros(_ROWS, _TOKENS, dtype=torch.int64), prompt_id=torch.arange(_ROWS)
        )


def call_seconds(executor: Executor, num_steps: int = 20) -> float:
    """Seconds that one call costs on an executor, one rank and nothing else running.

    Args:
        executor: Not started yet; it is stopped afterwards.
        num_steps: Steps of eight calls each, of which the median counts.

    Raises:
        WorkerError: If the executor fails.
    """
    graph = build(relay_step, name="relay")
    ends_s: list[float] = []
    with Engine(graph, one_group(graph), workers={}, executor=executor) as engine:
        for _ in engine.run({"prompts": _Rows()}, num_steps + _WARM_UP):
            ends_s.append(time.perf_counter())
    taken = [end - begin for begin, end in zip(ends_s, ends_s[1:], strict=False)]
    return statistics.median(taken[_WARM_UP - 1 :]) / _CALLS
