"""Every algorithm of `configs/algorithm` as something small that can be run, as a run composes it.

Only sizes are smaller: a tiny model from random weights, few prompts, short responses, and a reward
that tells the responses of an untrained policy apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import penstock.configs
from penstock.algorithms.roles import Reward
from penstock.configs.schema import RunConfig
from penstock.dataflow.graph.graph import Graph
from penstock.dataflow.graph.role import Role
from penstock.dataflow.runtime.engine import Source
from penstock.dataflow.runtime.worker_protocol import WorkerSpec
from penstock.launch.cli.hydra_app import compose
from penstock.launch.inputs.data import load_data, sources_of
from penstock.launch.inputs.record import load_step, step_cfg
from penstock.launch.inputs.run import resolve, run_config
from penstock.launch.stages.prepare import build_stages
from penstock.launch.stages.worker_specs import worker_specs
from torch import Tensor

NAMES = sorted(
    path.stem
    for path in (Path(str(penstock.configs.__file__)).parent / "algorithm").glob("*.yaml")
    if path.stem != "own"  # it is complete only with a step
)
"""The shipped algorithms, by the names of their YAML files."""

_SMALL = [
    "model.architecture.hidden_size=32",
    "model.architecture.intermediate_size=64",
    "model.architecture.num_hidden_layers=2",
    "+model.architecture.initializer_range=0.2",
    "task.num_train=300",
    "task.num_held_out=16",
    "algorithm.optimizer.lr=1e-3",
]

_CLASSIC = ("task=cartpole", "model=mlp")

_IN_ENVIRONMENTS = {
    "a2c": _CLASSIC,
    "dqn": (*_CLASSIC, "algorithm.cfg.min_stored=64"),
    "env_ppo": _CLASSIC,
    "impala": _CLASSIC,
    "mappo": ("task=cover", "model=mlp"),
    "population": (*_CLASSIC, "algorithm.cfg.learning.horizon=16", "algorithm.cfg.select_every=2"),
    "self_play": ("task=tic_tac_toe", "model=mlp"),
}
"""Algorithms whose task is an environment, and what makes one small."""


_TALKING = (
    *(word for word in _SMALL if not word.startswith("task.num_train")),
    "task=own",
    "task.kind=tests.workers.echo_task:EchoSpec",
    "+task.num_train=40",
    "task.max_response_tokens=6",
    "task.max_total_tokens=48",
    "task.max_turns=3",
)

_IN_CONVERSATION = dict.fromkeys(("agent_grpo", "agent_ppo", "archer", "refuel"), _TALKING)
"""Algorithms whose task has environments that answer in words."""


class ParityReward(Reward):
    """1 for a response whose first token is even, else 0."""

    def score(self, tokens: Tensor, mask: Tensor, prompt_id: Tensor) -> Tensor:
        first = mask & (mask.cumsum(1) == 1)
        return (tokens.masked_fill(~first, 0).sum(1) % 2 == 0).float()


@dataclass(frozen=True)
class Configured:
    """A step function with everything it needs."""

    step: Any
    cfg: Any
    graph: Graph
    sources: Mapping[str, Source]
    workers: Mapping[str, WorkerSpec | Role]

    @property
    def trained(self) -> tuple[str, ...]:
        """The roles that the step trains."""
        return tuple(self.graph.trains_per_step)


@cache
def composed(name: str, *overrides: str) -> RunConfig:
    """The algorithm's configuration, made small."""
    small = {**_IN_ENVIRONMENTS, **_IN_CONVERSATION}.get(name, _SMALL)
    data = compose("run", [f"algorithm={name}", *small, *overrides])
    data.pop("resume")
    algorithm = data["algorithm"]
    rounds = algorithm.get("cfg", {}).get("filling", {}).get("max_rounds", 1)
    rows = 6 if name == "mappo" else 8 * rounds  # whole teams
    algorithm["per_step"] = dict.fromkeys(algorithm["per_step"], rows)
    algorithm["before"] = {}
    for role in algorithm.get("roles", {}).values():
        role.pop("start", None)  # the stages that they start from
        role.pop("start_mean", None)
    sampling = algorithm.get("cfg", {}).get("sampling")
    if sampling is not None:
        sampling["num_samples"] = min(sampling.get("num_samples", 1), 4)
    algorithm["optimizer"].pop("total_calls", None)
    algorithm["optimizer"]["schedule"] = "constant"
    return run_config(data)


def options_of(name: str, *overrides: str) -> Any:
    """An algorithm's options as a run has them; None if it has none."""
    algorithm = composed(name, *overrides).algorithm
    step = load_step(algorithm.step, "algorithm.step")
    return step_cfg(step, algorithm.cfg, "algorithm.cfg").get("cfg")


def configured(name: str, *overrides: str) -> Configured:
    """One of `NAMES`, ready to run."""
    config = composed(name, *overrides)
    for role, contract in resolve(config).main.graph.roles.items():
        if contract is Reward:
            given = config.algorithm.roles.get(role)
            if given is None or given.worker in (None, "mixture"):
                config.algorithm.roles[role] = _reward()
    run = resolve(config)
    stage = build_stages(run).stages[-1]
    data = load_data(run.config.task, run.model)
    sources, _ = sources_of(stage, data)
    step = load_step(config.algorithm.step, "algorithm.step")
    return Configured(
        step=step,
        cfg=step_cfg(step, config.algorithm.cfg, "algorithm.cfg").get("cfg"),
        graph=stage.graph,
        sources=sources,
        workers=worker_specs(stage, replace(run, data=data), {}),
    )


def _reward() -> Any:
    from penstock.configs.schema import RoleConfig

    return RoleConfig(worker=f"{__name__}:ParityReward")
