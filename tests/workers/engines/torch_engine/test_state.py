"""Weights and states in and out of the torch workers."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from penstock.algorithms.losses import ClippedPolicyLoss, ClippedValueLoss
from penstock.algorithms.roles import ValueBatch
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.roles import PolicyWorker
from penstock.workers.engines.torch_engine.specs import (
    TorchPolicySpec,
    TorchRewardModelSpec,
    TorchValueSpec,
)
from penstock.workers.models.spec import ModelSpec
from penstock.workers.training.optimizer import OptimizerSpec
from torch_models import EOS, architecture, make_batch, make_policy, module_of

OPTIMIZER = OptimizerSpec(lr=1e-3, schedule="linear", total_calls=8, warmup_calls=1)
CONTEXT = WorkerContext("critic", seed=3)


def train(policy: PolicyWorker, steps: range) -> None:
    for step in steps:
        with call_scope(step, 0):
            policy.train(ClippedPolicyLoss(), make_batch(make_policy()), num_minibatches=2)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("saved_after", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("trained_before", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_resumed_worker_goes_on_bit_for_bit(
    tmp_path: Path, dtype: str, saved_after: int, trained_before: int
):
    whole = make_policy(optimizer=OPTIMIZER, dtype=dtype)
    train(whole, range(saved_after))
    whole.save_state(tmp_path)
    train(whole, range(2, 4))
    resumed = make_policy(optimizer=OPTIMIZER, dtype=dtype)
    train(resumed, range(trained_before))
    resumed.load_state(tmp_path)
    train(resumed, range(2, 4))
    assert resumed.weights_sha256() == whole.weights_sha256()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"weights.safetensors", "optimizer.safetensors", "state.json"}
    assert json.loads((tmp_path / "state.json").read_text())["micro_batch_tokens"] == 4096


def _trains(policy: PolicyWorker, state: Path) -> None:
    train(policy, range(2, 3))


def _is_given_weights(policy: PolicyWorker, state: Path) -> None:
    policy.load_weights({name: weight + 1 for name, weight in policy.export_weights().items()})


def _is_given_a_state(policy: PolicyWorker, state: Path) -> None:
    policy.load_state(state)


def _follows(policy: PolicyWorker, state: Path) -> None:
    with call_scope(5, 0):
        policy.follow(make_policy(spread=0.3))


def _sleeps(policy: PolicyWorker, state: Path) -> None:
    policy.sleep()


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [_trains, _is_given_weights, _is_given_a_state, _follows, _sleeps]
)
def test_a_state_is_that_of_its_step_whatever_comes_before_it_is_written(
    tmp_path: Path, change: Callable[[PolicyWorker, Path], None]
) -> None:
    at_once, later, other = tmp_path / "at_once", tmp_path / "later", tmp_path / "other"
    make_policy(optimizer=OPTIMIZER, spread=0.2).save_state(other)
    policy = make_policy(optimizer=OPTIMIZER, offload=True)
    train(policy, range(2))
    policy.save_state(at_once)
    write = policy.take_state()
    change(policy, other)
    later.mkdir()
    written = write(later, lambda: False)
    for path in at_once.iterdir():
        assert (later / path.name).read_bytes() == path.read_bytes()
        assert written[path.name].sha256 == sha256(path.read_bytes()).hexdigest()


def test_a_state_of_another_model_is_refused(tmp_path: Path):
    make_policy("qwen2-tied").save_state(tmp_path)
    with pytest.raises(ValueError, match=r"weights do not fit: missing \['lm_head.weight'\]"):
        make_policy("qwen2").load_state(tmp_path)
    with pytest.raises(ValueError, match="was saved by a frozen worker and has no optimizer state"):
        make_policy("qwen2-tied", optimizer=OPTIMIZER).load_state(tmp_path)


def test_exported_weights_are_a_snapshot_and_load_in_place():
    source = make_policy(optimizer=OPTIMIZER)
    before = source.weights_sha256()
    snapshot = source.export_weights()
    train(source, range(1))
    assert source.weights_sha256() != before
    copy = make_policy()
    copy.load_weights(source.export_weights())
    assert copy.weights_sha256() == source.weights_sha256()
    copy.load_weights(snapshot)
    assert copy.weights_sha256() == before


def test_weights_with_a_wrong_shape_are_refused():
    policy = make_policy()
    weights = policy.export_weights()
    before = policy.weights_sha256()
    weights["model.norm.weight"] = torch.zeros(5)
    with pytest.raises(ValueError, match=r"'model.norm.weight': expected shape \[48\], got \[5\]"):
        policy.load_weights(weights)
    assert policy.weights_sha256() == before


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3", "gpt2"])
def test_a_saved_policy_is_a_hugging_face_folder(tmp_path: Path, name: str):
    policy = make_policy(name)
    policy.save_pretrained(tmp_path)
    auto: Any = transformers.AutoModelForCausalLM
    loaded = auto.from_pretrained(tmp_path, local_files_only=True)
    tokens = torch.arange(3, 20)[None]
    torch.testing.assert_close(loaded(tokens).logits, module_of(policy)(tokens).logits)
    spec = TorchPolicySpec(model=ModelSpec(folder=str(tmp_path)), end_ids=(EOS,))
    again = pickle.loads(pickle.dumps(spec)).build(CONTEXT)
    assert again.weights_sha256() == policy.weights_sha256()


def test_value_and_reward_models_start_from_the_policys_backbone(tmp_path: Path):
    policy = make_policy()
    policy.save_pretrained(tmp_path)
    model = ModelSpec(folder=str(tmp_path))
    backbone = policy.export_weights()
    for spec in (TorchValueSpec(model=model), TorchRewardModelSpec(model=model)):
        weights = spec.build(CONTEXT).export_weights()
        assert {name: backbone[name].tolist() for name in backbone} == {
            name: weight.tolist() for name, weight in weights.items() if name in backbone
        }
        assert len(weights) == len(backbone) + 2


def test_value_and_reward_models_keep_their_heads(tmp_path: Path):
    model = ModelSpec(architecture=architecture("llama"))
    value = TorchValueSpec(model=model, zero_init_head=False).build(CONTEXT)
    value.save_pretrained(tmp_path / "value")
    again = TorchValueSpec(model=ModelSpec(folder=str(tmp_path / "value"))).build(CONTEXT)
    assert again.weights_sha256() == value.weights_sha256()
    reward = TorchRewardModelSpec(model=model).build(CONTEXT)
    reward.save_pretrained(tmp_path / "reward")
    other = WorkerContext("other", seed=99)
    again = TorchRewardModelSpec(model=ModelSpec(folder=str(tmp_path / "reward"))).build(other)
    assert again.weights_sha256() == reward.weights_sha256()


def test_values_are_read_before_each_token_and_scores_after_the_last():
    batch = make_batch(make_policy("llama"))
    model = ModelSpec(architecture=architecture("llama"))
    value = TorchValueSpec(model=model, zero_init_head=False).build(CONTEXT)
    reward = TorchRewardModelSpec(model=model, micro_batch_tokens=100).build(CONTEXT)
    values = value.value(batch.tokens, batch.mask)
    scores = reward.score(batch.tokens, batch.mask, torch.arange(len(batch.tokens)))
    for row, tokens in enumerate(batch.tokens):
        ids = tokens[tokens >= 0][None]
        hidden = module_of(value).model(input_ids=ids).last_hidden_state
        expected = module_of(value).value_head(hidden)[0, :, 0].detach()
        for t in torch.nonzero(batch.mask[row])[:, 0].tolist():
            assert float(values[row, t]) == pytest.approx(float(expected[t - 1]), abs=1e-5)
        hidden = module_of(reward).model(input_ids=ids).last_hidden_state
        last = module_of(reward).score(hidden)[0, -1, 0].detach()
        assert float(scores[row]) == pytest.approx(float(last), abs=1e-5)
    assert not values[~batch.mask].any()


@pytest.mark.slow
def test_a_value_head_starts_at_zero_and_learns():
    batch = make_batch(make_policy())
    spec = TorchValueSpec(
        model=ModelSpec(architecture=architecture("qwen2-tied")), optimizer=OptimizerSpec(lr=1e-2)
    )
    critic = spec.build(CONTEXT)
    old = critic.value(batch.tokens, batch.mask)
    assert not old.any()
    target = ValueBatch(
        tokens=batch.tokens, mask=batch.mask, old_value=old, value_target=batch.mask.float()
    )
    losses = [
        critic.train(ClippedValueLoss(eps=None), target).metrics["loss"].value for _ in range(60)
    ]
    assert losses[0] == pytest.approx(0.5, rel=1e-3)
    assert losses[-1] < 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of folder= and architecture="),
        ({"architecture": {"hidden_size": 3}}, "has no 'model_type'"),
    ],
)
def test_model_specs_say_what_is_wrong(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        ModelSpec(**options)
