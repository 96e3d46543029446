"""The training loop: what must not change the result, and what must."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.algorithms.losses import BradleyTerryLoss, ClippedPolicyLoss
from penstock.algorithms.roles import PolicyBatch, PolicyOutput, PreferencePairs
from penstock.dataflow.errors import WorkerError
from penstock.dataflow.graph.role import Loss, LossSum, Metric
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.roles import PolicyWorker
from penstock.workers.engines.torch_engine.network import LeanNetwork
from penstock.workers.engines.torch_engine.specs import TorchRewardModelSpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.training.optimizer import OptimizerSpec
from torch import Tensor
from torch_models import architecture, make_batch, make_policy, module_of

LOSS = ClippedPolicyLoss(report_entropy=True, entropy_coef=0.01)
# Adam divides by the root of the second moment, so it blows up the rounding error of gradients that
# are zero in exact arithmetic (a key projection's bias). A larger eps keeps the comparisons below
# about the gradients and not about that.
OPTIMIZER = OptimizerSpec(lr=1e-3, weight_decay=0.01, eps=1e-5)


def trained(policy: PolicyWorker, batch: PolicyBatch, calls: int = 3, **options: int):
    """Metrics of the last call."""
    metrics = None
    for step in range(calls):
        with call_scope(step, 0):
            metrics = policy.train(LOSS, batch, temperature=0.9, **options)
    assert metrics is not None
    return {name: metric.value for name, metric in metrics.metrics.items()}


def assert_close(a: PolicyWorker, b: PolicyWorker, atol: float) -> None:
    torch.testing.assert_close(a.export_weights(), b.export_weights(), atol=atol, rtol=0)


@pytest.mark.parametrize("name", ["qwen2-tied", pytest.param("gpt2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("micro_batch_tokens", [pytest.param(1, marks=pytest.mark.slow), 60, 200])
def test_micro_batches_do_not_change_the_result(name: str, micro_batch_tokens: int):
    whole = make_policy(name, optimizer=OPTIMIZER)
    cut = make_policy(name, optimizer=OPTIMIZER, micro_batch_tokens=micro_batch_tokens)
    batch = make_batch(whole)
    first = trained(whole, batch, num_minibatches=2, epochs=2)
    second = trained(cut, batch, num_minibatches=2, epochs=2)
    assert_close(whole, cut, 1e-6)
    assert first == pytest.approx(second, abs=1e-5, rel=1e-4)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    samples=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    prompt=st.integers(1, 40),
    micro_batch_tokens=st.sampled_from([1, 50, 90, 200, 5000]),
    shares=st.booleans(),
)
def test_neither_micro_batches_nor_shared_prompts_change_a_gradient(
    samples: list[int], prompt: int, micro_batch_tokens: int, shares: bool
) -> None:
    """And log-probabilities neither: a row longer than the bound is computed alone."""
    draw, num = torch.Generator().manual_seed(0), sum(samples)
    texts = torch.randint(3, 50, (len(samples), prompt), generator=draw)
    owner = torch.arange(len(samples)).repeat_interleave(torch.tensor(samples))
    tokens = torch.cat([texts[owner], torch.randint(3, 50, (num, 30), generator=draw)], dim=1)
    length = prompt + torch.randint(1, 31, (num, 1), generator=draw)
    place = torch.arange(tokens.shape[1])
    tokens[place >= length] = -1
    mask = (place >= prompt) & (tokens >= 0)
    zeros = torch.zeros(tokens.shape)
    advantage = torch.randn(tokens.shape, generator=draw) * mask
    batch = PolicyBatch(tokens=tokens, mask=mask, behavior_logprob=zeros, advantage=advantage)
    found: list[tuple[Tensor, Tensor, dict[str, float]]] = []
    for bound, shared in ((100_000, False), (micro_batch_tokens, shares)):
        policy = make_policy("qwen2-tied", optimizer=OPTIMIZER, micro_batch_tokens=bound)
        policy.network.shares_prompts = shared
        logprob = policy.logprob(tokens, mask)
        metrics = trained(policy, batch, calls=1)
        assert isinstance(policy.network, LeanNetwork)
        grad = policy.network.flat.grad
        assert grad is not None
        found.append((logprob, grad.clone(), metrics))
    (logprob, grad, metrics), (expected, expected_grad, expected_metrics) = found
    torch.testing.assert_close(logprob, expected, atol=1e-5, rtol=0)
    scale = float(expected_grad.abs().max())
    torch.testing.assert_close(grad, expected_grad, atol=2e-5 * scale, rtol=0)
    assert metrics == pytest.approx(expected_metrics, abs=1e-5, rel=1e-4)


def test_training_equals_a_plain_hugging_face_loop():
    policy = make_policy("qwen3", optimizer=OPTIMIZER)
    batch = make_batch(policy)
    plain = module_of(make_policy("qwen3"))
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01, eps=1e-5)
    norms: list[float] = []
    for _ in range(3):
        logits = plain(
            input_ids=batch.tokens.clamp(min=0), attention_mask=(batch.tokens >= 0).long()
        ).logits[:, :-1]
        every = torch.log_softmax(logits / 0.9, -1)
        picked = every.gather(2, batch.tokens[:, 1:].clamp(min=0)[..., None])[..., 0]
        logprob = torch.nn.functional.pad(picked, (1, 0)) * batch.mask
        entropy = torch.nn.functional.pad(-(every.exp() * every).sum(-1), (1, 0)) * batch.mask
        totals = LOSS.totals(batch)
        result = LOSS(PolicyOutput(logprob, entropy), batch, totals)
        adam.zero_grad()
        result.total.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)))
        adam.step()
    metrics = trained(policy, batch)
    assert metrics["grad_norm"] == pytest.approx(norms[-1], rel=1e-3)
    expected = dict(plain.named_parameters())
    for name, weight in policy.export_weights().items():
        torch.testing.assert_close(weight, expected[name].detach(), atol=1e-6, rtol=0)


def test_the_shuffle_depends_on_the_call_and_nothing_else():
    policies = [make_policy(optimizer=OPTIMIZER) for _ in range(3)]
    batch = make_batch(policies[0])
    for policy, step in zip(policies, (0, 0, 1), strict=True):
        with call_scope(step, 0):
            policy.train(LOSS, batch, num_minibatches=4)
    hashes = [policy.weights_sha256() for policy in policies]
    assert hashes[0] == hashes[1]
    assert hashes[0] != hashes[2]


@dataclasses.dataclass(frozen=True)
class _Recorded(Loss[PolicyBatch, PolicyOutput]):
    """Squared log-probabilities; remembers the rows it saw by their first advantage."""

    seen: list[int] = dataclasses.field(default_factory=list[int])

    def totals(self, batch: PolicyBatch) -> Tensor:
        return torch.tensor([float(batch.mask.sum())], dtype=torch.float64)

    def __call__(self, output: PolicyOutput, batch: PolicyBatch, totals: Tensor) -> LossSum:
        self.seen.extend(int(x) for x in batch.advantage.amax(1))
        return LossSum(output.logprob.square().sum() / totals[0])


def test_every_row_is_used_once_per_epoch():
    policy = make_policy(optimizer=OPTIMIZER)
    batch = make_batch(policy)
    rows = len(batch.tokens)
    number = torch.arange(rows)[:, None] * batch.mask.float()
    loss = _Recorded()
    numbered = dataclasses.replace(batch, advantage=number)
    policy.train(loss, numbered, epochs=2, num_minibatches=5)
    assert sorted(loss.seen[:rows]) == list(range(rows))
    assert sorted(loss.seen[rows:]) == list(range(rows))
    assert loss.seen[:rows] != loss.seen[rows:]


@dataclasses.dataclass(frozen=True)
class _Reporting(_Recorded):
    """The same loss, with metrics as somebody may write them."""

    def __call__(self, output: PolicyOutput, batch: PolicyBatch, totals: Tensor) -> LossSum:
        rows = len(batch.mask)
        return LossSum(
            output.logprob.square().sum() / totals[0],
            {
                "coef": 0.25,
                "fraction": (0.5 * rows, rows),
                "mixed": (output.logprob.sum(), float(batch.mask.sum())),
                "attached": output.logprob.sum(),
            },
        )


def test_a_loss_may_report_numbers():
    policy = make_policy(optimizer=OPTIMIZER, micro_batch_tokens=64)
    batch = make_batch(policy)
    with call_scope(0, 0):
        metrics = policy.train(_Reporting(), batch, num_minibatches=2).metrics
    assert metrics["coef"].value == 0.25
    assert metrics["coef"].weight > 2  # micro-batches
    assert metrics["fraction"] == Metric.mean(0.5 * len(batch.mask), len(batch.mask))
    assert metrics["mixed"].weight == int(batch.mask.sum())
    assert metrics["mixed"].value < 0


@dataclasses.dataclass(frozen=True)
class _Detached(_Recorded):
    def __call__(self, output: PolicyOutput, batch: PolicyBatch, totals: Tensor) -> LossSum:
        return LossSum(torch.zeros(()))


def test_a_loss_without_a_gradient_is_named():
    policy = make_policy(optimizer=OPTIMIZER)
    message = (
        "_Detached gave 'actor' a total without a gradient; compute it from the model's output in "
        "every case, be it a sum over no tokens"
    )
    with pytest.raises(ValueError, match=f"^{message}$"), call_scope(0, 0):
        policy.train(_Detached(), make_batch(policy))


@dataclasses.dataclass(frozen=True)
class _Pair(_Recorded):
    def __call__(self, output: PolicyOutput, batch: PolicyBatch, totals: Tensor) -> Any:
        return output.logprob.sum(), {}


def test_a_loss_that_returns_a_tuple_is_named():
    policy = make_policy(optimizer=OPTIMIZER)
    with pytest.raises(TypeError) as raised, call_scope(0, 0):
        policy.train(_Pair(), make_batch(policy))
    assert str(raised.value) == (
        "_Pair returned a tuple; expected a LossSum\n"
        "    return LossSum(total), or LossSum(total, metrics={name: (sum, weight)})"
    )


def test_a_batch_of_which_a_filter_left_nothing_is_named():
    policy = make_policy(optimizer=OPTIMIZER)
    batch = make_batch(policy)
    columns = {one.name: getattr(batch, one.name) for one in dataclasses.fields(batch)}
    none = {name: None if column is None else column[:0] for name, column in columns.items()}
    with pytest.raises(ValueError, match="^the batch has no rows, and an optimizer step needs at"):
        policy.train(_Recorded(), dataclasses.replace(batch, **none))


@pytest.mark.slow
def test_pairs_stay_together():
    context = WorkerContext("reward", seed=1)
    model = ModelSpec(architecture=architecture("llama"))
    batch = make_batch(make_policy("llama"))
    rows = len(batch.tokens)
    pairs = PreferencePairs(
        pair_id=torch.arange(rows) % (rows // 2) + 100,  # the rows of a pair are far apart
        tokens=batch.tokens,
        mask=batch.mask,
        chosen=torch.arange(rows) < rows // 2,
    )
    weights: list[dict[str, Tensor]] = []
    for tokens in (8192, 1):
        worker = TorchRewardModelSpec(
            model=model, optimizer=OPTIMIZER, micro_batch_tokens=tokens
        ).build(context)
        with call_scope(0, 0):
            metrics = worker.train(BradleyTerryLoss(), pairs, num_minibatches=3)
        assert metrics.metrics["accuracy"].weight == rows // 2
        weights.append(worker.export_weights())
    torch.testing.assert_close(weights[0], weights[1], atol=1e-6, rtol=0)


@pytest.mark.slow
def test_bfloat16_weights_accumulate_small_updates():
    policy = make_policy(optimizer=OptimizerSpec(lr=1e-5), dtype="bfloat16")
    batch = make_batch(policy)
    before = policy.export_weights()
    trained(policy, batch, calls=60)
    after = policy.export_weights()
    # One update is below half a unit in the last place of most weights; sixty are not.
    moved = sum(int((after[n] != before[n]).sum()) for n in before)
    assert moved > 0.1 * sum(w.numel() for w in before.values())


def test_a_frozen_worker_refuses_to_train():
    policy = make_policy()
    with pytest.raises(RuntimeError, match=r"'actor' is frozen and cannot train; give its spec"):
        policy.train(LOSS, make_batch(policy))


def test_too_many_minibatches_are_refused():
    policy = make_policy(optimizer=OPTIMIZER)
    with pytest.raises(ValueError, match=r"num_minibatches is 25, but the batch has 24 rows"):
        policy.train(LOSS, make_batch(policy), num_minibatches=25)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_one_advantage_that_is_not_finite_leaves_the_weights_alone(bad: float):
    policy = make_policy(optimizer=OPTIMIZER)
    batch = make_batch(policy)
    before = policy.weights_sha256()
    advantage = batch.advantage.clone()
    advantage[batch.mask.any(dim=1).nonzero()[0]] = bad
    broken = dataclasses.replace(batch, advantage=advantage)
    with pytest.raises(WorkerError) as error, call_scope(4, 0):
        policy.train(LOSS, broken)
    assert str(error.value) == (
        "step 4: 'actor' cannot be trained on: the gradient norm is nan at optimizer step 1, "
        "which is not taken\n    not finite: column 'advantage' of its batch; gradients of "
        "model.embed_tokens.weight, model.layers.0.self_attn.q_proj.weight, "
        "model.layers.0.self_attn.q_proj.bias and 23 more; the loss\n    nothing of this step is "
        "published or saved; go on from the last checkpoint with a lower optimizer.lr, or correct "
        "what made the numbers"
    )
    assert policy.weights_sha256() == before
