"""Networks of perceptrons as folders that others can read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penstock.dataflow.worker import WorkerContext
from penstock.workers.actor_network import PerceptronSpec
from penstock.workers.envs.spec import EnvSpec
from penstock.workers.q_network import QNetworkSpec
from penstock.workers.team_critic import TeamCriticSpec
from penstock.workers.torch_actor_critic import TorchActorCriticSpec
from penstock.workers.weights import read_tensors, tensors_sha256
from torch import Tensor, nn

NETWORK = PerceptronSpec(hidden_sizes=(8, 6), activation="relu", init_seed=4)
CARTPOLE = EnvSpec(id="CartPole-v1")
TEAM = EnvSpec(id="penstock.workers.envs.cover:penstock/Cover-v0", num_agents=3)
SPECS = {
    "perceptron_actor_critic": TorchActorCriticSpec(network=NETWORK, env=CARTPOLE),
    "perceptron_q_network": QNetworkSpec(network=NETWORK, env=CARTPOLE),
    "perceptron_team_critic": TeamCriticSpec(network=NETWORK, env=TEAM),
}


def saved(kind: str, folder: Path) -> tuple[Any, dict[str, Any], dict[str, Tensor]]:
    worker: Any = SPECS[kind].build(WorkerContext("role", 1))
    worker.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    return worker, config, read_tensors(folder / "model.safetensors")


@pytest.mark.parametrize("kind", SPECS)
def test_a_folder_holds_the_weights_and_what_they_are_of(kind: str, tmp_path: Path) -> None:
    worker, config, tensors = saved(kind, tmp_path)
    assert (config["model_type"], config["hidden_sizes"]) == (kind, [8, 6])
    assert tensors_sha256(tensors) == worker.weights_sha256()


@pytest.mark.parametrize("kind", SPECS)
def test_one_rank_writes(kind: str, tmp_path: Path) -> None:
    worker: Any = SPECS[kind].build(WorkerContext("role", 1))
    worker.context = dataclasses.replace(worker.context, rank=1)
    worker.save_pretrained(tmp_path / "other")
    assert not (tmp_path / "other").exists()


def through(layers: dict[str, Tensor], name: str, obs: Tensor) -> Tensor:
    """Three layers by hand."""
    for index in (0, 2, 4):
        obs = nn.functional.linear(
            obs, layers[f"{name}.{index}.weight"], layers[f"{name}.{index}.bias"]
        )
        obs = obs if index == 4 else obs.relu()
    return obs


def test_a_q_networks_folder_says_what_choices_are_worth(tmp_path: Path) -> None:
    worker, config, tensors = saved("perceptron_q_network", tmp_path)
    assert (config["num_features"], config["actions"]["sizes"]) == (4, [2])
    obs = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 1, 4)).astype(np.float32))
    worth = through(tensors, "layers", obs)
    assert torch.equal(worth.argmax(-1, keepdim=True).float(), worker.best(obs))


def test_a_team_critics_folder_says_what_states_are_worth(tmp_path: Path) -> None:
    worker, config, tensors = saved("perceptron_team_critic", tmp_path)
    width = config["num_features"] * config["num_agents"]
    obs = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 5, width)).astype(np.float32))
    found = worker.value(obs, obs[:, -1])
    assert torch.allclose(through(tensors, "critic", obs)[..., 0], found.value, atol=1e-6)
