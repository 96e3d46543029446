"""The engines that a run's configuration names, which of them runs a node, and own workers.

`worker=module:factory` names a function or a class that returns a worker or its spec. Its options
are its arguments; of the arguments in `GIVEN` the run fills in those that are not options, with
what workers of ours get. A parameter that is annotated with another type is the factory's own.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ...algorithms.roles.language import Policy, RewardModel, ValueModel
from ...configs.references import entry_or_own, load_object
from ...configs.schema import SAME, AlgorithmConfig, EngineConfig, RoleConfig, RolloutConfig
from ...dataflow.errors import ConfigError
from ...dataflow.graph.graph import Graph, Node
from ...dataflow.kinds import NodeKind
from ...dataflow.registry import Registry
from ...planner.cost.engine_model import RoleEngines
from ...planner.inputs.calls import CallKind
from ...planner.inputs.layout import Layout
from ...planner.inputs.model_shape import ModelShape
from ...workers.data.task import TaskSpec
from ...workers.engines.engine import EngineKind
from ...workers.engines.registry import DEFAULT, ENGINES, rollouts
from ...workers.models.spec import ModelSpec
from ...workers.models.tokenizer import TokenizerSpec
from ...workers.training.logprob_mismatch import MismatchLimits
from ...workers.training.optimizer import OptimizerSpec
from ...workers.weight_sync.channel import DEFAULT_TRANSPORT, ON_DEVICE, Transport

ENV_SPECS = Registry[Any](
    {
        "env": "penstock.workers.envs.worker:EnvWorkerSpec",
        "board": "penstock.workers.envs.games.mnk_games:BoardSpec",
        "actor_critic": "penstock.workers.envs.actors.actor_critic:TorchActorCriticSpec",
        "team_critic": "penstock.workers.envs.actors.actor_critic:TeamCriticSpec",
        "q_network": "penstock.workers.envs.actors.q_learning:QNetworkSpec",
        "replay": "penstock.workers.envs.actors.q_learning:ReplaySpec",
    }
)
"""The workers that act in environments or games, and the spec of each."""

NETWORKS = frozenset({"actor_critic", "team_critic", "q_network"})  # those that have weights

MODEL_TYPE = "perceptron"  # `model.architecture.model_type` of networks that act in environments

FILLED_IN = frozenset(
    ("env", "network", "start", "optimizer", "height", "width", "in_line", "gravity")
)
"""Fields of these specs that the run fills in; the others may be set as `options`."""


def _why_not_own(layout: Layout, kind: CallKind, shape: ModelShape | None) -> str | None:
    if layout.checkpointing and kind == "train":
        return "a worker of one's own is not told to compute activations again"
    if layout.offload:
        return "a worker of one's own is not told to wait in host memory"
    return DEFAULT.why_not(layout, kind, shape)


_OWN = RoleEngines(replace(DEFAULT.planned, why_not=_why_not_own))
"""A user's own worker as the planner sees it."""


class _Pair(NamedTuple):
    train: EngineKind
    rollout: EngineKind | None  # what generates, if that is another

    def planned(self, transport: Transport) -> RoleEngines:
        rollout = self.rollout and self.rollout.planned
        return RoleEngines(self.train.planned, rollout, keeps_sent=transport in ON_DEVICE)


@dataclass(frozen=True)
class Engines:
    train: EngineKind  # what trains and evaluates
    rollout: EngineKind | None  # what generates, if that is not what trains
    name: str  # `engine.kind`, for messages
    options: Mapping[str, Any]  # fields of the specs of the model workers that `train` has
    rollout_name: str  # `rollout.kind`
    rollout_options: Mapping[str, Any]  # fields of the spec of `rollout`
    # roles of the main algorithm that workers of the user's own play. These are taken to be as the
    # default engine's: each rank has the whole model, and does everything with it.
    own: frozenset[str] = frozenset()
    # roles of the main algorithm that have engines of their own
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
        role = node.role or ""
        if role in self.own:
            return DEFAULT
        return self.generator(role) or self.train if self.apart(graph, node) else self.trainer(role)

    def apart(self, graph: Graph, node: Node) -> bool:
        """Return whether another engine than the one that trains generates here."""
        if node.role is None or node.role in self.own or node.kind is not NodeKind.ROLLOUT:
            return False
        return self.generator(node.role) is not None and issubclass(graph.roles[node.role], Policy)

    def views(self, graph: Graph, node: Node) -> bool:
        """Return whether a call may read a view of weights that the processes around it train."""
        if node.role is None or node.role in self.own:
            return False
        language = issubclass(graph.roles[node.role], (Policy, ValueModel, RewardModel))
        return language and self.runs(graph, node).planned.views

    def planned(
        self, transport: Transport = DEFAULT_TRANSPORT
    ) -> tuple[RoleEngines, dict[str, RoleEngines]]:
        others = {role: pair.planned(transport) for role, pair in self.of_roles.items()}
        own = dict.fromkeys(self.own, _OWN)
        return _Pair(self.train, self.rollout).planned(transport), others | own

    def check_generates(self, graph: Graph) -> None:
        """Refuse a step that generates, on an engine that does not, without another that does."""
        for node in graph.nodes:
            if node.kind is not NodeKind.ROLLOUT or node.role is None or node.role in self.own:
                continue
            engine = self.runs(graph, node)
            generates = engine.generates or self.apart(graph, node)
            if issubclass(graph.roles[node.role], Policy) and not generates:
                others = " or ".join(f"rollout={name}" for name in rollouts())
                raise ConfigError(
                    f"engine={engine.name} does not generate, and '{node.name}' must\n    add "
                    f"{others}"
                )


def engines_of(
    engine: EngineConfig, rollout: RolloutConfig, algorithm: AlgorithmConfig | None = None
) -> Engines:
    other = _generator(rollout.kind, "rollout.kind")
    if other is None and rollout.options:
        raise ConfigError(
            f"'rollout.options' has keys ({', '.join(rollout.options)}), but what trains generates "
            "as well\n    set engine.options, or choose a rollout"
        )
    trainer = _trainer(engine.kind, "engine.kind")
    roles = {} if algorithm is None else algorithm.roles
    of_roles: dict[str, _Pair] = {}
    for role, given in roles.items():
        if given.engine is None and given.rollout is None:
            continue
        at = f"algorithm.roles.{role}"
        if is_own(given.worker):
            raise ConfigError(
                f"'{at}' has a worker of your own and an engine\n    leave out 'engine' and "
                "'rollout': the worker computes by itself"
            )
        of_roles[role] = _Pair(
            trainer if given.engine is None else _trainer(given.engine, f"{at}.engine"),
            other if given.rollout is None else _generator(given.rollout, f"{at}.rollout"),
        )
    return Engines(
        train=trainer,
        rollout=other,
        name=engine.kind,
        options=engine.options,
        rollout_name=rollout.kind,
        rollout_options=rollout.options,
        own=frozenset(role for role, given in roles.items() if is_own(given.worker)),
        of_roles=of_roles,
    )


def _generator(name: str, at: str) -> EngineKind | None:
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


GIVEN: Mapping[str, Any] = {
    "model": ModelSpec,
    "optimizer": OptimizerSpec,
    "tokenizer": TokenizerSpec,
    "end_ids": tuple[int, ...],
    "mismatch": MismatchLimits,
    "task": TaskSpec,
    "task_fingerprint": str,
}
"""Parameter of an own worker's factory -> its type."""

_NEEDED_BY = {
    "start": "model",
    "start_mean": "model",
    "init_offset": "model",
    "optimizer": "optimizer",
    "frozen": "optimizer",
}
"""Key of a role -> the parameter by which it reaches a worker."""


def is_own(worker: str | None) -> bool:
    return ":" in (worker or "")


def asked_for(worker: str, given: RoleConfig, at: str) -> frozenset[str]:
    """Names of `GIVEN` that a factory takes and the options of its role leave to the run."""
    factory = load_object(worker, f"{at}.worker")
    try:
        taken = set(inspect.signature(factory).parameters) & GIVEN.keys() - given.options.keys()
    except (TypeError, ValueError):  # something of C, or no function at all: calling it will tell
        taken = set[str]()
    try:
        of = factory.__init__ if isinstance(factory, type) else factory
        hints: dict[str, Any] = typing.get_type_hints(of)
    except Exception:  # an annotation may be any expression, and name what cannot be found
        hints = {}
    return frozenset(name for name in taken if _is_for(hints.get(name, Any), GIVEN[name]))


def _is_for(annotation: Any, kind: Any) -> bool:
    """Return whether a parameter of that annotation is meant for something of a kind."""
    if annotation is Any or kind is TaskSpec:  # whose members are many
        return True
    return kind in (annotation, *typing.get_args(annotation))


def check_takes(worker: str, given: RoleConfig, asked: frozenset[str], at: str) -> None:
    """Refuse a factory that cannot be called, and keys of a role that would not reach its worker.

    This is before anything else of the run is done.
    """
    factory = load_object(worker, f"{at}.worker")
    try:
        inspect.signature(factory).bind(**dict.fromkeys((*asked, *given.options)))
    except TypeError as error:
        raise ConfigError(
            f"'{at}.worker': '{worker}' cannot be called: {error}\n"
            f"    its arguments are '{at}.options' and what the run gives: {', '.join(GIVEN)}"
        ) from error
    except ValueError:  # something of C without a signature: calling it will tell
        pass
    for key, needed in _NEEDED_BY.items():
        if getattr(given, key) and needed not in asked:
            kind = GIVEN[needed].__name__
            raise ConfigError(
                f"'{at}.{key}' is set, but '{worker}' does not ask for it\n"
                f"    give it a parameter '{needed}' ({kind}), or leave the key out"
            )
