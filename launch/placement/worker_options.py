"""What a plan says of the workers it was made for: their micro-batches, how they divide a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...configs.schema import RoleConfig, RunConfig
from ...dataflow.errors import ConfigError, PlanError
from ...dataflow.graph.graph import Graph
from ...planner.plan.plan import Plan
from ..inputs.engines import generates_apart, training_engine

__all__ = ["planned_options"]


def planned_options(plan: Plan, graph: Graph, config: RunConfig) -> dict[str, dict[str, Any]]:
    """Role -> fields of its worker's spec that the plan decides, for the engine that trains.

    Raises:
        ConfigError: If the configuration says otherwise of a field that follows from a layout.
        PlanError: If calls of one role ask for different values: they share a spec.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, tokens in plan.micro_batch_tokens.items():
        role = graph[name].role
        if role is not None:  # the least of its calls: all of them share one worker
            own = found.setdefault(role, {})
            own["micro_batch_tokens"] = min(tokens, own.get("micro_batch_tokens", tokens))
    engine = training_engine(config)
    said: dict[tuple[str, str], str] = {}
    for name, layout in plan.layouts.items():
        node = graph[name]
        if node.role is None or generates_apart(config, graph, node):
            continue
        for key, value in engine.options(layout).items():
            _check_given(config, node.role, key, value, f"layout {layout} of '{name}'")
            other = said.setdefault((node.role, key), name)
            if found.setdefault(node.role, {}).setdefault(key, value) != value:
                raise PlanError(
                    f"the layouts of '{other}' and '{name}' ask for {key}={found[node.role][key]} "
                    f"and {key}={value}, but one role has one {key}\n"
                    "    give its calls the same layout"
                )
    return found


def _check_given(config: RunConfig, role: str, key: str, value: Any, layout: str) -> None:
    own = config.algorithm.roles.get(role, RoleConfig()).options
    given: tuple[tuple[str, Mapping[str, Any]], ...] = (
        (f"algorithm.roles.{role}.options", own),
        ("engine.options", config.engine.options),
    )
    for at, options in given:
        if options.get(key, value) != value:
            raise ConfigError(
                f"'{at}.{key}' is {options[key]}, but {layout} makes it {value}\n"
                "    leave it out, or place the run by hand: executor.groups"
            )
