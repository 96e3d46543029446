"""Which engines a run's configuration names, and which of them runs a node."""

from __future__ import annotations

from ...algorithms.roles.language import Policy
from ...configs.plan_schema import ANY_ENGINE
from ...configs.schema import SAME, AlgorithmConfig, RunConfig
from ...dataflow.errors import ConfigError
from ...dataflow.graph.graph import Graph, Node, NodeKind
from ...planner.cost.engine_model import ANY, EngineModel
from ...workers.engines.engine import Engine
from ...workers.engines.registry import ENGINES, rollouts
from .compose import load_object

__all__ = [
    "check_generates",
    "generates_apart",
    "planned_engines",
    "rollout_engine",
    "runs_on",
    "training_engine",
]


def training_engine(config: RunConfig) -> Engine:
    """What trains and evaluates.

    Raises:
        ConfigError: If it is one of the user's own that cannot be loaded or does not train.
    """
    return _trainer(config.engine.kind, "engine.kind")


def rollout_engine(config: RunConfig) -> Engine | None:
    """What generates, if that is not what trains; raises likewise."""
    if config.rollout.kind == SAME:
        return None
    engine = _engine(config.rollout.kind, "rollout.kind")
    if engine.rollout is None:
        raise ConfigError(f"'rollout.kind': engine '{engine.name}' declares no rollout worker")
    return engine


def planned_engines(config: RunConfig, trains: str) -> tuple[EngineModel, EngineModel | None]:
    """What the planner is to plan for: what trains, and what generates if that is another.

    Args:
        config: Says what generates.
        trains: `plan.engine`.

    Raises:
        ConfigError: As `training_engine`.
    """
    engine = ANY if trains == ANY_ENGINE else _trainer(trains, "plan.engine").planned
    other = rollout_engine(config)
    return engine, None if other is None else other.planned


def _trainer(name: str, at: str) -> Engine:
    engine = _engine(name, at)
    if not engine.trains:
        raise ConfigError(f"'{at}': engine '{engine.name}' declares no workers that train")
    return engine


def _engine(name: str, at: str) -> Engine:
    if ":" not in name:
        return ENGINES[name]  # the schema knows no other
    found = load_object(name, at)
    if isinstance(found, Engine):
        return found
    raise ConfigError(
        f"'{at}': '{name}' is a {type(found).__name__}\n"
        "    give an Engine (penstock.workers.engines.engine)"
    )


def runs_on(config: RunConfig, graph: Graph, node: Node) -> Engine:
    """The engine that runs a call."""
    other = rollout_engine(config) if generates_apart(config, graph, node) else None
    return other or training_engine(config)


def generates_apart(config: RunConfig, graph: Graph, node: Node) -> bool:
    """Whether another engine than the one that trains generates here."""
    policy = node.role is not None and issubclass(graph.roles[node.role], Policy)
    return config.rollout.kind != SAME and node.kind is NodeKind.ROLLOUT and policy


def check_generates(
    graph: Graph, algorithm: AlgorithmConfig, config: RunConfig, engine: str
) -> None:
    """Refuse a step that generates, on an engine that does not, without another that does.

    Args:
        graph: The step.
        algorithm: Its section; what somebody's own worker plays is nothing to an engine.
        config: What it runs with.
        engine: What trains: `engine.kind`, or `plan.engine` of what is planned only.

    Raises:
        ConfigError: Naming the node.
    """
    if config.rollout.kind != SAME or engine == ANY_ENGINE:
        return
    if _trainer(engine, "engine.kind").generates:
        return
    own = {role for role, given in algorithm.roles.items() if ":" in (given.worker or "")}
    for node in graph.nodes:
        policy = node.role is not None and issubclass(graph.roles[node.role], Policy)
        if node.kind is NodeKind.ROLLOUT and policy and node.role not in own:
            others = " or ".join(f"rollout={name}" for name in rollouts())
            raise ConfigError(
                f"engine={engine} does not generate, and '{node.name}' must\n    add {others}"
            )
