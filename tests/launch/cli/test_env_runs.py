"""Runs in environments and of games, from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from penstock.launch.cli.hydra_app import compose
from penstock.launch.inputs.run import Run, resolved
from penstock.launch.run_dir.step_logs import read_metrics
from penstock.launch.stages.prepare import prepare
from penstock.launch.stages.worker_specs import worker_specs

from ..conftest import Penstock

MLP = ("model=mlp", "tracker=none")
PPO = ("algorithm=env_ppo", "task=cartpole", "model=mlp", "algorithm.num_steps=2")
SELF_PLAY = ("algorithm=self_play", "task=tic_tac_toe", *MLP, "algorithm.per_step.rows=8")
POPULATION = ("algorithm=population", "task=cartpole", *MLP, "algorithm.cfg.learning.horizon=16")


def config(*words: str) -> Run:
    composed = compose("run", list(words))
    composed.pop("resume")
    return resolved(composed)


def job(*words: str) -> Run:
    return prepare(config(*words))


def finished(penstock: Penstock, folder: Path, *words: str) -> dict[str, Any]:
    """The summary of a run, which is the only one in its folder."""
    said = penstock("run", *words, f"runs={folder}")
    assert said.code == 0, said.err
    (summary,) = folder.glob("*/summary.json")
    return {**json.loads(summary.read_text()), "said": said.err, "run": summary.parent}


def noted(folder: Path) -> dict[int, float]:
    """Steps and returns of an actor in TensorBoard's files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator(str(folder)).Reload()
    return {event.step: event.value for event in events.Scalars("evaluation/actor/return")}


def test_players_begin_with_different_weights_and_play_the_tasks_game() -> None:
    made = job(*SELF_PLAY)
    specs: dict[str, Any] = worker_specs(made.main, made, {})
    first, second = (specs[name] for name in ("first", "second"))
    assert second.network.init_seed == first.network.init_seed + 1
    assert specs["board"] == first.env == second.env
    assert (specs["board"].height, specs["board"].in_line) == (3, 3)
    assert len(made.sources["self_play"]["rows"].batch(0).game) == 8


def test_members_have_groups_of_their_own() -> None:
    rows = job(*POPULATION).sources["population"]["rows"].batch(0)
    assert torch.bincount(rows.group).tolist() == [4, 4, 4, 4]
    by_hand = job(*POPULATION, "task.group_size=2").sources["population"]["rows"].batch(0)
    assert torch.bincount(by_hand.group).tolist() == [2] * 8


@pytest.mark.slow
def test_a_language_model_can_begin_elsewhere_too() -> None:
    words = ("algorithm=sft", "task.num_train=200", "evaluation.num_prompts=0")
    seeds: list[int] = []
    for offset in ("0", "5"):
        made = job(*words, f"algorithm.roles.actor.init_offset={offset}")
        specs: dict[str, Any] = worker_specs(made.main, made, {})
        seeds.append(specs["actor"].model.init_seed)
    assert seeds[1] == seeds[0] + 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            (*POPULATION, "task.group_size=16"),
            "population needs 4 groups of 'rows', and 16 rows in groups of 16 are 1\n"
            "    raise algorithm.per_step.rows, or set task.group_size to 4 or less",
        ),
        (
            (*POPULATION, "task.normalization.rewards=true"),
            "population compares what its members have earned, and every group of environments "
            "scales rewards by what it has seen itself\n    set task.normalization.rewards=false",
        ),
        (
            ("algorithm=impala", "task=cartpole", *MLP, "model.architecture.value_bins=255"),
            "the critic that 'actor.train' trains weighs values (model.architecture.value_bins), "
            "and its loss is a squared error\n    leave value_bins out, or set two_hot of the loss:"
            " algorithm.cfg.loss.two_hot=true (env_ppo, a2c), "
            "algorithm.cfg.learning.loss.two_hot=true (self_play, population)",
        ),
        (
            (*PPO, "algorithm.cfg.loss.two_hot=true"),
            "the loss of 'actor.train' is two_hot, and its critic says one value\n    set "
            "model.architecture.value_bins=255, or leave two_hot out",
        ),
        (
            (*PPO, "task.vectorized=true", "task.backend=envpool"),
            "'task': backend is envpool, which steps groups in a way of its own and has no teams; "
            "leave out vectorized and num_agents, or the backend",
        ),
        (
            ("algorithm=self_play", "task=cartpole", *MLP),
            "self_play plays a game, and the task is none\n"
            "    choose one: task=tic_tac_toe, task=connect_four, or task=envpool_game or "
            "task=pettingzoo_game with task.id=NAME",
        ),
        (
            ("algorithm=env_ppo", "task=tic_tac_toe", *MLP),
            "env_ppo acts in environments, and the task is none\n"
            "    choose one: task=cartpole, or task=gymnasium task.id=NAME",
        ),
        (
            ("algorithm=env_ppo", "task=pettingzoo_game", "task.id=tictactoe_v3", *MLP),
            "env_ppo acts in environments, and the task is none\n"
            "    choose one: task=cartpole, or task=gymnasium task.id=NAME",
        ),
        (
            (*SELF_PLAY, "algorithm.roles.board.options.height=4"),
            "there is no key 'algorithm.roles.board.options.height'\n"
            "    a 'board' worker has: none",
        ),
        (
            ("algorithm=ppo", "algorithm.roles.critic.init_offset=1"),
            "'algorithm.roles.critic.init_offset' is set, but the role starts from 'sft', which is "
            "trained\n    leave it out; it seeds random weights",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    penstock: Penstock, words: tuple[str, ...], said: str
) -> None:
    found = penstock("run", *words)
    assert (found.code, found.err) == (2, f"penstock: {said}\n")
    assert not Path("runs").exists()


@pytest.mark.slow
def test_a_game_is_learnt_from_the_command_line(penstock: Penstock, tmp_path: Path) -> None:
    summary = finished(penstock, tmp_path, *SELF_PLAY, "algorithm.num_steps=2")
    assert summary["task"] == "3 in line on 3x3"
    assert sorted(summary["roles_sha256"]) == ["first", "second"]
    assert summary["roles_sha256"]["first"] != summary["roles_sha256"]["second"]
    assert (summary["num_episodes"], summary["episode_return_after"]) == (0, {})
    assert "share of games" in (summary["run"] / "curve.svg").read_text()
    rows = read_metrics(summary["run"] / "metrics.jsonl")
    for row in rows:  # a game takes 5 to 9 moves
        assert 5 <= row["run/env_steps_per_s"] / row["run/samples_per_s"] * 2 <= 9
    assert (summary["run"] / "models" / "second" / "model.safetensors").is_file()


@pytest.mark.slow
def test_every_member_is_measured_in_held_out_episodes(penstock: Penstock, tmp_path: Path) -> None:
    words = (*POPULATION, "algorithm.num_steps=2", "evaluation.num_episodes=17")
    summary = finished(penstock, tmp_path, *words)
    members = ["first", "fourth", "second", "third"]
    assert sorted(summary["episode_return_before"]) == members
    assert sorted(summary["episode_return_after"]) == members
    assert summary["num_episodes"] == 32  # as many in each of 16 environments


@pytest.mark.slow
def test_returns_are_measured_said_and_written_and_change_nothing(
    penstock: Penstock, tmp_path: Path
) -> None:
    found = finished(penstock, tmp_path / "with", *PPO)
    without = finished(penstock, tmp_path / "without", *PPO, "evaluation.num_episodes=0")
    before, after = (found[f"episode_return_{when}"]["actor"] for when in ("before", "after"))
    assert 9 <= before <= 500
    assert 9 <= after <= 500
    assert before != after
    said = f"actor's return {before:.4g} -> {after:.4g} in 20 held-out episodes"
    assert said in found["said"]
    last = found["said"].strip().splitlines()[-1]
    assert f"{found['env_steps_per_s']:,.0f} environment steps/s" in last
    assert "samples/s" not in found["said"]
    file = found["run"] / "evaluations" / "step-00000000.json"
    kept = json.loads(file.read_text())["suites"][""]
    assert kept["episode_return"] == {"actor": before}
    assert kept["metrics"]["actor/env.evaluate/episode_length"] == before
    assert noted(found["run"] / "tensorboard") == pytest.approx({0: before, 2: after})
    assert without["episode_return_after"] == {}
    steps = [row["env.rollout/env_steps"] for row in read_metrics(found["run"] / "metrics.jsonl")]
    assert found["env_steps_per_s"] / found["samples_per_s"] == pytest.approx(sum(steps) / 8)
    assert found["weights_sha256"] == without["weights_sha256"]


@pytest.mark.slow
def test_perceptrons_are_computed_by_one_thread_unless_more_are_asked_for() -> None:
    assert job(*PPO).executor.num_threads == 1
    assert job(*PPO, "executor.num_threads=2").executor.num_threads == 2
    assert job("algorithm=grpo").executor.num_threads is None


@pytest.mark.slow
def test_the_next_run_of_a_process_has_the_processs_own_number_of_threads(
    penstock: Penstock, tmp_path: Path
) -> None:
    before = torch.get_num_threads()
    assert before != 3
    finished(penstock, tmp_path, *PPO, "executor.num_threads=3")
    assert torch.get_num_threads() == before


@pytest.mark.slow
def test_a_run_that_is_refused_when_it_is_built_leaves_nothing(
    penstock: Penstock, tmp_path: Path
) -> None:
    words = ("algorithm=dqn", "task=cartpole", "model=mlp", "model.architecture.recurrent_units=16")
    said = penstock("run", *words, f"runs={tmp_path}")
    assert said.code == 2
    assert said.err.startswith("penstock: a Q-network cannot have a recurrent state (of 16 units)")
    assert "resume" not in said.err
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
