"""Adapters: what they change, what they share, and what is written of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from penstock.algorithms.losses import ClippedPolicyLoss, ClippedValueLoss
from penstock.algorithms.roles import PolicyBatch, Sampling
from penstock.algorithms.roles.language_tables import ValueBatch
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.roles import PolicyWorker
from penstock.workers.engines.torch_engine import network
from penstock.workers.engines.torch_engine.adapters import AdapterCopies, Adapters, LowRank
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec, TorchValueSpec
from penstock.workers.models.lora import (
    AdapterDropout,
    LoraSpec,
    adapted_linears,
    insert_adapters,
)
from penstock.workers.models.spec import ModelSpec
from penstock.workers.training.flat_parameters import FlatParameters, read_tensors
from penstock.workers.training.optimizer import OptimizerSpec
from torch import nn
from torch_models import GPT2, architecture

QWEN = architecture("qwen2")
ARCHITECTURES = pytest.mark.parametrize("architecture", [QWEN, GPT2], ids=["own", "transformers"])
LORA = LoraSpec(rank=4, alpha=8.0)


def _batch() -> PolicyBatch:
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 40, (6, 9), generator=random)
    mask = torch.arange(9).expand(6, 9) >= 3
    numbers = torch.randn(6, 9, generator=random)
    return PolicyBatch(
        tokens=tokens, mask=mask, behavior_logprob=numbers - 4, advantage=numbers.flip(0)
    )


def _policy(model: ModelSpec, *, role: str = "actor", **options: Any) -> PolicyWorker:
    options = {"lora": LORA, "optimizer": OptimizerSpec(lr=1e-2), **options}
    return TorchPolicySpec(model=model, end_ids=(2,), **options).build(WorkerContext(role))


def _train(worker: PolicyWorker, steps: int = 3) -> None:
    for step in range(steps):
        with call_scope(step, 0):
            worker.train(ClippedPolicyLoss(), _batch())


def _logprob(worker: PolicyWorker) -> torch.Tensor:
    with call_scope(0, 0):
        return worker.logprob(_batch().tokens, _batch().mask)


def _never(backbone: nn.Module) -> bool:
    del backbone
    return False


def _module(worker: PolicyWorker) -> nn.Module:
    assert isinstance(worker.network, network.TorchNetwork)
    return worker.network.module


@ARCHITECTURES
def test_a_fresh_adapter_changes_nothing_and_a_trained_one_does(
    architecture: dict[str, Any],
) -> None:
    model = ModelSpec(architecture=architecture)
    plain, adapted = _policy(model, lora=LoraSpec()), _policy(model)
    torch.testing.assert_close(_logprob(adapted), _logprob(plain), rtol=0, atol=1e-6)
    _train(adapted)
    assert float((_logprob(adapted) - _logprob(plain)).abs().max()) > 1e-3


@ARCHITECTURES
def test_merged_and_unmerged_agree(architecture: dict[str, Any], tmp_path: Path) -> None:
    adapted = _policy(ModelSpec(architecture=architecture))
    _train(adapted)
    adapted.save_pretrained(tmp_path / "model")
    merged = _policy(ModelSpec(folder=str(tmp_path / "model")), lora=LoraSpec())
    torch.testing.assert_close(_logprob(merged), _logprob(adapted), rtol=0, atol=1e-5)


def test_own_forward_and_transformers_train_the_same_adapters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = ModelSpec(architecture=QWEN)
    own = _policy(model)
    monkeypatch.setattr(network, "is_lean", _never)
    other = _policy(model)
    assert isinstance(own.network, network.LeanNetwork)
    assert isinstance(other.network, network.PlainNetwork)
    _train(own)
    _train(other)
    theirs = other.export_weights()
    for name, weight in own.export_weights().items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-3, atol=1e-5, msg=name)


def test_a_reference_shares_the_weights_and_stays_as_it_was() -> None:
    model = ModelSpec(architecture=QWEN)
    actor = _policy(model)
    reference = _policy(
        model, role="reference", lora=LoraSpec(), optimizer=None, shares_weights=True
    )
    before = _logprob(reference)
    _train(actor)
    assert torch.equal(_logprob(reference), before)
    places = [
        {
            tensor.data_ptr()
            for name, tensor in _module(one).named_parameters()
            if ".lora_" not in name
        }
        for one in (actor, reference)
    ]
    assert places[0] == places[1]


def test_roles_start_alike_and_learn_apart() -> None:
    model = ModelSpec(architecture=QWEN)
    first, second = _policy(model), _policy(model, role="other")
    assert first.weights_sha256() == second.weights_sha256()
    _train(first)
    assert first.weights_sha256() != second.weights_sha256()


def test_bfloat16_models_have_float32_adapters_and_generate() -> None:
    worker = _policy(ModelSpec(architecture=QWEN, dtype="bfloat16"))
    _train(worker)
    assert {tensor.dtype for tensor in worker.export_weights().values()} == {torch.float32}
    prompt = torch.tensor([[5, 6, 7]])
    with call_scope(0, 0):
        rollout = worker.generate(
            prompt, torch.tensor([0]), Sampling(num_samples=2, max_new_tokens=4)
        )
    tokens, mask = rollout.tokens, rollout.mask
    with call_scope(0, 0):
        again = worker.logprob(tokens, mask)
    torch.testing.assert_close(again[mask], rollout.behavior_logprob[mask], rtol=0, atol=0.05)


def test_a_checkpoint_holds_adapters_alone_and_goes_on(tmp_path: Path) -> None:
    model = ModelSpec(architecture=QWEN)
    worker = _policy(model)
    _train(worker, 2)
    worker.save_state(tmp_path)
    saved = read_tensors(tmp_path / "weights.safetensors")
    assert all(".lora_" in name for name in saved)
    assert {tuple(tensor.shape) for tensor in saved.values()} >= {(4, 48), (48, 4)}
    other = _policy(model)
    other.load_state(tmp_path)
    _train(worker, 1)
    _train(other, 1)
    assert worker.weights_sha256() == other.weights_sha256()


@pytest.mark.slow
def test_a_critic_trains_adapters_and_its_head() -> None:
    spec = TorchValueSpec(
        model=ModelSpec(architecture=QWEN), optimizer=OptimizerSpec(lr=1e-2), lora=LORA
    )
    worker = spec.build(WorkerContext("critic"))
    names = worker.export_weights().keys()
    assert {"value_head.weight", "value_head.bias"} <= names
    batch = _batch()
    values = ValueBatch(
        tokens=batch.tokens,
        mask=batch.mask,
        old_value=torch.zeros(batch.mask.shape),
        value_target=torch.ones(batch.mask.shape),
    )
    for step in range(30):
        with call_scope(step, 0):
            worker.train(ClippedValueLoss(), values)
    with call_scope(30, 0):
        found = worker.value(batch.tokens, batch.mask)
    assert float(found[batch.mask].mean()) > 0.2


# --- dropout

DROPOUT = LoraSpec(rank=4, alpha=8.0, dropout=0.3)
TWICE = PolicyBatch(**{name: torch.cat([part, part[:3]]) for name, part in vars(_batch()).items()})
"""Rows of which some are there again, with one prompt."""
TWICE.tokens[:, :3] = TWICE.tokens[0, :3]


def _dropped(**options: Any) -> dict[str, torch.Tensor]:
    """Adapters after three steps with dropout."""
    given: dict[str, Any] = {"lora": DROPOUT, **options}
    worker = _policy(ModelSpec(architecture=QWEN), **given)
    for step in range(3):
        with call_scope(step, 0):
            worker.train(ClippedPolicyLoss(), TWICE)
    return worker.export_weights()


@pytest.mark.parametrize(
    "options",
    [
        {"micro_batch_tokens": 10},
        {"micro_batch_tokens": 40, "activation_checkpointing": True},
        {"own": False},
        {"own": False, "micro_batch_tokens": 30, "activation_checkpointing": True},
    ],
    ids=str,
)
def test_what_dropout_leaves_out_depends_on_no_micro_batch(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _dropped()
    if not options.pop("own", True):
        monkeypatch.setattr(network, "is_lean", _never)
    for name, weight in _dropped(**options).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-5, msg=name)


def test_dropout_leaves_out_its_share_of_what_a_step_trains_and_nothing_else() -> None:
    model = ModelSpec(architecture=QWEN)
    module = model.causal_lm("cpu")
    insert_adapters(module, DROPOUT, but="lm_head")
    parts = [part.lora_dropout["default"] for _, part in adapted_linears(module)]
    state, ones = AdapterDropout.of(module), torch.ones(60, 9, 100)
    tokens = torch.randint(3, 40, (60, 9), generator=torch.Generator().manual_seed(0))
    tokens[30:, :5] = tokens[:30, :5]
    tokens[30:, 5] += 1
    found: list[torch.Tensor] = []
    for step, part in ((0, parts[0]), (0, parts[1]), (1, parts[0])):
        with call_scope(step, 0), state.active(WorkerContext("actor"), trains=True):
            state.keys = state.keys_of(tokens)
            found.append(part(ones))
    for one in found:
        assert one.unique().tolist() == pytest.approx([0, 1 / 0.7])
        for dims in ((0, 1), (0, 2), (1, 2)):
            assert float((one.mean(dims) - 1).abs().max()) < 0.17, dims  # 5 of its deviations
        assert torch.equal(one[:30, :5], one[30:, :5])  # of one text
        # Others agree as often as chance has it: 0.3 * 0.3 + 0.7 * 0.7.
        assert float((one[:30, 5:] == one[30:, 5:]).float().mean()) == pytest.approx(0.58, abs=0.01)
    for other in found[1:]:
        assert float((found[0] == other).float().mean()) == pytest.approx(0.58, abs=0.01)
    assert torch.equal(parts[0](ones), ones)  # outside of a step
    plain, worker = _policy(model), _policy(model, lora=DROPOUT)
    _train(worker)
    plain.load_weights(worker.export_weights())
    assert torch.equal(_logprob(worker), _logprob(plain))
    _train(plain, 1)
    _train(worker, 1)
    assert plain.weights_sha256() != worker.weights_sha256()


def test_an_adapter_whose_weights_have_another_rank_than_it_says_is_refused(tmp_path: Path) -> None:
    model = ModelSpec(architecture=QWEN)
    _policy(model).save_pretrained(tmp_path)
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(file.read_text().replace('"r": 4', '"r": 2'))
    lora = LoraSpec(folder=str(tmp_path / "adapter"))
    with pytest.raises(ConfigError, match="are not those of an adapter of rank 2"):
        _policy(model, lora=lora)


# --- copies of 16 bits, as on a CUDA device


def _through(
    adapters: Adapters, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> list[torch.Tensor]:
    """Outputs, and gradients of the input and of adapters."""
    x = x.detach().requires_grad_()
    own = [one for one in adapters.parts if isinstance(one, LowRank)]
    if adapters.joined is not None:
        out = adapters.joined_linear(x, weight, bias)
    else:
        out = nn.functional.linear(x, weight, bias) + adapters.added(x)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    leaves = [leaf for one in own for leaf in (one.down, one.up)]
    return [out, *torch.autograd.grad(out, [x, *leaves], upstream)]


def test_joined_adapters_are_no_farther_from_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two maps of three, the first and the last."""
    random = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).bfloat16().float()

    x, weight, bias = some(50, 24), some(47, 24), some(47)
    shapes = {"down": (4, 24), "up": (16, 4), "other_down": (3, 24), "other_up": (24, 3)}
    leaves = {name: nn.Parameter(some(*shape)) for name, shape in shapes.items()}
    flat = FlatParameters(leaves)
    first = LowRank(leaves["down"], leaves["up"], 0.5)
    last = LowRank(leaves["other_down"], leaves["other_up"], 0.5)
    adapters = Adapters((first, 7, last))
    exact = _through(adapters, x, weight, bias)
    narrow = [one.bfloat16() for one in (x, weight, bias)]
    plain = _through(adapters, *narrow)
    monkeypatch.setattr(AdapterCopies, "devices", frozenset({"cpu"}))
    AdapterCopies(flat, [adapters], torch.bfloat16).renew()
    joined = _through(adapters, *narrow)
    for one, other, truth in zip(joined, plain, exact, strict=True):
        assert one.dtype == other.dtype
        error, plain_error = ((found.float() - truth).norm() for found in (one, other))
        assert error <= 1.2 * plain_error
        assert error <= 0.01 * truth.norm()


def test_copies_follow_adapters_that_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelSpec(architecture=QWEN, dtype="bfloat16")
    policy = _policy(model)
    _train(policy)
    plain = _logprob(policy)
    monkeypatch.setattr(AdapterCopies, "devices", frozenset({"cpu"}))
    torch.testing.assert_close(_logprob(policy), plain, rtol=0, atol=0.05)
    _train(policy)
    copied = _logprob(policy)
    assert float((copied - plain).abs().max()) > 0.05
    monkeypatch.setattr(AdapterCopies, "devices", frozenset())
    torch.testing.assert_close(_logprob(policy), copied, rtol=0, atol=0.05)


@pytest.mark.gpu
def test_on_a_gpu_adapters_are_sampled_as_they_are_evaluated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before they are trained and after, by the same graphs, and as without copies."""
    model = ModelSpec(architecture=architecture("qwen3"), dtype="bfloat16")
    options: dict[str, Any] = {"lora": LORA, "optimizer": OptimizerSpec(lr=1e-2)}
    spec = TorchPolicySpec(model=model, end_ids=(2,), **options)
    policy = spec.build(WorkerContext("actor", device="cuda"))
    prompt = torch.randint(3, 40, (4, 6), generator=torch.Generator().manual_seed(0))
    found: list[torch.Tensor] = []
    for step in range(2):
        with call_scope(step, 0):
            sampling = Sampling(num_samples=4, max_new_tokens=20)
            rollout = policy.generate(prompt, torch.arange(4), sampling)
        with call_scope(step, 1):
            evaluated = policy.logprob(rollout.tokens, rollout.mask)
            with monkeypatch.context() as patch:
                patch.setattr(AdapterCopies, "devices", frozenset())
                plain = policy.logprob(rollout.tokens, rollout.mask)
        difference = (evaluated - rollout.behavior_logprob)[rollout.mask.bool()].abs()
        assert float(difference.mean()) < 0.02
        torch.testing.assert_close(evaluated, plain, rtol=0, atol=0.1)
        found.append(_logprob(policy))
        _train(policy)
    assert float((found[1] - found[0]).abs().max()) > 0.05
