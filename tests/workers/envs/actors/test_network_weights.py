"""Networks of perceptrons as folders that others can read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.envs.actors.actor_critic import TeamCriticSpec, TorchActorCriticSpec
from penstock.workers.envs.actors.perceptron import PerceptronSpec
from penstock.workers.envs.actors.q_learning import QNetworkSpec
from penstock.workers.envs.spec import EnvSpec
from penstock.workers.training.flat_parameters import read_tensors, tensors_sha256, write_tensors
from penstock.workers.training.optimizer import OptimizerSpec
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


@pytest.mark.parametrize("kind", SPECS)
def test_a_worker_begins_with_the_weights_of_a_folder(kind: str, tmp_path: Path) -> None:
    worker, _, tensors = saved(kind, tmp_path)
    seeded = dataclasses.replace(NETWORK, init_seed=5)
    spec: Any = dataclasses.replace(SPECS[kind], network=seeded)
    begun = dataclasses.replace(spec, start=str(tmp_path)).build(WorkerContext("role", 2))
    assert begun.weights_sha256() == worker.weights_sha256() == tensors_sha256(tensors)
    assert spec.build(WorkerContext("role", 2)).weights_sha256() != worker.weights_sha256()


def test_an_actor_acts_and_learns_from_there(tmp_path: Path) -> None:
    saved("perceptron_actor_critic", tmp_path)
    spec = TorchActorCriticSpec(
        network=NETWORK, env=CARTPOLE, start=str(tmp_path), optimizer=OptimizerSpec()
    )
    begun = spec.build(WorkerContext("actor"))
    layers = read_tensors(tmp_path / "model.safetensors")
    obs = torch.tensor([[0.3, -0.2, 0.1, 0.9]])
    first = through(layers, "actor", obs).softmax(1)[0, 0].item()
    for uniform, choice in ((first - 1e-3, 0), (first + 1e-3, 1)):
        found = begun.act(obs.numpy(), np.array([[uniform]]), None)
        assert found.action.tolist() == [[choice]]
    with torch.no_grad():  # what the optimizer writes into is what acts
        begun.network.flat.data.mul_(50)
    begun.weights_changed()
    changed = begun.act(obs.numpy(), np.array([[first]]), None).logprob
    assert not np.isclose(np.exp(changed[0]), first, atol=1e-2)


REFUSED = {
    "layers": (
        "perceptron_actor_critic",
        TorchActorCriticSpec(
            env=CARTPOLE, network=PerceptronSpec(hidden_sizes=(8,), recurrent_units=2)
        ),
        "the network in 'HERE' was made for something else:\n"
        "    hidden_sizes: [8, 6], and here [8]\n"
        '    activation: "relu", and here "tanh"\n'
        "    recurrent_units: 0, and here 2\n"
        "    use the task that it was trained on, and model.architecture as in its config.json",
    ),
    "spaces": (
        "perceptron_actor_critic",
        TorchActorCriticSpec(env=EnvSpec(id="Acrobot-v1"), network=NETWORK),
        "the network in 'HERE' was made for something else:\n"
        "    num_features: 4, and here 6\n"
        '    actions: {"kind": "discrete", "sizes": [2], "low": [], "high": [], "masked": false}, '
        'and here {"kind": "discrete", "sizes": [3], "low": [], "high": [], "masked": false}\n'
        "    use the task that it was trained on, and model.architecture as in its config.json",
    ),
    "kind": (
        "perceptron_actor_critic",
        QNetworkSpec(env=CARTPOLE, network=NETWORK),
        "'HERE' holds a model of type 'perceptron_actor_critic', and 'perceptron_q_network' is "
        "needed\n    give a folder that such a role of another run left below its models/",
    ),
    "agents": (
        "perceptron_team_critic",
        TeamCriticSpec(env=dataclasses.replace(TEAM, options={"num_agents": 2}, num_agents=2),
                       network=NETWORK),
        "the network in 'HERE' was made for something else:\n"
        "    num_features: 6, and here 4\n"
        "    num_agents: 3, and here 2\n"
        "    use the task that it was trained on, and model.architecture as in its config.json",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_does_not_fit_is_refused(case: str, tmp_path: Path) -> None:
    kind, spec, said = REFUSED[case]
    saved(kind, tmp_path)
    started: Any = dataclasses.replace(spec, start=str(tmp_path))
    with pytest.raises(ConfigError) as error:
        started.build(WorkerContext("role"))
    assert str(error.value).replace(str(tmp_path), "HERE") == said


def test_a_folder_without_a_network_is_refused(tmp_path: Path) -> None:
    spec = TorchActorCriticSpec(network=NETWORK, env=CARTPOLE, start=str(tmp_path))
    with pytest.raises(ConfigError, match="has no config.json to read") as error:
        spec.build(WorkerContext("actor"))
    assert "as models/actor" in str(error.value)
    saved("perceptron_actor_critic", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="does not exist; expected a safetensors file there"):
        spec.build(WorkerContext("actor"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        spec.build(WorkerContext("actor"))


DAMAGED: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda t: t.pop("actor.0.bias"), "missing: actor.0.bias"),
    "unexpected": (lambda t: t.update(foo=torch.zeros(1)), "unexpected: foo"),
    "nan": (lambda t: t["critic.0.bias"].fill_(torch.nan), "not finite: critic.0.bias"),
    "int": (
        lambda t: t.update({"actor.0.bias": torch.zeros(8, dtype=torch.int32)}),
        "of a type that is no floating point: actor.0.bias int32",
    ),
    "shape": (
        lambda t: t.update({"actor.0.bias": torch.zeros(9)}),
        "of another shape: actor.0.bias [9], expected [8]",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_weights_that_are_not_the_networks_are_refused_by_name(case: str, tmp_path: Path) -> None:
    change, line = DAMAGED[case]
    saved("perceptron_actor_critic", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = read_tensors(file)
    change(tensors)
    write_tensors(file, tensors)
    spec = TorchActorCriticSpec(network=NETWORK, env=CARTPOLE, start=str(tmp_path))
    with pytest.raises(ConfigError) as error:
        spec.build(WorkerContext("actor"))
    assert str(error.value) == (
        f"the weights in '{file}' are not those of the network that the config.json beside it "
        f"says:\n    {line}\n    copy or save them again, all of them, with the configuration they "
        "were made by"
    )
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ConfigError, match="is no whole safetensors file: .*\n    copy it again"):
        spec.build(WorkerContext("actor"))


def test_a_folder_with_the_old_name_of_the_recurrent_units_is_read(tmp_path: Path) -> None:
    network = PerceptronSpec(hidden_sizes=(8,), recurrent_units=2)
    made = TorchActorCriticSpec(env=CARTPOLE, network=network, optimizer=OptimizerSpec())
    worker = made.build(WorkerContext("actor"))
    worker.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["memory"] = config.pop("recurrent_units")
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = TorchActorCriticSpec(network=network, env=CARTPOLE, start=str(tmp_path))
    assert spec.build(WorkerContext("actor")).weights_sha256() == worker.weights_sha256()


def test_what_an_older_folder_does_not_know_is_at_its_default(tmp_path: Path) -> None:
    worker, config, _ = saved("perceptron_actor_critic", tmp_path)
    del config["recurrent_units"], config["value_bins"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = TorchActorCriticSpec(network=NETWORK, env=CARTPOLE, start=str(tmp_path))
    assert spec.build(WorkerContext("actor")).weights_sha256() == worker.weights_sha256()
