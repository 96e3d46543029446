"""Families of models as transformers has them, from random weights, against transformers and peft.

What other engines compute of them is in their own tests; here is what those refuse.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.algorithms.roles import PolicyBatch, Sampling
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.megatron_engine.specs import MegatronPolicySpec
from penstock.workers.engines.roles import PolicyWorker
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.engines.vllm_engine.generator import VllmPolicySpec, token_bytes
from penstock.workers.models.lora import LoraSpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.training.optimizer import OptimizerSpec
from torch import Tensor
from torch_models import EOS, MIXTURES, NEWEST, VOCAB, architecture, make_policy

IN_MEGATRON = ("llama3", "mistral", "qwen2", "qwen3", *MIXTURES)
FAMILIES = (*IN_MEGATRON, "smollm3", *NEWEST, "gemma2", "mistral-window")
MOST = [name if name in (*NEWEST, "qwen3_moe") else pytest.param(name, marks=pytest.mark.nightly)
        for name in FAMILIES]  # fmt: skip
TOKENS = torch.randint(3, VOCAB, (4, 24), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(24).expand(4, 24) >= 5
ADVANTAGE = torch.randn(4, 24, generator=torch.Generator().manual_seed(1))
SPEC = OptimizerSpec(lr=1e-2, weight_decay=0.1, eps=1e-6, max_grad_norm=0)
auto: Any = transformers.AutoModelForCausalLM


def load(folder: Path) -> Any:
    """A saved model as its definition has it, without fused kernels."""
    return auto.from_pretrained(folder, attn_implementation="eager")


def saved(name: str, folder: Path) -> PolicyWorker:
    """A policy whose weights are large enough to make choices, in a folder."""
    policy = make_policy(name, spread=0.2)
    policy.save_pretrained(folder)
    return policy


def logprob_of(module: Any, tokens: Tensor = TOKENS, mask: Tensor = MASK) -> Tensor:
    logits = module(input_ids=tokens).logits[:, :-1].float()
    every = torch.log_softmax(logits, -1).gather(2, tokens[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(every, (1, 0)) * mask


def said(policy: PolicyWorker) -> Tensor:
    with call_scope(0, 0):
        return policy.logprob(TOKENS, MASK)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_says_and_samples_what_transformers_does(name: str, tmp_path: Path) -> None:
    policy = saved(name, tmp_path)
    module = load(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(said(policy), logprob_of(module), atol=2e-5, rtol=0)
    prompt = TOKENS[:3, :11].clone()
    prompt[0, 4:] = -1
    with call_scope(0, 0):
        sampling = Sampling(num_samples=1, max_new_tokens=16, temperature=0.0)
        roll = policy.generate(prompt, torch.arange(3), sampling)
    for row, text in enumerate(prompt):
        given = text[text >= 0][None]
        greedy: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16}
        greedy |= {"eos_token_id": EOS, "pad_token_id": 0}
        made = module.generate(given, attention_mask=torch.ones_like(given), **greedy)
        assert roll.tokens[row][roll.mask[row]].tolist() == made[0, given.shape[1] :].tolist()
    with call_scope(1, 0):
        roll = policy.generate(prompt, torch.arange(3), Sampling(num_samples=2, max_new_tokens=16))
    with torch.no_grad():
        expected = logprob_of(module, roll.tokens.clamp(min=0), roll.mask)
    torch.testing.assert_close(roll.behavior_logprob, expected, atol=2e-5, rtol=0)
    exported = policy.export_weights()
    assert exported.keys() == dict(module.named_parameters()).keys()
    for part, weight in module.named_parameters():
        assert torch.equal(exported[part], weight), part


@pytest.mark.parametrize("name", MOST)
def test_a_familys_adapters_are_pefts(name: str, tmp_path: Path) -> None:
    """Log-probabilities, a step of training, and merged weights."""
    from peft import PeftModel

    saved(name, tmp_path / "base")
    lora = LoraSpec(rank=4, alpha=8.0, use_rslora=True)
    model = ModelSpec(folder=str(tmp_path / "base"))
    spec = TorchPolicySpec(model=model, end_ids=(EOS,), lora=lora, optimizer=SPEC)
    policy = spec.build(WorkerContext("actor"))
    random = torch.Generator().manual_seed(2)
    for tensor in policy.local_tensors().values():
        tensor.copy_(torch.randn(tensor.shape, generator=random) * 0.1)
    policy.save_pretrained(tmp_path / "adapted")
    adapter = tmp_path / "adapted" / "adapter"
    theirs: Any = PeftModel.from_pretrained(load(tmp_path / "base"), adapter, is_trainable=True)
    before = logprob_of(theirs)
    torch.testing.assert_close(said(policy), before.detach(), atol=2e-5, rtol=0)
    merged = copy.deepcopy(theirs).merge_and_unload()
    for part, weight in load(tmp_path / "adapted").named_parameters():
        torch.testing.assert_close(weight, merged.get_parameter(part), atol=1e-6, rtol=0)

    trained = {part: p for part, p in theirs.named_parameters() if p.requires_grad}
    (-(ADVANTAGE * before)[MASK].mean()).backward()
    norm = torch.stack([p.grad.norm() for p in trained.values()]).norm()
    options: dict[str, Any] = {"lr": SPEC.lr, "eps": SPEC.eps, "weight_decay": SPEC.weight_decay}
    torch.optim.AdamW(trained.values(), **options).step()
    batch = PolicyBatch(
        tokens=TOKENS, mask=MASK, behavior_logprob=before.detach(), advantage=ADVANTAGE
    )
    with call_scope(0, 0):
        metrics = policy.train(ClippedPolicyLoss(), batch).metrics
    assert metrics["grad_norm"].value == pytest.approx(float(norm), rel=1e-4)
    for part, weight in policy.export_weights().items():
        there = trained[f"base_model.model.{part}".replace(".weight", ".default.weight")]
        torch.testing.assert_close(weight, there.detach(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_megatron_computes_a_family_or_refuses_it_before_it_is_built(name: str) -> None:
    given = {**architecture(name), "vocab_size": 64}
    spec = MegatronPolicySpec(model=ModelSpec(architecture=given), end_ids=(EOS,))
    context = WorkerContext("actor", tensor_parallel=2)
    if name in IN_MEGATRON:
        spec.check_group(context)
        return
    window = "cannot compute a mistral model with sliding_window=8"
    kind = f"has no model_type '{given['model_type']}'"
    with pytest.raises(ConfigError, match=window if name == "mistral-window" else kind):
        spec.check_group(context)


def test_what_vllm_cannot_compute_on_a_cpu_is_refused_before_it_starts() -> None:
    for name in (*FAMILIES, "gpt2"):
        spec = VllmPolicySpec(model=ModelSpec(architecture=architecture(name)), end_ids=(EOS,))
        config, context = spec.model.config, WorkerContext("actor")
        if name == "gpt_oss":
            with pytest.raises(ConfigError, match="no kernel on CPUs for the experts of a 'gpt_o"):
                spec.check_group(context)
            continue
        spec.check_group(context)
        # Keys and values of a token, in float32, as transformers caches them.
        module = spec.model.causal_lm("cpu")
        cache = module(input_ids=TOKENS[:1, :1], use_cache=True).past_key_values
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        assert token_bytes(config, spec, context) == held, name


def test_a_state_instead_of_keys_is_no_cache() -> None:
    given = {**architecture("qwen3"), "model_type": "qwen3_next", "num_experts": 16}
    spec = TorchPolicySpec(model=ModelSpec(architecture=given), end_ids=(EOS,))
    spec.check_group(WorkerContext("actor", methods=frozenset({"train", "logprob"})))
    with pytest.raises(ConfigError, match="cannot generate with a 'qwen3_next', whose layers keep"):
        spec.check_group(WorkerContext("actor", methods=frozenset({"generate"})))


def test_a_model_of_more_than_text_is_refused_by_name() -> None:
    model = ModelSpec(architecture={"model_type": "gemma3", "text_config": {}})
    with pytest.raises(ConfigError, match="'gemma3', a model of more than text\n .*gemma3_text"):
        model.check(scalar_head=False)
