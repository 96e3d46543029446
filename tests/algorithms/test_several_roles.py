"""Graphs that train several roles in environments: self-play, and a population that selects."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from penstock.algorithms.env_ppo import EnvPPO
from penstock.algorithms.papers.population import Population, mean_return, own_rows, population_step
from penstock.algorithms.papers.self_play import SelfPlay, self_play_step
from penstock.dataflow.errors import WorkerError
from penstock.dataflow.graph.role import Role
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime.call_context import step_scope
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.placement import DeviceGroup, Placement
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.envs.actors.actor_critic import TorchActorCritic, TorchActorCriticSpec
from penstock.workers.envs.actors.perceptron import PerceptronSpec, inherit_weights
from penstock.workers.envs.games.libraries import LibraryGameSpec
from penstock.workers.envs.games.mnk_games import CONNECT_FOUR, BoardSpec
from penstock.workers.envs.spec import EnvSpec
from penstock.workers.envs.task import EnvRowSource, GameRowSource
from penstock.workers.envs.worker import EnvWorkerSpec
from penstock.workers.training.optimizer import OptimizerSpec

from .configured import Configured
from .eager import check_eager_equals_graph, weights_of

CARTPOLE = EnvSpec(id="CartPole-v1")
MEMBERS = ("first", "second", "third", "fourth")


def actor(env: Any, seed: int) -> TorchActorCriticSpec:
    network = PerceptronSpec(hidden_sizes=(16,), init_seed=seed)
    return TorchActorCriticSpec(env=env, network=network, optimizer=OptimizerSpec(lr=3e-3))


def self_play(board: BoardSpec | LibraryGameSpec = CONNECT_FOUR) -> Configured:
    cfg = SelfPlay(learning=EnvPPO(epochs=2, num_minibatches=2))
    workers = {"board": board, "first": actor(board, 0), "second": actor(board, 1)}
    graph = build(self_play_step, cfg=cfg)
    return Configured(self_play_step, cfg, graph, {"rows": GameRowSource(6, 3)}, workers)


def population(**options: Any) -> Configured:
    cfg = Population(
        learning=EnvPPO(horizon=32, epochs=1, num_minibatches=2), select_every=2, **options
    )
    members = {name: actor(CARTPOLE, seed) for seed, name in enumerate(MEMBERS)}
    workers = {"env": EnvWorkerSpec(env=CARTPOLE), **members}
    graph = build(population_step, cfg=cfg)
    return Configured(population_step, cfg, graph, {"rows": EnvRowSource(8, 2)}, workers)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="EnvPool is installed on Linux")
@pytest.mark.parametrize(("game", "max_turns"), [("LeducHoldem-v1", 4), ("Hex-v1", 7)])
def test_self_play_of_cards_and_of_games_cut_off(game: str, max_turns: int) -> None:
    check_eager_equals_graph(self_play(LibraryGameSpec(id=game, max_turns=max_turns)))


@pytest.mark.skipif(sys.platform != "linux", reason="EnvPool is installed on Linux")
@pytest.mark.slow
def test_equal_rules_train_equal_players() -> None:
    """Whose connect four it is makes no difference to a single bit of what is learnt."""
    boards = [
        LibraryGameSpec(id="ConnectFour-v1", max_turns=21),
        LibraryGameSpec(id="connect_four_v3", backend="pettingzoo", max_turns=21),
    ]
    one, other = (final(run, placed(run, None)) for run in map(self_play, boards))
    assert one == other


def final(run: Configured, placement: Placement) -> dict[str, dict[str, bytes]]:
    executor = InProcess()
    with Engine(run.graph, placement, workers=run.workers, executor=executor) as engine:
        for _ in engine.run(run.sources, 4):
            pass
        return {
            role: weights_of(executor.role(placement.home(run.graph, role) or "", role))
            for role in run.trained
        }


def placed(run: Configured, apart: str | None) -> Placement:
    """One role's nodes on a group of their own, but for what is asked of others with it."""
    groups = (DeviceGroup("all"), DeviceGroup("own"))
    nodes = {
        node.name: "own" if node.role == apart and apart else "all"
        for node in run.graph.nodes
        if node.role or node.function
    }
    used = tuple(group for group in groups if group.name in nodes.values())
    return Placement(used, nodes, num_chunks=1)


@pytest.mark.slow
@pytest.mark.parametrize("make", [self_play, population], ids=["self_play", "population"])
def test_a_role_may_train_on_a_group_of_its_own(make: Any) -> None:
    run = make()
    assert final(run, placed(run, None)) == final(run, placed(run, "second"))


def test_each_member_has_its_own_environments() -> None:
    rows = EnvRowSource(8, 2).batch(0)
    parts = [own_rows(rows, member=member, num_members=4) for member in range(4)]
    assert [part.env.tolist() for part in parts] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_the_mean_return_counts_episodes_that_ended() -> None:
    reward = torch.ones(2, 4)
    mask = torch.tensor([[True, True, False, True], [True, True, True, True]])
    ends = torch.zeros(2, 4, dtype=torch.bool)
    over = ends.clone()
    over[0, 1] = over[1, 3] = True
    assert mean_return(reward, mask, terminated=over, truncated=ends).tolist() == [3.5, 3.5]
    assert mean_return(reward, mask, terminated=ends, truncated=over).tolist() == [3.5, 3.5]
    assert mean_return(reward, mask, terminated=ends, truncated=ends).tolist() == [7, 7]


def members() -> tuple[TorchActorCritic, TorchActorCritic]:
    built = [
        actor(CARTPOLE, seed).build(WorkerContext(name, seed=5))
        for seed, name in ((0, "first"), (1, "second"))
    ]
    return built[0], built[1]


def compare(one: TorchActorCritic, other: TorchActorCritic, step: int, **options: Any) -> bool:
    """Whether the first gave way to the second, which earned 3 for its 2."""
    with step_scope(step):
        found = one.inherit(
            other, fitness=torch.full((2,), 2.0), rival_fitness=torch.full((3,), 3.0), **options
        )
    assert found.metrics["fitness"].value == 2
    return bool(found.metrics["replaced"].value)


def test_the_less_fit_goes_on_with_the_weights_of_the_other() -> None:
    one, other = members()
    before = weights_of(other)
    assert compare(one, other, 0)
    assert weights_of(one) == before == weights_of(other)


def test_only_every_so_many_steps() -> None:
    one, other = members()
    assert [compare(one, other, step, every=3) for step in range(6)] == [
        False, False, True, False, False, True,
    ]  # fmt: skip


def test_the_fitter_stays_as_it_is() -> None:
    one, other = members()
    before = weights_of(one)
    with step_scope(0):
        one.inherit(other, fitness=torch.tensor([3.0]), rival_fitness=torch.tensor([3.0]))
    assert weights_of(one) == before


def test_mutations_belong_to_seed_role_and_step() -> None:
    found: list[dict[str, bytes]] = []
    for step in (0, 0, 1):
        one, other = members()
        assert compare(one, other, step, mutation=0.1)
        found.append(weights_of(one))
    assert found[0] == found[1] != found[2]
    one, other = members()
    compare(one, other, 0, mutation=0.1)
    own, its = one.export_weights()["actor.0.weight"], other.export_weights()["actor.0.weight"]
    change = (own / its - 1).numpy()
    assert 0.05 < float(np.std(change)) < 0.2


def test_only_workers_with_weights_leave_any() -> None:
    one, _ = members()
    with pytest.raises(WorkerError, match="needs `export_weights` of a Role"):
        inherit_weights(one, Role())


def test_fitness_of_nobody_is_refused() -> None:
    one, other = members()
    with pytest.raises(WorkerError) as caught, step_scope(0):
        one.inherit(other, fitness=torch.ones(2), rival_fitness=torch.ones(0))
    assert str(caught.value) == (
        "'first.inherit' compares two that have both acted, and was given 2 and 0 rows of fitness; "
        "raise the number of rows, or lower the rows of a group"
    )
