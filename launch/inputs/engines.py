"""The engines that a run's configuration names, and which of them runs a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...algorithms.roles.language import Policy
from ...configs.references import entry_or_own
from ...configs.schema import SAME, AlgorithmConfig, EngineConfig, RoleConfig, RolloutConfig
from ...dataflow.errors import ConfigError
from ...dataflow.graph.graph import Graph, Node
from ...dataflow.kinds import NodeKind
from ...planner.cost.engine_model import RoleEngines
from ...planner.inputs.calls import CallKind
from ...planner.inputs.layout import Layout
from ...planner.inputs.model_shape import ModelShape
from ...workers.engines.engine import EngineKind
from ...workers.engines.registry import DEFAULT, ENGINES, rollouts
from .own_workers import is_own
from .record import Stage


def _why_not_own(layout: Layout, kind: CallKind, shape: ModelShape | None) -> str | None:
    if layout.checkpointing and kind == "train":
        return "a worker of one's own is not told to compute activations again"
    if layout.offload:
        return "a worker of one's own is not told to wait in host memory"
    return DEFAULT.why_not(layout, kind, shape)


_OWN = RoleEngines(replace(DEFAULT.planned, why_not=_why_not_own))
"""A user's own worker as the planner sees it."""


@dataclass(frozen=True)
class _Pair:
    """The engine that trains a role, and the one that generates if it is another."""

    train: EngineKind
    rollout: EngineKind | None


@dataclass(frozen=True)
class Engines:
    """The engines that train and generate.

    Attributes:
        train: What trains and evaluates.
        rollout: What generates, if that is not what trains.
        name: `engine.kind`, for messages.
        options: Fields of the specs of the model workers that `train` has.
        rollout_name: `rollout.kind`.
        rollout_options: Fields of the spec of `rollout`.
        own: Roles of the main algorithm that workers of the user's own play. These are taken to be
            as the default engine's: each rank has the whole model, and does everything with it.
        of_roles: Roles of the main algorithm that have engines of their own.
    """

    train: EngineKind
    rollout: EngineKind | None
    name: str
    options: Mapping[str, Any]
    rollout_name: str
    rollout_options: Mapping[str, Any]
    own: frozenset[str] = frozenset()
    of_roles: Mapping[str, _Pair] = field(default_factory=dict[str, _Pair])

    @property
    def words(self) -> str:
        """As keys of the configuration: "engine=megatron rollout=vllm"."""
        words = [f"engine={self.name}"]
        words += [] if self.rollout is None else [f"rollout={self.rollout_name}"]
        for role, pair in self.of_roles.items():
            at = f"algorithm.roles.{role}"
            words += [f"{at}.engine={pair.train.name}"] if pair.train is not self.train else []
            if pair.rollout is not self.rollout:
                words.append(f"{at}.rollout={pair.rollout.name if pair.rollout else SAME}")
        return " ".join(words)

    def trainer(self, role: str) -> EngineKind:
        """The engine that trains and evaluates a role."""
        return self._pair(role).train

    def generator(self, role: str) -> EngineKind | None:
        """The engine that generates with a role, if another one trains it."""
        return self._pair(role).rollout

    def _pair(self, role: str) -> _Pair:
        return self.of_roles.get(role) or _Pair(self.train, self.rollout)

    def options_of(self, role: str) -> Mapping[str, Any]:
        """Fields of the spec of what trains a role, apart from the role's own."""
        return self.options if self.trainer(role) is self.train else {}

    def rollout_options_of(self, role: str) -> Mapping[str, Any]:
        """Fields of the spec of the engine that generates with a role."""
        return self.rollout_options if self.generator(role) is self.rollout else {}

    def runs(self, graph: Graph, node: Node) -> EngineKind:
        """The engine that runs a call."""
        role = node.role or ""
        if role in self.own:
            return DEFAULT
        return self.generator(role) or self.train if self.apart(graph, node) else self.trainer(role)

    def apart(self, graph: Graph, node: Node) -> bool:
        """Return whether another engine than the one that trains generates here."""
        if node.role is None or node.role in self.own or node.kind is not NodeKind.ROLLOUT:
            return False
        return self.generator(node.role) is not None and issubclass(graph.roles[node.role], Policy)

    def planned(self) -> tuple[RoleEngines, dict[str, RoleEngines]]:
        """The planner's engines: by default, and of roles that have others."""
        others = {role: _planned(pair) for role, pair in self.of_roles.items()}
        return _planned(_Pair(self.train, self.rollout)), others | dict.fromkeys(self.own, _OWN)

    def check_generates(self, graph: Graph) -> None:
        """Refuse a step that generates, on an engine that does not, without another that does.

        Raises:
            ConfigError: Naming the node.
        """
        for node in graph.nodes:
            if node.kind is not NodeKind.ROLLOUT or node.role is None or node.role in self.own:
                continue
            engine = self.runs(graph, node)
            if not issubclass(graph.roles[node.role], Policy) or engine.generates:
                continue
            if not self.apart(graph, node):
                others = " or ".join(f"rollout={name}" for name in rollouts())
                raise ConfigError(
                    f"engine={engine.name} does not generate, and '{node.name}' must\n    add "
                    f"{others}"
                )


def _planned(pair: _Pair) -> RoleEngines:
    return RoleEngines(pair.train.planned, pair.rollout and pair.rollout.planned)


def engines_of(
    engine: EngineConfig, rollout: RolloutConfig, algorithm: AlgorithmConfig | None = None
) -> Engines:
    """The engines that two sections name, and those of the roles of an algorithm.

    Raises:
        ConfigError: If one is of the user's own and cannot be loaded, or does not do what it is
            for.
    """
    other = _generator(rollout.kind, "rollout.kind")
    if other is None and rollout.options:
        raise ConfigError(
            f"'rollout.options' has keys ({', '.join(rollout.options)}), but what trains generates "
            "as well\n    set engine.options, or choose a rollout"
        )
    both = _Pair(_trainer(engine.kind, "engine.kind"), other)
    roles = {} if algorithm is None else algorithm.roles
    return Engines(
        train=both.train,
        rollout=both.rollout,
        name=engine.kind,
        options=engine.options,
        rollout_name=rollout.kind,
        rollout_options=rollout.options,
        own=frozenset(role for role, given in roles.items() if is_own(given.worker)),
        of_roles={
            role: _of_role(given, both, f"algorithm.roles.{role}")
            for role, given in roles.items()
            if given.engine is not None or given.rollout is not None
        },
    )


def refuse_engines(stage: Stage) -> None:
    """An earlier stage's roles run where the main one's are.

    Raises:
        ConfigError: If one of them names an engine.
    """
    for role, given in stage.config.roles.items():
        for key in ("engine", "rollout"):
            if getattr(given, key) is not None:
                raise ConfigError(
                    f"'{stage.at}.roles.{role}.{key}' is set, but the roles of an earlier stage "
                    "run on the engines that the main one's have\n    set "
                    f"algorithm.roles.{role}.{key} instead"
                )


def _of_role(given: RoleConfig, run: _Pair, at: str) -> _Pair:
    if is_own(given.worker):
        raise ConfigError(
            f"'{at}' has a worker of your own and an engine\n    leave out 'engine' and 'rollout': "
            "the worker computes by itself"
        )
    train = run.train if given.engine is None else _trainer(given.engine, f"{at}.engine")
    if given.rollout is None:
        return _Pair(train, run.rollout)
    return _Pair(train, _generator(given.rollout, f"{at}.rollout"))


def _generator(name: str, at: str) -> EngineKind | None:
    """Return the engine that generates; None for the one that trains."""
    if name == SAME:
        return None
    engine: EngineKind = entry_or_own(name, ENGINES, at, "engine", EngineKind)
    if engine.rollout is None:
        raise ConfigError(f"'{at}': engine '{engine.name}' declares no rollout worker")
    return engine


def _trainer(name: str, at: str) -> EngineKind:
    engine: EngineKind = entry_or_own(name, ENGINES, at, "engine", EngineKind)
    if not engine.trains:
        raise ConfigError(f"'{at}': engine '{engine.name}' declares no workers that train")
    return engine
