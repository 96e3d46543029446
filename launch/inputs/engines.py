"""The engines that a run's configuration names, and which of them runs a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...algorithms.roles.language import Policy
from ...configs.plan_schema import ANY_ENGINE
from ...configs.references import entry_or_own
from ...configs.schema import SAME, AlgorithmConfig, EngineConfig, RolloutConfig
from ...dataflow.errors import ConfigError
from ...dataflow.graph.graph import Graph, Node, NodeKind
from ...planner.cost.engine_model import ANY, EngineModel
from ...planner.inputs.calls import CallKind
from ...planner.inputs.layout import Layout
from ...planner.inputs.model_shape import ModelShape
from ...workers.engines.engine import Engine
from ...workers.engines.registry import DEFAULT, ENGINES, rollouts
from .own_workers import is_own

__all__ = ["Engines", "engines_of"]


def _why_not_own(layout: Layout, kind: CallKind, shape: ModelShape | None) -> str | None:
    if layout.checkpointing and kind == "train":
        return "a worker of one's own is not told to compute activations again"
    return DEFAULT.why_not(layout, kind, shape)


_OWN = replace(DEFAULT.planned, why_not=_why_not_own)
"""What a worker of the user's own is to the planner."""


@dataclass(frozen=True)
class Engines:
    """What trains and what generates.

    Attributes:
        train: What trains and evaluates.
        rollout: What generates, if that is not what trains.
        name: `engine.kind`, for messages.
        options: Fields of the specs of every model worker.
        rollout_name: `rollout.kind`.
        rollout_options: Fields of the spec of what generates.
        own: Roles of the main algorithm that workers of the user's own play. These are taken to be
            as the default engine's: each rank has the whole model, and does everything with it.
    """

    train: Engine
    rollout: Engine | None
    name: str
    options: Mapping[str, Any]
    rollout_name: str
    rollout_options: Mapping[str, Any]
    own: frozenset[str] = frozenset()

    @property
    def words(self) -> str:
        """As keys of a plan: "plan.engine=megatron rollout=vllm"."""
        apart = "" if self.rollout is None else f" rollout={self.rollout_name}"
        return f"plan.engine={self.name}{apart}"

    def runs(self, graph: Graph, node: Node) -> Engine:
        """The engine that runs a call."""
        if node.role in self.own:
            return DEFAULT
        return self.rollout or self.train if self.apart(graph, node) else self.train

    def apart(self, graph: Graph, node: Node) -> bool:
        """Whether another engine than the one that trains generates here."""
        if node.role is None or node.role in self.own:
            return False
        policy = issubclass(graph.roles[node.role], Policy)
        return self.rollout is not None and node.kind is NodeKind.ROLLOUT and policy

    def others(self, trains: str | None = None) -> dict[str, EngineModel]:
        """Roles whose calls run elsewhere than `planned` says, and where; args as there."""
        return {} if trains == ANY_ENGINE else dict.fromkeys(self.own, _OWN)

    def planned(self, trains: str | None = None) -> tuple[EngineModel, EngineModel | None]:
        """What the planner is to plan for: what trains, and what generates if that is another.

        Args:
            trains: `plan.engine`, where that says what trains.

        Raises:
            ConfigError: As `engines_of`.
        """
        train = self.train if trains is None else _named(trains)
        return ANY if train is None else train.planned, self.rollout and self.rollout.planned

    def check_generates(
        self, graph: Graph, algorithm: AlgorithmConfig, trains: str | None = None
    ) -> None:
        """Refuse a step that generates, on an engine that does not, without another that does.

        Args:
            graph: The step.
            algorithm: Its section; what somebody's own worker plays is nothing to an engine.
            trains: As of `planned`.

        Raises:
            ConfigError: Naming the node.
        """
        train = self.train if trains is None else _named(trains)
        if self.rollout is not None or train is None or train.generates:
            return
        own = _own(algorithm)
        for node in graph.nodes:
            policy = node.role is not None and issubclass(graph.roles[node.role], Policy)
            if node.kind is NodeKind.ROLLOUT and policy and node.role not in own:
                others = " or ".join(f"rollout={name}" for name in rollouts())
                raise ConfigError(
                    f"engine={trains or self.name} does not generate, and '{node.name}' "
                    f"must\n    add {others}"
                )


def engines_of(
    engine: EngineConfig, rollout: RolloutConfig, algorithm: AlgorithmConfig | None = None
) -> Engines:
    """The engines that two sections name, and the roles of an algorithm that are nothing to them.

    Raises:
        ConfigError: If one is of the user's own and cannot be loaded, or does not do what it is
            for.
    """
    other = None
    if rollout.kind != SAME:
        other = entry_or_own(rollout.kind, ENGINES, "rollout.kind", "engine", Engine)
        if other.rollout is None:
            raise ConfigError(f"'rollout.kind': engine '{other.name}' declares no rollout worker")
    elif rollout.options:
        raise ConfigError(
            f"'rollout.options' has keys ({', '.join(rollout.options)}), but what trains generates "
            "as well\n    set engine.options, or choose a rollout"
        )
    return Engines(
        train=_trainer(engine.kind, "engine.kind"),
        rollout=other,
        name=engine.kind,
        options=engine.options,
        rollout_name=rollout.kind,
        rollout_options=rollout.options,
        own=frozenset() if algorithm is None else frozenset(_own(algorithm)),
    )


def _own(algorithm: AlgorithmConfig) -> set[str]:
    return {role for role, given in algorithm.roles.items() if is_own(given.worker)}


def _named(trains: str) -> Engine | None:
    """What `plan.engine` names; None for any."""
    return None if trains == ANY_ENGINE else _trainer(trains, "plan.engine")


def _trainer(name: str, at: str) -> Engine:
    engine: Engine = entry_or_own(name, ENGINES, at, "engine", Engine)
    if not engine.trains:
        raise ConfigError(f"'{at}': engine '{engine.name}' declares no workers that train")
    return engine
