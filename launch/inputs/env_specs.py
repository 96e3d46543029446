"""Workers of roles that act in environments, from the sections `task` and `model`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from ...algorithms.roles.environment import ActorCritic
from ...configs.schema import ModelConfig
from ...configs.validate import validated
from ...dataflow.errors import ConfigError
from ...dataflow.graph.graph import Constant, Graph
from ...dataflow.graph.role import Role
from ...dataflow.registry import Registry
from ...dataflow.runtime.worker_protocol import WorkerSpec
from ...workers.data.task import TaskSpec
from ...workers.training.optimizer import OptimizerSpec

if TYPE_CHECKING:
    from ...workers.envs.actors.perceptron import PerceptronSpec
    from ...workers.envs.games.libraries import LibraryGameTaskSpec
    from ...workers.envs.games.mnk_games import BoardTaskSpec
    from ...workers.envs.task import EnvTaskSpec

    GameTaskSpec = BoardTaskSpec | LibraryGameTaskSpec

ENV_CONTRACTS = Registry[type[Role]](
    {
        "env": "penstock.algorithms.roles.environment:Env",
        "board": "penstock.algorithms.roles.environment:BoardGame",
        "actor_critic": "penstock.algorithms.roles.environment:ActorCritic",
        "team_critic": "penstock.algorithms.roles.environment:TeamCritic",
        "q_network": "penstock.algorithms.roles.environment:QNetwork",
        "replay": "penstock.algorithms.roles.environment:Replay",
    }
)
"""The workers that can be named, and the contract of each."""

ENV_SPECS = Registry[Any](
    {
        "env": "penstock.workers.envs.worker:EnvWorkerSpec",
        "board": "penstock.workers.envs.games.mnk_games:BoardSpec",
        "actor_critic": "penstock.workers.envs.actors.actor_critic:TorchActorCriticSpec",
        "team_critic": "penstock.workers.envs.actors.value_networks:TeamCriticSpec",
        "q_network": "penstock.workers.envs.actors.value_networks:QNetworkSpec",
        "replay": "penstock.workers.envs.actors.replay:ReplaySpec",
    }
)
"""The workers that can be named, and the spec of each."""

NETWORKS = frozenset({"actor_critic", "team_critic", "q_network"})
"""Those that have weights."""

NETWORK_SPECS = Registry[Any](
    {"perceptron": "penstock.workers.envs.actors.perceptron:PerceptronSpec"}
)
"""`model.architecture.model_type` -> the spec of networks that act in environments."""

(MODEL_TYPE,) = NETWORK_SPECS

_OF_THE_RULES = frozenset({"height", "width", "in_line", "gravity"})
FILLED_IN = frozenset({"env", "network", "start", "optimizer"}) | _OF_THE_RULES
"""Fields of these specs that the run fills in; the others may be set as `options`."""


def env_task(spec: TaskSpec, reader: str) -> EnvTaskSpec:
    """The task as an environment.

    Args:
        spec: The run's task.
        reader: Who needs one, for the message.

    Raises:
        ConfigError: If it is none.
    """
    if getattr(spec, "acts_in", None) == "environment":
        return cast("EnvTaskSpec", spec)
    raise ConfigError(
        f"{reader} acts in environments, and the task is none\n"
        "    choose one: task=cartpole, or task=gymnasium task.id=NAME"
    )


def acted_in(spec: TaskSpec) -> EnvTaskSpec | GameTaskSpec | None:
    """Return the task if it is an environment or a game, which has no problems to solve."""
    return cast("EnvTaskSpec | GameTaskSpec", spec) if hasattr(spec, "acts_in") else None


def refuse_scaled_fitness(graph: Graph, spec: EnvTaskSpec | GameTaskSpec) -> None:
    """Require rewards as they are of a step that compares what its actors have earned.

    Raises:
        ConfigError: If each group of environments scales rewards by what it has seen itself.
    """
    compares = any(
        node.role is not None
        and issubclass(graph.roles[node.role], ActorCritic)
        and node.method == ActorCritic.inherit.__name__
        for node in graph.nodes
    )
    if compares and spec.acts_in == "environment" and spec.normalization.rewards:
        raise ConfigError(
            f"{graph.name} compares what its members have earned, and every group of environments "
            "scales rewards by what it has seen itself\n    set task.normalization.rewards=false"
        )


def refuse_other_value_loss(graph: Graph, architecture: Mapping[str, Any]) -> None:
    """Require of every actor's critic that its loss is the one for how it says values.

    Args:
        graph: The step.
        architecture: The networks', from the section `model`.

    Raises:
        ConfigError: If the critic weighs values and its loss is a squared error, or the reverse.
    """
    weighs = architecture.get("value_bins") is not None
    for node in graph.nodes:
        for _, argument in node.arguments:
            loss = argument.value if isinstance(argument, Constant) else None
            two_hot = getattr(loss, "two_hot", None)
            if two_hot is None or two_hot == weighs:
                continue
            if weighs:
                raise ConfigError(
                    f"the critic that '{node.name}' trains weighs values (model.architecture."
                    "value_bins), and its loss is a squared error\n    leave value_bins out, or set"
                    " two_hot of the loss: algorithm.cfg.loss.two_hot=true (env_ppo, a2c), "
                    "algorithm.cfg.learning.loss.two_hot=true (self_play, population)"
                )
            raise ConfigError(
                f"the loss of '{node.name}' is two_hot, and its critic says one value\n    set "
                "model.architecture.value_bins=255, or leave two_hot out"
            )


def game_task(spec: TaskSpec, reader: str) -> GameTaskSpec:
    """The task as a game; raises as `env_task`."""
    if getattr(spec, "acts_in", None) == "game":
        return cast("GameTaskSpec", spec)
    raise ConfigError(
        f"{reader} plays a game, and the task is none\n"
        "    choose one: task=tic_tac_toe, task=connect_four, or task=envpool_game or "
        "task=pettingzoo_game with task.id=NAME"
    )


def perceptron_spec(model: ModelConfig, init_offset: int = 0) -> PerceptronSpec:
    """The networks that the section `model` describes.

    Args:
        model: The section.
        init_offset: Added to their seed.

    Raises:
        ConfigError: If it describes something else.
    """
    architecture = dict(model.architecture)
    kind = architecture.pop("model_type", None)
    if kind != MODEL_TYPE:
        raise ConfigError(
            f"'model' is {'a folder' if kind is None else repr(kind)}, and an actor in an "
            f"environment needs model_type {MODEL_TYPE!r}\n    choose model=mlp"
        )
    seeded = {"init_seed": model.init_seed + init_offset, **architecture}
    return validated(NETWORK_SPECS[kind], seeded, "model.architecture")


def env_worker(
    worker: str,
    model: ModelConfig,
    task: TaskSpec,
    optimizer: OptimizerSpec | None,
    options: Mapping[str, Any],
    init_offset: int = 0,
    start: str | None = None,
) -> WorkerSpec:
    """The spec of a worker.

    Args:
        worker: A name of `ENV_SPECS`.
        model: The section that describes its networks.
        task: The run's task.
        optimizer: Of a trained role.
        options: Further fields of the spec.
        init_offset: Of the seed of its weights.
        start: A folder from which its weights come instead.

    Raises:
        ConfigError: If task or model are none for it.
    """
    reader = f"a worker '{worker}'"
    if worker == "board":
        return game_task(task, reader).env
    kind = ENV_SPECS[worker]
    if worker == "replay":
        return kind(**options)
    if worker == "env":
        return kind(env=env_task(task, reader).env, **options)
    acted = acted_in(task) if worker == "actor_critic" else None
    env = (acted or env_task(task, reader)).env
    network = perceptron_spec(model, init_offset)
    return kind(env=env, network=network, start=start, optimizer=optimizer, **options)
