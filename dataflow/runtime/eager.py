"""Running a step function as what it is: an ordinary function, here, under a debugger."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

from ..errors import ConfigError
from ..graph.role import Role
from .call_context import step_scope
from .columns import Source
from .executor import build_role
from .worker_protocol import WorkerContext, WorkerSpec, close_workers


def run_eagerly(
    step: Callable[..., Any],
    sources: Mapping[str, Source],
    num_steps: int,
    *,
    workers: Mapping[str, WorkerSpec | Role],
    seed: int = 0,
    **constants: Any,
) -> Iterator[Any]:
    """Call the step function once per step with real workers and tensors; no graph, no engine.

    With the same seed it makes, bit for bit, the weights that an `Engine` makes on one worker.

    Args:
        step: The step function.
        sources: Source name -> where its rows come from.
        num_steps: Number of calls.
        workers: Role name -> worker or recipe.
        seed: The run's seed.
        **constants: Values of the remaining parameters, such as `cfg`.

    Yields:
        What the step function returned.

    Raises:
        ConfigError: If a parameter is not provided.
    """
    built: list[Role] = []
    try:
        roles: dict[str, Role] = {}
        for name, worker in workers.items():
            roles[name] = build_role(name, worker, WorkerContext(name, seed))
            if roles[name] is not worker:
                built.append(roles[name])
        _check_given(step, roles.keys() | sources.keys() | constants.keys())
        for index in range(num_steps):
            tables = {name: source.batch(index) for name, source in sources.items()}
            with step_scope(index):
                yield step(**tables, **roles, **constants)
    finally:
        close_workers(built)


def _check_given(step: Callable[..., Any], given: Set[str]) -> None:
    for parameter in inspect.signature(step).parameters.values():
        if parameter.name not in given and parameter.default is inspect.Parameter.empty:
            raise ConfigError(
                f"'{step.__name__}' has a parameter '{parameter.name}' that is not provided; "
                "give it as a source, a worker or a keyword"
            )
