"""What a stage's graph and configuration say about the signs that it can show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from ...configs.schema import MismatchConfig
from ...dataflow.graph.graph import NodeKind
from ...dataflow.scheduler.schedule import Schedule
from ..inputs.record import load_step, step_cfg
from .headline import needed_nodes, ranked_nodes
from .sign_rules import SignFacts
from .stages import Stage


def facts_of(stage: Stage, mismatch: MismatchConfig, schedule: Schedule) -> SignFacts:
    """What is known of a stage before its first step.

    Args:
        stage: The stage.
        mismatch: When to complain that two engines disagree.
        schedule: How far generation may run ahead.
    """
    config = stage.config
    step = load_step(config.step, f"{stage.at}.step")
    cfg = step_cfg(step, config.cfg, f"{stage.at}.cfg").get("cfg")
    options: dict[str, tuple[str, Any]] = {}
    for name, key, value in _options(cfg, f"{stage.at}.cfg"):
        options.setdefault(name, (key, value))
    keys = {name: key for name, (key, value) in options.items() if not _is_least(name, value)}
    if schedule.max_lag:
        keys["max_lag"] = "schedule.max_lag"
    values = {name: value for name, (_, value) in options.items()}
    return SignFacts(
        at=stage.at,
        options=keys,
        order=tuple(ranked_nodes(stage)),
        needed=needed_nodes(stage),
        compares_groups=_compares_groups(stage),
        judges_clip=values.get("ratio_level", "token") == "token",
        fixed_length=values.get("min_new_tokens", 0) >= values.get("max_new_tokens", 1),
        mismatch_above=mismatch.warn_above,
    )


def _options(value: Any, at: str) -> Iterator[tuple[str, str, Any]]:
    """Name, whole key and value of every option of a config, those above others first."""
    if not is_dataclass(value):
        return
    own = [(field.name, getattr(value, field.name)) for field in fields(value)]
    for name, inner in own:
        yield name, f"{at}.{name}", inner
    for name, inner in own:
        yield from _options(inner, f"{at}.{name}")


def _is_least(name: str, value: Any) -> bool:
    """Whether it is a number of passes or parts that cannot be lowered."""
    return name in ("epochs", "num_minibatches") and value == 1


def _compares_groups(stage: Stage) -> bool:
    """Whether an op that the policy's training depends on takes whole groups."""
    needed = needed_nodes(stage)
    return any(
        node.kind is NodeKind.OP and node.scope == "group" and node.name in needed
        for node in stage.graph.nodes
    )
