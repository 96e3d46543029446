"""Workers of roles that act in environments, from the sections `task` and `model`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...algorithms.losses.actor_critic import ActorCriticLoss
from ...algorithms.roles.environment import ActorCritic, Env
from ...algorithms.roles.games import BoardGame
from ...algorithms.roles.replay import QNetwork, Replay
from ...algorithms.roles.teams import TeamCritic
from ...configs.schema import ModelConfig
from ...configs.validate import validated
from ...dataflow.errors import ConfigError
from ...dataflow.graph.graph import Constant, Graph
from ...dataflow.graph.role import Role
from ...dataflow.runtime.worker_protocol import WorkerSpec
from ...workers.data.task import TaskSpec
from ...workers.envs.actors.actor_critic import TorchActorCriticSpec
from ...workers.envs.actors.perceptron import PerceptronSpec
from ...workers.envs.actors.q_network import QNetworkSpec
from ...workers.envs.actors.replay import ReplaySpec
from ...workers.envs.actors.team_critic import TeamCriticSpec
from ...workers.envs.games.boards import GameSpec
from ...workers.envs.games.mnk_games import BoardSpec
from ...workers.envs.games.task import BoardTaskSpec, LibraryGameTaskSpec
from ...workers.envs.spec import EnvSpec
from ...workers.envs.task import EnvTaskSpec
from ...workers.envs.worker import EnvWorkerSpec
from ...workers.training.optimizer import OptimizerSpec

ENV_CONTRACTS: Mapping[str, type[Role]] = {
    "env": Env,
    "board": BoardGame,
    "actor_critic": ActorCritic,
    "team_critic": TeamCritic,
    "q_network": QNetwork,
    "replay": Replay,
}
"""The workers that can be named, and the contract each fulfils."""

ENV_SPECS: Mapping[str, Any] = {
    "env": EnvWorkerSpec,
    "board": BoardSpec,
    "actor_critic": TorchActorCriticSpec,
    "team_critic": TeamCriticSpec,
    "q_network": QNetworkSpec,
    "replay": ReplaySpec,
}
"""And the class of its spec."""

NETWORKS = {name for name, spec in ENV_SPECS.items() if hasattr(spec, "network")}
"""Those that have weights."""

FILLED_IN = {"env", "network", "start", "optimizer", *BoardSpec.__dataclass_fields__}
"""Fields of these specs that the run fills in; the others may be set as `options`."""

GameTaskSpec = BoardTaskSpec | LibraryGameTaskSpec
"""A task that is a game of two players."""

MODEL_TYPE = "perceptron"
"""As `model.architecture.model_type`: the networks of actors and critics."""


def env_task(spec: TaskSpec, reader: str) -> EnvTaskSpec:
    """The task as an environment.

    Args:
        spec: The run's task.
        reader: Who needs one, for the message.

    Raises:
        ConfigError: If it is none.
    """
    if isinstance(spec, EnvTaskSpec):
        return spec
    raise ConfigError(
        f"{reader} acts in environments, and the task is none\n"
        "    choose one: task=cartpole, or task=gymnasium task.id=NAME"
    )


def acted_in(spec: TaskSpec) -> EnvTaskSpec | GameTaskSpec | None:
    """The task if it is an environment or a game, which has no problems to solve one by one."""
    return spec if isinstance(spec, EnvTaskSpec | GameTaskSpec) else None


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
    if compares and isinstance(spec, EnvTaskSpec) and spec.normalization.rewards:
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
            if not isinstance(loss, ActorCriticLoss) or loss.two_hot == weighs:
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
    if isinstance(spec, GameTaskSpec):
        return spec
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
    return validated(PerceptronSpec, seeded, "model.architecture")


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
    if worker == "replay":
        return ReplaySpec(**options)
    if worker == "env":
        return EnvWorkerSpec(env=env_task(task, reader).env, **options)
    if worker == "actor_critic" and isinstance(task, GameTaskSpec):
        env: EnvSpec | GameSpec = task.env
    else:
        env = env_task(task, reader).env
    network = perceptron_spec(model, init_offset)
    made = ENV_SPECS[worker]
    return made(env=env, network=network, start=start, optimizer=optimizer, **options)
