"""What a plan says of the workers it was made for: their micro-batches, how they divide a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...configs.schema import RoleConfig
from ...dataflow.errors import ConfigError, PlanError
from ...planner.plan.plan import Plan
from ..inputs.engines import Engines
from ..inputs.record import Recorded


def planned_options(plan: Plan, step: Recorded, engines: Engines) -> dict[str, dict[str, Any]]:
    """Role -> fields of its worker's spec that the plan decides, for the engine that trains.

    Raises:
        ConfigError: If the configuration says otherwise of a field that follows from a layout.
        PlanError: If calls of one role ask for different values: they share a spec.
    """
    graph = step.graph
    found: dict[str, dict[str, Any]] = {}
    for name, tokens in plan.micro_batch_tokens.items():
        role = graph[name].role
        if role is not None:  # the least of its calls: all of them share one worker
            own = found.setdefault(role, {})
            own["micro_batch_tokens"] = min(tokens, own.get("micro_batch_tokens", tokens))
    said: dict[tuple[str, str], str] = {}
    for name, layout in plan.layouts.items():
        node = graph[name]
        if node.role is None or engines.apart(graph, node):
            continue
        for key, value in engines.runs(graph, node).options(layout).items():
            at = f"layout {layout} of '{name}'"
            _check_given(step, engines, node.role, key, value, at)
            other = said.setdefault((node.role, key), name)
            if found.setdefault(node.role, {}).setdefault(key, value) != value:
                raise PlanError(
                    f"the layouts of '{other}' and '{name}' ask for {key}={found[node.role][key]} "
                    f"and {key}={value}, but one role has one {key}\n"
                    "    give its calls the same layout"
                )
    return found


def _check_given(
    step: Recorded, engines: Engines, role: str, key: str, value: Any, layout: str
) -> None:
    own = step.config.roles.get(role, RoleConfig()).options
    given: tuple[tuple[str, Mapping[str, Any]], ...] = (
        (f"{step.at}.roles.{role}.options", own),
        ("engine.options", engines.options_of(role)),
    )
    for at, options in given:
        if options.get(key, value) != value:
            raise ConfigError(
                f"'{at}.{key}' is {options[key]}, but {layout} makes it {value}\n"
                "    leave it out, or place the run by hand: executor.groups"
            )
