"""Actors and critics in environments that begin with what another run, or a stage, has trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.launch.stages.prepare import prepare
from penstock.launch.stages.worker_specs import worker_specs
from penstock.workers.envs.actors.actor_critic import TorchActorCriticSpec
from penstock.workers.envs.actors.perceptron import PerceptronSpec
from penstock.workers.envs.actors.q_learning import QNetworkSpec
from penstock.workers.envs.spec import EnvSpec
from penstock.workers.training.flat_parameters import read_tensors, tensors_sha256

from ..conftest import Penstock
from .test_env_runs import config

CARTPOLE = EnvSpec(id="CartPole-v1")
MLP = ("task=cartpole", "model=mlp", "tracker=none")
PPO = ("algorithm=env_ppo", *MLP)
DQN = ("algorithm=dqn", *MLP)
WARM_UP = (
    "algorithm.before={warm: {step: penstock.algorithms.env_ppo:env_ppo_step, num_steps: 1, "
    "per_step: {rows: 4}}}"
)


def specs(*words: str) -> dict[str, Any]:
    job = prepare(config(*words))
    return dict(worker_specs(job.main, job, {}))


def network(**fields: Any) -> PerceptronSpec:
    return PerceptronSpec(init_seed=7, **fields)


@pytest.fixture
def actor(tmp_path: Path) -> Path:
    folder = tmp_path / "actor"
    worker = TorchActorCriticSpec(env=CARTPOLE, network=network()).build(WorkerContext("a"))
    worker.save_pretrained(folder)
    return folder


@pytest.fixture
def q(tmp_path: Path) -> Path:
    folder = tmp_path / "q"
    QNetworkSpec(env=CARTPOLE, network=network()).build(WorkerContext("q")).save_pretrained(folder)
    return folder


def sha256(folder: Path) -> str:
    return tensors_sha256(read_tensors(folder / "model.safetensors"))


def test_a_role_begins_with_the_weights_of_a_folder(actor: Path) -> None:
    found = specs(*PPO, f"algorithm.roles.actor.start={actor}")["actor"]
    assert found.start == str(actor)
    assert found.build(WorkerContext("actor")).weights_sha256() == sha256(actor)
    assert specs(*PPO)["actor"].start is None
    assert specs(*PPO, "algorithm.roles.actor.start=model")["actor"].start is None


def test_the_slower_copy_begins_where_the_trained_network_does(q: Path) -> None:
    both = specs(*DQN, f"algorithm.roles.q.start={q}")
    assert {both["q"].start, both["target"].start} == {str(q)}
    apart = specs(*DQN, f"algorithm.roles.q.start={q}", "algorithm.roles.target.start=model")
    assert (apart["q"].start, apart["target"].start) == (str(q), None)


def test_players_begin_apart_unless_both_are_told(actor: Path, tmp_path: Path) -> None:
    from penstock.workers.envs.games.mnk_games import TIC_TAC_TOE

    folder = tmp_path / "player"
    spec = TorchActorCriticSpec(env=TIC_TAC_TOE, network=network())
    spec.build(WorkerContext("first")).save_pretrained(folder)
    words = ("algorithm=self_play", "task=tic_tac_toe", "model=mlp", "tracker=none")
    found = specs(*words, f"algorithm.roles.second.start={folder}")
    assert (found["first"].start, found["second"].start) == (None, str(folder))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            (*PPO, "algorithm.roles.actor.start=ACTOR", "model.architecture.hidden_sizes=[8]"),
            "'algorithm.roles.actor.start': the network in 'ACTOR' was made for something else:\n"
            "    hidden_sizes: [64, 64], and here [8]\n"
            "    use the task that it was trained on, and model.architecture as in its config.json",
        ),
        (
            (*DQN, "algorithm.roles.q.start=ACTOR"),
            "'algorithm.roles.q.start': 'ACTOR' holds a model of type 'perceptron_actor_critic', "
            "and 'perceptron_q_network' is needed\n"
            "    give a folder that such a role of another run left below its models/",
        ),
        (
            (*PPO, "algorithm.roles.actor.start=nowhere"),
            "'algorithm.roles.actor.start': 'nowhere' is neither a stage nor a model folder\n"
            "    stages are: none; a model folder holds config.json and safetensors",
        ),
        (
            (*PPO, "algorithm.roles.actor.start=ACTOR/.."),
            "'algorithm.roles.actor.start': 'ACTOR/..' is neither a stage nor a model folder\n    "
            "stages are: none; a model folder holds config.json and safetensors, as do: "
            "ACTOR/../actor",
        ),
        (
            (*DQN, "algorithm.roles.replay.start=ACTOR"),
            "'algorithm.roles.replay.start' is set, but 'replay' has no weights\n    leave it out",
        ),
        (
            (*PPO, "algorithm.roles.actor.start_mean={ACTOR: 1.0}"),
            "'algorithm.roles.actor.start_mean' is set, but 'actor_critic' starts from one folder "
            "or stage\n    leave it out",
        ),
        (
            (*DQN, WARM_UP, "algorithm.roles.q.start=warm"),
            "'algorithm.roles.q.start': stage 'warm' trains no 'q_network', so none can start from "
            "it\n    stages that do: none",
        ),
    ],
)  # fmt: skip
def test_a_start_that_does_not_fit_is_refused(
    words: tuple[str, ...], said: str, actor: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        prepare(config(*(word.replace("ACTOR", str(actor)) for word in words)))
    assert str(error.value).replace(str(actor), "ACTOR") == said


def finished(penstock: Penstock, folder: Path, *words: str) -> tuple[Path, dict[str, Any]]:
    """The only run of a folder, and its summary."""
    said = penstock("run", *words, f"runs={folder}")
    assert said.code == 0, said.err
    (summary,) = folder.glob("*/summary.json")
    return summary.parent, json.loads(summary.read_text())


@pytest.mark.slow
def test_a_run_goes_on_from_what_another_has_trained(penstock: Penstock, tmp_path: Path) -> None:
    first, trained = finished(penstock, tmp_path / "first", *PPO, "algorithm.num_steps=3")
    folder = first / "models" / "actor"
    assert sha256(folder) == trained["roles_sha256"]["actor"]
    words = (*PPO, "algorithm.num_steps=1", f"algorithm.roles.actor.start={folder}")
    _, second = finished(penstock, tmp_path / "second", *words)
    # The same held-out episodes with the same noise: equal returns mean equal weights.
    assert second["episode_return_before"] == trained["episode_return_after"]
    assert second["episode_return_before"] != trained["episode_return_before"]
    assert second["weights_sha256"] != trained["weights_sha256"]


@pytest.mark.slow
def test_what_saw_scaled_observations_sees_them_alike(penstock: Penstock, tmp_path: Path) -> None:
    words = ("algorithm=env_ppo", "task=pendulum", "model=mlp", "tracker=none")
    few = "evaluation.num_episodes=4"
    first, trained = finished(penstock, tmp_path / "first", *words, few, "algorithm.num_steps=2")
    started = (
        *words,
        few,
        "algorithm.num_steps=1",
        f"algorithm.roles.actor.start={first / 'models' / 'actor'}",
    )
    moments = f"task.normalization.start={first / 'checkpoints' / 'step-00000002' / 'env'}"
    _, same = finished(penstock, tmp_path / "same", *started, moments)
    _, other = finished(penstock, tmp_path / "other", *started)
    assert same["episode_return_before"] == trained["episode_return_after"]
    assert other["episode_return_before"] != trained["episode_return_after"]


@pytest.mark.slow
def test_a_run_goes_on_from_an_earlier_stage(penstock: Penstock, tmp_path: Path) -> None:
    words = (*PPO, WARM_UP, "algorithm.num_steps=1", "algorithm.optimizer.lr=1e-12")
    run, summary = finished(penstock, tmp_path, *words)
    warm = read_tensors(run / "stages" / "warm" / "models" / "actor" / "model.safetensors")
    last = read_tensors(run / "models" / "actor" / "model.safetensors")
    assert all((warm[name] - last[name]).abs().max() < 1e-6 for name in warm)
    assert summary["weights_sha256"] != tensors_sha256(warm)
