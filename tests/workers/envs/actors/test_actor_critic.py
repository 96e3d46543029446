"""An actor with a critic: what it samples, evaluates and learns."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.algorithms.losses.actor_critic import ActorCriticLoss
from penstock.algorithms.roles.environment import ActionSpace, ActorCriticBatch, ActorCriticOutput
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.envs.actors.actor_critic import TorchActorCritic, TorchActorCriticSpec
from penstock.workers.envs.actors.numpy_actor import NumpyActor
from penstock.workers.envs.actors.perceptron import ActorCriticNetwork, PerceptronSpec
from penstock.workers.envs.spec import EnvSpec
from penstock.workers.training.optimizer import OptimizerSpec

DISCRETE = ActionSpace("discrete", sizes=(3,))
SEVERAL = ActionSpace("discrete", sizes=(2, 4))
MASKED = ActionSpace("discrete", sizes=(2, 4), masked=True)
NUMBERS = ActionSpace("continuous", low=(-1.0, -1.0), high=(1.0, 1.0))
ALL = pytest.mark.parametrize(
    "actions", [DISCRETE, SEVERAL, MASKED, NUMBERS], ids=["one", "several", "masked", "numbers"]
)
ROWS = 500


class Fixed(EnvSpec):
    actions = DISCRETE

    def spaces(self) -> tuple[int, ActionSpace]:
        return 5, self.actions


def actor_critic(
    actions: ActionSpace, *, lr: float | None = None, micro_batch_steps: int = 65536
) -> TorchActorCritic:
    env = Fixed(id="none")
    object.__setattr__(env, "actions", actions)
    optimizer = None if lr is None else OptimizerSpec(lr=lr)
    spec = TorchActorCriticSpec(env=env, optimizer=optimizer, micro_batch_steps=micro_batch_steps)
    made = spec.build(WorkerContext("actor", 3))
    with torch.no_grad():  # the last layer begins almost flat
        made.network.flat.data.mul_(5)
    return made


def given(actions: ActionSpace) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    random = np.random.default_rng(0)
    obs = random.normal(size=(ROWS, 5)).astype(np.float32)
    noise = random.random((ROWS, actions.num_components))
    if actions.kind == "continuous":
        noise = random.normal(size=noise.shape)
    mask = random.random((ROWS, actions.num_choices)) < 0.5
    if actions.masked:
        mask[:, [0, 3]] = True
    return obs, noise, mask if actions.masked else None


@ALL
def test_what_was_sampled_is_evaluated_alike(actions: ActionSpace) -> None:
    worker = actor_critic(actions)
    obs, noise, mask = given(actions)
    acts = worker.act(obs, noise, mask)
    columns = [torch.from_numpy(array)[:, None] for array in (
        obs, acts.action, np.zeros((ROWS, 0), np.bool_) if mask is None else mask)]  # fmt: skip
    found = worker.evaluate(*columns)
    assert found.logprob[:, 0].numpy() == pytest.approx(acts.logprob, abs=2e-6)
    assert (found.entropy >= 0).all() or actions is NUMBERS


def test_choices_are_sampled_as_often_as_their_probability_says() -> None:
    network = ActorCriticNetwork(PerceptronSpec(), 5, DISCRETE)
    actor = NumpyActor(network.actor, DISCRETE, None)
    with torch.no_grad():
        last = network.get_parameter("actor.4.weight"), network.get_parameter("actor.4.bias")
        last[0].zero_()
        last[1].copy_(torch.tensor([0.2, 0.3, 0.5]).log())
    noise = (np.arange(1000) + 0.5)[:, None] / 1000
    action = actor.act(np.zeros((1000, 5), np.float32), noise, None).action
    assert np.bincount(action[:, 0].astype(int)).tolist() == [200, 300, 500]


def test_what_is_not_allowed_is_never_sampled() -> None:
    worker = actor_critic(MASKED)
    obs, noise, mask = given(MASKED)
    assert mask is not None
    action = worker.act(obs, noise, mask).action.astype(int)
    rows = np.arange(ROWS)
    assert mask[rows, action[:, 0]].all()
    assert mask[rows, 2 + action[:, 1]].all()


def test_a_group_is_acted_for_alike_wherever_it_is() -> None:
    # Rows are computed a group at a time, since matrix products may depend on their size.
    worker, replica = actor_critic(DISCRETE), actor_critic(DISCRETE)
    replica.load_weights(worker.export_weights())
    obs, noise, _ = given(DISCRETE)
    one, other = worker.act(obs[:4], noise[:4], None), replica.act(obs[:4], noise[:4], None)
    assert one.action.tobytes() == other.action.tobytes()
    assert one.logprob.tobytes() == other.logprob.tobytes()


def batch(actions: ActionSpace, worker: TorchActorCritic) -> ActorCriticBatch:
    obs, noise, mask = given(actions)
    acts = worker.act(obs, noise, mask)
    random = torch.Generator().manual_seed(1)
    shape = (10, ROWS // 10)
    counts = torch.rand(shape, generator=random) < 0.9
    advantage, target = torch.randn((2, *shape), generator=random)
    allowed = np.zeros((ROWS, 0), np.bool_) if mask is None else mask
    return ActorCriticBatch(
        obs=torch.from_numpy(obs).view(*shape, -1),
        action=torch.from_numpy(acts.action).view(*shape, -1),
        action_mask=torch.from_numpy(allowed).view(*shape, allowed.shape[1]),
        mask=counts,
        recurrent_state=torch.zeros(len(counts), 0),
        behavior_logprob=torch.from_numpy(acts.logprob).view(shape),
        advantage=advantage,
        old_value=torch.zeros(shape),
        value_target=target,
    )


@ALL
def test_training_moves_towards_better_actions_and_values(actions: ActionSpace) -> None:
    worker = actor_critic(actions, lr=1e-3)
    data = batch(actions, worker)
    before = worker.evaluate(data.obs, data.action, data.action_mask).logprob
    with call_scope(0, 0):
        metrics = worker.train(ActorCriticLoss(), data, epochs=3, num_minibatches=5).metrics
    after = worker.evaluate(data.obs, data.action, data.action_mask).logprob
    gain = ((after - before) * data.advantage)[data.mask]
    assert gain.mean() > 0
    assert metrics["tokens"].value == float(data.mask.sum())
    error = [
        (one.value(data.obs, data.obs[:, -1]).value - data.value_target)[data.mask].square().mean()
        for one in (worker, actor_critic(actions))
    ]
    assert error[0] < error[1]


def test_rows_are_evaluated_alike_in_any_company() -> None:
    worker = actor_critic(NUMBERS)
    data = batch(NUMBERS, worker)
    every = worker.value(data.obs, data.obs[:, 3])
    some = worker.value(data.obs[4:7], data.obs[4:7, 3])
    assert torch.equal(every.value[4:7], some.value)
    assert torch.equal(every.bootstrap_value[4:7], some.bootstrap_value)
    every_step = worker.evaluate(data.obs, data.action, data.action_mask)
    step = worker.evaluate(data.obs[2:3], data.action[2:3], data.action_mask[2:3])
    assert torch.equal(every_step.logprob[2:3], step.logprob)


def test_steps_that_do_not_count_change_nothing() -> None:
    hashes = set()
    for fill in (0.0, 7.0):
        worker = actor_critic(DISCRETE, lr=1e-3)
        data = batch(DISCRETE, worker)
        data = dataclasses.replace(
            data, advantage=torch.where(data.mask, data.advantage, torch.tensor(fill))
        )
        with call_scope(0, 0):
            worker.train(ActorCriticLoss(), data, epochs=1, num_minibatches=3)
        hashes.add(worker.weights_sha256())
    assert len(hashes) == 1


def test_the_loss_does_not_depend_on_micro_batches() -> None:
    norms = []
    for steps in (65536, 37):
        worker = actor_critic(DISCRETE, lr=1e-3, micro_batch_steps=steps)
        with call_scope(0, 0):
            found = worker.train(ActorCriticLoss(), batch(DISCRETE, worker)).metrics
        norms.append(found["grad_norm"].value)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_advantages_are_normalized_in_each_minibatch() -> None:
    worker = actor_critic(DISCRETE)
    data = batch(DISCRETE, worker)
    loss = ActorCriticLoss(policy=ClippedPolicyLoss())
    steps = data.advantage[data.mask]
    totals = loss.totals(data)
    assert totals[0] == data.mask.sum()
    scaled = (steps - steps.mean()) / (steps.std() + 1e-8)
    single = dataclasses.replace(data, advantage=data.advantage.clone())
    single.advantage[data.mask] = scaled
    plain = dataclasses.replace(loss, normalize_advantages=False)
    found = worker.evaluate(data.obs, data.action, data.action_mask)
    value = worker.value(data.obs, data.obs[:, -1]).value
    out = ActorCriticOutput(value=value, logprob=found.logprob, entropy=found.entropy)
    assert loss(out, data, totals).total == pytest.approx(
        float(plain(out, single, plain.totals(single)).total), rel=1e-5
    )


def test_what_was_saved_is_the_same_network(tmp_path: Path) -> None:
    worker = actor_critic(NUMBERS, lr=1e-3)
    with call_scope(0, 0):
        worker.train(ActorCriticLoss(), batch(NUMBERS, worker))
    worker.save_state(tmp_path)
    other = actor_critic(NUMBERS, lr=1e-3)
    other.load_state(tmp_path)
    data = batch(NUMBERS, worker)
    for one in (worker, other):
        with call_scope(1, 0):
            one.train(ActorCriticLoss(), data)
    assert worker.weights_sha256() == other.weights_sha256()


def test_a_frozen_one_acts_and_does_not_train() -> None:
    worker = actor_critic(DISCRETE)
    with pytest.raises(RuntimeError, match="'actor' is frozen and cannot train"):
        worker.train(ActorCriticLoss(), batch(DISCRETE, worker))


def test_networks_begin_orthogonal() -> None:
    network = ActorCriticNetwork(PerceptronSpec(init_seed=2), 5, DISCRETE)
    hidden = network.get_parameter("actor.2.weight").detach()
    assert torch.allclose(hidden @ hidden.T, 2 * torch.eye(64), atol=1e-5)
    last = network.get_parameter("actor.4.weight").detach()
    assert torch.allclose(last @ last.T, 1e-4 * torch.eye(3), atol=1e-8)
    assert all(not p.any() for n, p in network.named_parameters() if n.endswith("bias"))
