"""Workers of roles that act in environments, from the sections `task` and `model`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..algorithms.env_roles import ActorCritic, Env
from ..algorithms.replay_roles import QNetwork, Replay
from ..algorithms.team_roles import TeamCritic
from ..configs.schema import RunConfig
from ..configs.validate import validated
from ..dataflow.errors import ConfigError
from ..dataflow.role import Role
from ..dataflow.worker import WorkerSpec
from ..workers.actor_network import PerceptronSpec
from ..workers.envs.task import EnvTaskSpec
from ..workers.envs.worker import EnvWorkerSpec
from ..workers.optimizer import OptimizerSpec
from ..workers.q_network import QNetworkSpec
from ..workers.replay import ReplaySpec
from ..workers.task import TaskSpec
from ..workers.team_critic import TeamCriticSpec
from ..workers.torch_actor_critic import TorchActorCriticSpec

__all__ = ["ENV_CONTRACTS", "ENV_SPECS", "FILLED_IN", "env_task", "env_worker", "perceptron_spec"]

ENV_CONTRACTS: Mapping[str, type[Role]] = {
    "env": Env,
    "actor_critic": ActorCritic,
    "team_critic": TeamCritic,
    "q_network": QNetwork,
    "replay": Replay,
}
"""The workers that can be named, and the contract each fulfils."""

ENV_SPECS: Mapping[str, Any] = {
    "env": EnvWorkerSpec,
    "actor_critic": TorchActorCriticSpec,
    "team_critic": TeamCriticSpec,
    "q_network": QNetworkSpec,
    "replay": ReplaySpec,
}
"""And the class of its spec."""

FILLED_IN = {"env", "network", "optimizer"}
"""Fields of these specs that the run fills in; the others may be set as `options`."""

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
        f"{reader} acts in environments, and the task is none ({type(spec).__name__})\n"
        "    choose one: task=cartpole, or task=gymnasium task.id=NAME"
    )


def perceptron_spec(config: RunConfig) -> PerceptronSpec:
    """The networks that the section `model` describes.

    Raises:
        ConfigError: If it describes something else.
    """
    architecture = dict(config.model.architecture)
    kind = architecture.pop("model_type", None)
    if kind != MODEL_TYPE:
        raise ConfigError(
            f"'model' is {'a folder' if kind is None else repr(kind)}, and an actor in an "
            f"environment needs model_type {MODEL_TYPE!r}\n    choose model=mlp"
        )
    seeded = {"init_seed": config.model.init_seed, **architecture}
    return validated(PerceptronSpec, seeded, "model.architecture")


def env_worker(
    worker: str,
    config: RunConfig,
    task: TaskSpec,
    optimizer: OptimizerSpec | None,
    options: Mapping[str, Any],
) -> WorkerSpec:
    """The spec of a worker.

    Args:
        worker: A name of `ENV_SPECS`.
        config: The run's configuration.
        task: Its task.
        optimizer: Of a trained role.
        options: Further fields of the spec.

    Raises:
        ConfigError: If task or model are none for it.
    """
    env = env_task(task, f"a worker '{worker}'").env
    if worker == "env":
        return EnvWorkerSpec(env=env, **options)
    if worker == "replay":
        return ReplaySpec(**options)
    network = perceptron_spec(config)
    return ENV_SPECS[worker](env=env, network=network, optimizer=optimizer, **options)
