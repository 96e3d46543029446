"""Recurrent actors: one result wherever they act, and they learn what needs a recurrent state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from penstock.algorithms.env_ppo import EnvPPO, env_ppo_step
from penstock.algorithms.papers.self_play import SelfPlay, self_play_step
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.placement import one_group
from penstock.launch.run_dir.checkpoint import CheckpointStore
from penstock.workers.envs.actors.actor_critic import TorchActorCriticSpec
from penstock.workers.envs.actors.perceptron import PerceptronSpec
from penstock.workers.envs.games.mnk_games import TIC_TAC_TOE
from penstock.workers.envs.spec import EnvSpec
from penstock.workers.envs.task import EnvRowSource, GameRowSource
from penstock.workers.envs.worker import EnvWorkerSpec
from penstock.workers.training.optimizer import OptimizerSpec

from ..workers.envs.toys import register_all
from .configured import Configured, configured
from .eager import check_eager_equals_graph

STEPS = 6


@pytest.fixture(autouse=True)
def _toys() -> None:  # pyright: ignore[reportUnusedFunction]
    register_all()


def recalling(units: int, **cfg: Any) -> Configured:
    """Recall, by PPO."""
    env = EnvSpec(id="toys/Recall-v0")
    network = PerceptronSpec(hidden_sizes=(16,), recurrent_units=units)
    actor = TorchActorCriticSpec(
        env=env, network=network, optimizer=OptimizerSpec(lr=5e-3, max_grad_norm=0.5)
    )
    options = EnvPPO(**cfg)
    return Configured(
        env_ppo_step,
        options,
        build(env_ppo_step, cfg=options),
        {"rows": EnvRowSource(32, 16)},
        {"env": EnvWorkerSpec(env=env), "actor": actor},
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["env_ppo", "a2c", "impala"])
def test_by_hand_and_as_a_graph_bit_for_bit(name: str) -> None:
    check_eager_equals_graph(configured(name, "model.architecture.recurrent_units=8"))


def test_players_may_remember() -> None:
    cfg = SelfPlay(learning=EnvPPO(epochs=1, num_minibatches=2))
    players = {
        name: TorchActorCriticSpec(
            env=TIC_TAC_TOE,
            network=PerceptronSpec(hidden_sizes=(16,), recurrent_units=units),
            optimizer=OptimizerSpec(lr=3e-3),
        )
        for name, units in (("first", 8), ("second", 5))
    }
    check_eager_equals_graph(
        Configured(
            self_play_step,
            cfg,
            build(self_play_step, cfg=cfg),
            {"rows": GameRowSource(6, 3)},
            {"board": TIC_TAC_TOE, **players},
        )
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "dqn",
            "a Q-network cannot have a recurrent state (of 8 units): a replay keeps single steps",
        ),
        (
            "mappo",
            "a team's critic cannot have a recurrent state (of 8 units): it is shown single states",
        ),
    ],
)
def test_who_cannot_remember_refuses(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(name, "model.architecture.recurrent_units=8")
    assert str(caught.value) == (
        f"{said}\n    leave out model.architecture.recurrent_units; env_ppo, a2c, impala, "
        "self_play and population learn with one"
    )


def test_a_run_that_was_stopped_ends_the_same(tmp_path: Path) -> None:
    run = recalling(8, horizon=7, epochs=1)

    def engine() -> Engine:
        return Engine(run.graph, one_group(run.graph), workers=run.workers, seed=2)

    with engine() as one:
        list(one.run(run.sources, STEPS))
        expected = one.call("actor", "weights_sha256")
    store = CheckpointStore(tmp_path, keep=2)
    saving: dict[str, Any] = {"checkpoint_every": 2, "checkpoints": store}
    with engine() as stopped:
        list(stopped.run(run.sources, 4, **saving))
    with engine() as resumed:
        assert len(list(resumed.run(run.sources, STEPS, **saving))) == 2
        assert resumed.call("actor", "weights_sha256") == expected


@pytest.mark.slow
def test_only_who_remembers_learns_what_was_shown_before() -> None:
    last: dict[int, float] = {}
    for units in (0, 16):
        run = recalling(units, horizon=16, discount=0.95, num_minibatches=2)
        with Engine(run.graph, one_group(run.graph), workers=run.workers, seed=1) as engine:
            steps = [step.metrics for step in engine.run(run.sources, 20)]
        last[units] = sum(step["env.rollout/episode_return"] for step in steps[-5:]) / 5
    assert last[0] < 0.65
    assert last[16] > 0.9
