"""A Q-network and its replay: acting at random, following, sampling, going on from checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penstock.algorithms.dqn import TemporalDifferenceLoss, bellman_target
from penstock.algorithms.roles.environment import QBatch, Trajectories, Transitions
from penstock.dataflow.errors import ConfigError, PlanError, StateError
from penstock.dataflow.runtime.call_context import call_scope, step_scope
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.placement import one_group
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.launch.run_dir.checkpoint import CheckpointStore
from penstock.workers.envs.actors.q_learning import (
    QNetworkSpec,
    ReplayMemory,
    ReplaySpec,
    TorchQNetwork,
)
from penstock.workers.envs.spec import EnvSpec
from penstock.workers.training.optimizer import OptimizerSpec

from ....algorithms.configured import configured
from ....algorithms.eager import weights_of
from ..acting import alike

CARTPOLE = EnvSpec(id="CartPole-v1")


def built(**options: Any) -> TorchQNetwork:
    spec = QNetworkSpec(env=CARTPOLE, optimizer=OptimizerSpec(lr=1e-2), **options)
    return spec.build(WorkerContext("q"))


def batch(rows: int) -> QBatch:
    random = torch.Generator().manual_seed(0)
    return QBatch(
        obs=torch.randn(rows, 1, 4, generator=random),
        action=torch.randint(2, (rows, 1, 1), generator=random).float(),
        mask=torch.ones(rows, 1, dtype=torch.bool),
        value_target=torch.randn(rows, 1, generator=random),
    )


def test_it_takes_the_best_choice_but_for_a_share() -> None:
    q = built(epsilon_start=0.25)
    obs = np.random.default_rng(0).normal(size=(1000, 4)).astype(np.float32)
    uniform = (np.arange(1000) + 0.5)[:, None] / 1000
    action, logprob, _ = q.act(obs, uniform, None)
    best = q.best(torch.from_numpy(obs)[:, None]).numpy()[:, 0]
    assert np.array_equal(action[250:], best[250:])
    assert action[:250, 0].tolist() == [0.0] * 125 + [1.0] * 125
    assert np.allclose(np.exp(logprob), np.where(action == best, 0.875, 0.125)[:, 0])


def test_the_best_choice_has_the_highest_value() -> None:
    q = built()
    obs = torch.randn(5, 1, 4)
    values = torch.stack([q.value(obs, torch.full((5, 1, 1), float(c))) for c in (0, 1)])
    assert torch.equal(q.best(obs)[..., 0].long(), values.argmax(0))


def test_exploration_falls_with_training_and_travels_with_the_weights() -> None:
    q, copy = built(epsilon_end=0.1, epsilon_calls=2), built()
    found: list[float] = []
    for step in range(3):
        with step_scope(step):
            metrics = q.train(TemporalDifferenceLoss(), batch(8)).metrics
        found.append(metrics["epsilon"].value)
    assert found == pytest.approx([0.55, 0.1, 0.1])
    copy.load_weights(q.export_weights())
    assert float(copy.module.epsilon) == pytest.approx(0.1)


@pytest.mark.slow
def test_it_learns_the_targets() -> None:
    q = built()
    losses: list[float] = []
    for step in range(200):
        with step_scope(step):
            losses.append(q.train(TemporalDifferenceLoss(), batch(16)).metrics["value_loss"].value)
    assert losses[-1] < 0.02 * losses[0]


def test_nothing_is_learned_of_steps_that_are_masked_out() -> None:
    q = built(epsilon_calls=2)
    before = weights_of(q)
    nothing = batch(8)
    nothing.mask[:] = False
    with step_scope(0):
        found = q.train(TemporalDifferenceLoss(), nothing, num_minibatches=2).metrics
    after = weights_of(q)
    assert {name for name in before if before[name] != after[name]} == {"epsilon"}
    assert found["epsilon"].value == pytest.approx(0.525)
    assert (found["lr"].value, found["tokens"].value) == (1e-2, 0)


def test_the_first_optimizer_step_is_the_same_whenever_it_comes() -> None:
    learned: list[dict[str, bytes]] = []
    for waits in (0, 100):
        q, nothing = built(), batch(8)
        nothing.mask[:] = False
        for _ in range(waits):
            with step_scope(0):
                q.train(TemporalDifferenceLoss(), nothing)
        with step_scope(0):
            q.train(TemporalDifferenceLoss(), batch(8))
        learned.append(weights_of(q))
    assert learned[0] == learned[1]


def test_it_refuses_a_batch_in_pieces() -> None:
    q = built()
    before = weights_of(q)
    with pytest.raises(ConfigError) as error, call_scope(0, 0, piece="part"):
        q.train(TemporalDifferenceLoss(), batch(8))
    assert str(error.value) == (
        "role 'q' is given its batch in pieces, but a Q-network skips a batch without steps, so it "
        "must see all of it\n    have the step wait for the whole batch"
    )
    assert weights_of(q) == before


def test_a_large_error_counts_linearly_with_huber() -> None:
    error = torch.tensor([[0.5], [3.0]])
    both = batch(2)
    for norm, expected in (("squared", [0.125, 4.5]), ("huber", [0.125, 2.5])):
        loss = TemporalDifferenceLoss(norm=norm)  # pyright: ignore[reportArgumentType]
        output: Any = type("Output", (), {"value": both.value_target + error})
        total = loss(output, both, loss.totals(both)).total
        assert float(total) == pytest.approx(sum(expected) / 2)


def test_it_follows_every_so_many_steps_and_as_far_as_asked() -> None:
    q, target = built(), built(epsilon_start=0.5)
    followed: list[float] = []
    for step in range(4):
        with step_scope(step):
            found = target.follow(q, share=0.5, every=2).metrics
        followed.append(float(target.module.epsilon))
        assert found["followed"].value == (step % 2 == 0)
    assert followed == pytest.approx([0.75, 0.75, 0.875, 0.875])


def test_targets_go_on_after_a_time_limit_and_end_at_the_end() -> None:
    target = bellman_target(
        torch.tensor([[1.0], [2.0]]),
        next_value=torch.tensor([[10.0], [float("nan")]]),
        terminated=torch.tensor([[False], [True]]),
        discount=0.9,
    )
    assert target.tolist() == [[10.0], [2.0]]


def test_an_environment_without_choices_is_refused() -> None:
    spec = QNetworkSpec(env=EnvSpec(id="Pendulum-v1"))
    with pytest.raises(ConfigError, match="role 'q' values every choice there is"):
        spec.build(WorkerContext("q"))


def run(to: int, folder: CheckpointStore | None) -> dict[str, dict[str, bytes]]:
    """DQN to some step, going on from what is in the folder."""
    small = configured("dqn")
    executor = InProcess()
    engine = Engine(small.graph, one_group(small.graph), workers=small.workers, executor=executor)
    for _ in engine.run(small.sources, to, checkpoint_every=2, checkpoints=folder):
        pass
    return {role: weights_of(executor.role("all", role)) for role in small.trained}


@pytest.mark.slow
def test_a_run_goes_on_with_its_replay_bit_for_bit(tmp_path: Path) -> None:
    folder = CheckpointStore(tmp_path)
    run(4, folder)
    assert run(6, folder) == run(6, None)


def steps(first: int, *, envs: int = 2, horizon: int = 3, choices: int = 0) -> Trajectories:
    """Observations count up from `first`, row by row; nothing ends unless a test says so."""
    count = envs * (horizon + 1)
    obs = torch.arange(first, first + count).float().reshape(envs, horizon + 1, 1)
    flags = torch.zeros(envs, horizon, dtype=torch.bool)
    return Trajectories(
        env=torch.arange(envs),
        obs=obs[:, :-1],
        last_obs=obs[:, -1],
        action=obs[:, :-1] % 2,
        action_mask=torch.ones(envs, horizon, choices, dtype=torch.bool),
        behavior_logprob=torch.zeros(envs, horizon),
        reward=obs[:, :-1, 0] * 10,
        terminated=flags.clone(),
        truncated=flags.clone(),
        mask=~flags,
        recurrent_state=torch.zeros(envs, 0),
    )


def add(replay: ReplayMemory, table: Trajectories, step: int = 0) -> torch.Tensor:
    with call_scope(step, 0):
        return replay.add(table)


def sample(replay: ReplayMemory, step: int, num_steps: int, at_least: int = 1) -> Transitions:
    with call_scope(step, 0):
        return replay.sample(torch.zeros(0), num_steps=num_steps, at_least=at_least)


def replay_of(capacity: int, seed: int = 0) -> ReplayMemory:
    return ReplaySpec(capacity=capacity).build(WorkerContext("replay", seed))


def test_a_step_is_kept_with_the_state_it_led_to() -> None:
    replay = replay_of(100)
    table = steps(0)
    table.mask[0, 1] = False  # environment 0 was reset there
    assert add(replay, table).tolist() == [5, 5]
    sampled = sample(replay, 0, 200)
    assert sampled.obs.shape == (200, 1, 1)
    assert sampled.reward.shape == (200, 1)
    assert sorted(set(sampled.obs.flatten().tolist())) == [0, 2, 4, 5, 6]
    assert torch.equal(sampled.next_obs, sampled.obs + 1)
    assert torch.equal(sampled.reward, sampled.obs[..., 0] * 10)
    assert torch.equal(sampled.action, sampled.obs % 2)
    assert bool(sampled.mask.all())


def test_the_oldest_steps_make_room() -> None:
    replay = replay_of(8)
    add(replay, steps(0), 0)
    add(replay, steps(100), 1)
    assert sorted(set(sample(replay, 1, 400).obs.flatten().tolist())) == [
        5, 6, 100, 101, 102, 104, 105, 106,
    ]  # fmt: skip
    assert add(replay, steps(200, envs=5), 2).tolist() == [8] * 5
    assert int(sample(replay, 2, 400).obs.min()) == 209  # 15 came, the last 8 of them stay


def test_nothing_is_sampled_before_there_is_enough() -> None:
    replay = replay_of(100)
    add(replay, steps(0))
    assert not bool(sample(replay, 0, 4, at_least=7).mask.any())
    assert bool(sample(replay, 0, 4, at_least=6).mask.all())


def test_samples_belong_to_seed_and_step() -> None:
    replay, other = replay_of(100), replay_of(100, seed=1)
    add(replay, steps(0, horizon=30))
    add(other, steps(0, horizon=30))
    sampled = [sample(r, s, 20).obs for r, s in ((replay, 0), (replay, 0), (replay, 1), (other, 0))]
    assert torch.equal(sampled[0], sampled[1])
    assert not torch.equal(sampled[0], sampled[2])
    assert not torch.equal(sampled[0], sampled[3])


def test_it_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    replay, restored = replay_of(8), replay_of(8)
    add(replay, steps(0), 0)
    add(replay, steps(100), 1)
    replay.save_state(tmp_path)
    restored.load_state(tmp_path)
    for one in (replay, restored):
        add(one, steps(200, envs=1), 2)
    assert alike(sample(replay, 2, 50), sample(restored, 2, 50))


def test_an_empty_replay_can_be_saved(tmp_path: Path) -> None:
    replay_of(8).save_state(tmp_path)
    restored = replay_of(8)
    restored.load_state(tmp_path)
    assert restored.num_stored == 0


def test_a_replay_of_another_size_is_refused(tmp_path: Path) -> None:
    replay_of(8).save_state(tmp_path)
    with pytest.raises(ValueError, match="holds a replay of 8 steps, and 'replay' has room for 9"):
        replay_of(9).load_state(tmp_path)


def test_steps_out_of_order_are_refused() -> None:
    replay = replay_of(8)
    add(replay, steps(0), 3)
    with pytest.raises(StateError, match="'replay' was given step 2 after step 3"):
        add(replay, steps(0), 2)
    add(replay, steps(0), 0)  # another run


def test_masked_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="which choices are allowed"):
        add(replay_of(8), steps(0, choices=2))


def test_several_ranks_are_refused() -> None:
    with pytest.raises(PlanError, match="its group has 2 ranks"):
        ReplaySpec().build(WorkerContext("replay", num_ranks=2))
