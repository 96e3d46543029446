"""A recurrent network: what acting with it says is what training sees, whoever asks and answers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock.algorithms.losses.actor_critic import ActorCriticLoss
from penstock.algorithms.ops.returns import GaeTargets
from penstock.algorithms.options import actor_critic_batch
from penstock.algorithms.roles.environment import (
    ActorCritic,
    ActorCriticBatch,
    Trajectories,
    Values,
)
from penstock.dataflow.errors import WorkerError
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.envs.actors.actor_critic import TorchActorCritic, TorchActorCriticSpec
from penstock.workers.envs.actors.numpy_actor import NumpyRecurrent
from penstock.workers.envs.actors.perceptron import PerceptronSpec, RecurrentNetwork
from penstock.workers.envs.spec import EnvSpec
from penstock.workers.training.optimizer import OptimizerSpec

from ..acting import alike, env_worker, roll

NETWORK = PerceptronSpec(hidden_sizes=(16,), recurrent_units=8)
COUNTING = {"length": 5}
ENVS = pytest.mark.parametrize(
    "env",
    [
        EnvSpec(id="toys/Counting-v0", options=COUNTING),
        EnvSpec(id="toys/Counting-v0", options={**COUNTING, "truncates": True}, masked=True),
        EnvSpec(id="toys/Bad-v0", options={"how": "raises", "share": 0.3}, max_restarts=16),
        EnvSpec(id="toys/BadCartPoles-v0", options={"at": 9}, vectorized=True),
        EnvSpec(id="Pendulum-v1", options={}),
    ],
    ids=["terminates", "truncates", "restarted", "restarted together", "numbers"],
)


def actor_critic(env: EnvSpec, **options: Any) -> TorchActorCritic:
    spec = TorchActorCriticSpec(env=env, network=NETWORK, **options)
    made = spec.build(WorkerContext("actor", 3))
    with torch.no_grad():  # the last layer begins almost flat
        made.module.get_parameter("actor.2.weight").mul_(100)
    return made


def rolled(env: EnvSpec, actor: ActorCritic, *, horizon: int = 13) -> list[Trajectories]:
    """Two rollouts; episodes last five steps, so the second begins within them."""
    worker = env_worker(env)
    found = [roll(worker, step, horizon=horizon, actor=actor) for step in range(2)]
    worker.close()
    return found


@given(st.integers(1, 9), st.integers(1, 33), st.integers(1, 5), st.integers(0, 99))
def test_numpy_says_what_torch_says(features: int, units: int, envs: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    recurrent = RecurrentNetwork(features, units, random)
    with torch.no_grad():
        recurrent.cell.bias_ih.normal_(generator=random)
        recurrent.cell.bias_hh.normal_(generator=random)
    ours = NumpyRecurrent(recurrent)
    obs = 10 * torch.randn(6, envs, features, generator=random)
    state, expected = None, torch.zeros(envs, units)
    for now in obs:
        state = ours.step(now.numpy(), state)
        with torch.no_grad():
            expected = recurrent.cell(now, expected)
        assert state.dtype == np.float32
        assert state == pytest.approx(expected.numpy(), abs=1e-6)


@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.integers(0, 99))
def test_unrolled_it_is_torchs_unit_with_its_gradient(
    rows: int, length: int, units: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    recurrent = RecurrentNetwork(3, units, random).double()
    obs = torch.randn(rows, length, 3, generator=random).double().requires_grad_()
    state = torch.randn(rows, units, generator=random).double()
    mask = torch.rand(rows, length, generator=random) < 0.6
    weigh = torch.randn(rows, length, 3 + units, generator=random).double()

    steps, held = list[torch.Tensor](), state
    for t in range(length):
        held = recurrent.cell(obs[:, t], held * mask[:, t - 1, None] if t else held)
        steps.append(torch.cat([obs[:, t], held], dim=-1))
    expected = torch.stack(steps, dim=1)
    found = recurrent.beside(obs, state, mask)
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-12)
    inputs = [obs, *recurrent.parameters()]
    theirs = torch.autograd.grad((expected * weigh).sum(), inputs)
    ours = torch.autograd.grad((found * weigh).sum(), inputs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)


@ENVS
def test_what_was_done_is_evaluated_as_it_was_done(env: EnvSpec) -> None:
    """Over rows with ends of episodes, which begin within episodes."""
    worker = actor_critic(env)
    first, second = rolled(env, worker)
    assert (
        first.recurrent_state.shape == second.recurrent_state.shape == (4, NETWORK.recurrent_units)
    )
    assert not first.recurrent_state.any()
    assert second.recurrent_state.any(dim=1).sum() >= (4 if env.id == "Pendulum-v1" else 1)
    for traj in (first, second):
        given = traj.obs, traj.action, traj.action_mask
        found = worker.evaluate(*given, traj.recurrent_state, traj.mask)
        assert found.logprob.numpy() == pytest.approx(traj.behavior_logprob.numpy(), abs=1e-5)
    blank = worker.evaluate(*given, torch.zeros(4, 0), second.mask)
    assert not torch.allclose(blank.logprob, second.behavior_logprob, atol=1e-3)


def test_episodes_begin_with_nothing_remembered() -> None:
    """A value depends on what was seen in the episode, and on nothing before."""
    env = EnvSpec(id="toys/Counting-v0", options={**COUNTING, "truncates": True})
    worker = actor_critic(env)
    _, traj = rolled(env, worker)
    values = worker.value(traj.obs, traj.last_obs, traj.recurrent_state, traj.mask)
    reset = int((~traj.mask[0]).nonzero()[0])
    later = slice(reset + 1, None)
    alone = worker.value(
        traj.obs[:1, later], traj.last_obs[:1], torch.zeros(1, 0), traj.mask[:1, later]
    )
    assert torch.allclose(alone.value[0], values.value[0, later], atol=1e-6)
    assert torch.allclose(alone.bootstrap_value[0], values.bootstrap_value[0], atol=1e-6)
    # What a truncated episode is worth is said of its last state, with all that led to it.
    ended = traj.obs.clone()
    ended[0, reset - 1] += 1.0
    other = worker.value(ended, traj.last_obs, traj.recurrent_state, traj.mask)
    assert other.value[0, reset] != values.value[0, reset]
    assert torch.equal(other.value[0, later], values.value[0, later])


def test_a_row_ends_with_what_the_next_begins_with() -> None:
    """So what its last state is worth, and what the next row's first one is, are one number."""
    env = EnvSpec(id="toys/Counting-v0", options=COUNTING)
    worker = actor_critic(env)
    halves = rolled(env, worker, horizon=6)
    values = [worker.value(t.obs, t.last_obs, t.recurrent_state, t.mask) for t in halves]
    assert torch.allclose(values[0].bootstrap_value, values[1].value[:, 0], atol=1e-6)


def test_rows_are_seen_alike_in_any_company() -> None:
    env = EnvSpec(id="toys/Counting-v0", options=COUNTING)
    worker = actor_critic(env)
    traj = rolled(env, worker)[1]
    part = Trajectories(**{name: column[1:3] for name, column in vars(traj).items()})
    every, some = (worker.value(t.obs, t.last_obs, t.recurrent_state, t.mask) for t in (traj, part))
    assert torch.equal(every.value[1:3], some.value)
    assert torch.equal(every.bootstrap_value[1:3], some.bootstrap_value)


def batch_of(traj: Trajectories) -> ActorCriticBatch:
    random = torch.Generator().manual_seed(1)
    advantage, old, target = torch.randn((3, *traj.mask.shape), generator=random)
    values = Values(value=old, bootstrap_value=old[:, 0])
    return actor_critic_batch(traj, values, GaeTargets(advantage=advantage, value_target=target))


@pytest.mark.slow
@ENVS
def test_the_loss_does_not_depend_on_micro_batches(env: EnvSpec) -> None:
    found: list[dict[str, float]] = []
    for steps in (65536, 26, 1):
        worker = actor_critic(env, optimizer=OptimizerSpec(lr=1e-3), micro_batch_steps=steps)
        batch = batch_of(rolled(env, worker)[1])
        with call_scope(0, 0):
            metrics = worker.train(ActorCriticLoss(), batch).metrics
        found.append({name: metric.value for name, metric in metrics.items()})
    assert found[0]["tokens"] == float(batch.mask.sum())
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-5, abs=1e-6)


def test_gradients_reach_what_was_seen_before() -> None:
    """The only advantage is in a row's last step; its log-probability moves by earlier ones."""
    env = EnvSpec(id="toys/Counting-v0", options={"length": 50})
    worker = actor_critic(env, optimizer=OptimizerSpec(lr=1e-2))
    batch = batch_of(rolled(env, worker)[1])
    last = torch.zeros_like(batch.advantage)
    last[:, -1] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    batch = dataclasses.replace(batch, advantage=last)
    before = worker.module.get_parameter("memory.cell.weight_hh").clone()
    plain = ActorCriticLoss(normalize_advantages=False)
    with call_scope(0, 0):
        worker.train(plain, batch, epochs=5, num_minibatches=2)
    after = worker.evaluate(
        batch.obs, batch.action, batch.action_mask, batch.recurrent_state, batch.mask
    )
    gain = (after.logprob - batch.behavior_logprob) * last
    assert gain.sum() > 0
    assert not torch.equal(worker.module.get_parameter("memory.cell.weight_hh"), before)


@ENVS
def test_what_was_saved_goes_on_bit_for_bit(env: EnvSpec, tmp_path: Path) -> None:
    actor, worker = actor_critic(env), env_worker(env)
    for step in range(2):
        roll(worker, step, horizon=7, actor=actor)
    worker.save_state(tmp_path)
    expected = roll(worker, 2, horizon=7, actor=actor)
    assert expected.recurrent_state.any()
    other = env_worker(env)
    other.load_state(tmp_path)
    assert alike(roll(other, 2, horizon=7, actor=actor), expected)


def test_no_rows_have_the_width_of_others() -> None:
    env = EnvSpec(id="toys/Counting-v0", masked=True)
    nothing = roll(env_worker(env), 0, groups=(), actor=actor_critic(env))
    assert nothing.recurrent_state.shape == (0, NETWORK.recurrent_units)


def test_without_a_recurrent_state_nothing_is_carried() -> None:
    env = EnvSpec(id="toys/Counting-v0")
    plain = TorchActorCriticSpec(env=env).build(WorkerContext("actor", 3))
    for traj in rolled(env, plain):
        assert traj.recurrent_state.shape == (4, 0)
    assert not [name for name in plain.export_weights() if "memory" in name]


def test_whoever_forgets_to_pass_it_on_is_told() -> None:
    env = EnvSpec(id="toys/Counting-v0")
    worker = actor_critic(env)
    traj = rolled(env, worker)[0]
    with pytest.raises(WorkerError) as caught:
        worker.value(traj.obs, traj.last_obs)
    assert str(caught.value) == (
        "'actor' has a recurrent state, and was not told what rows begin with; pass on "
        "recurrent_state=traj.recurrent_state, mask=traj.mask"
    )
