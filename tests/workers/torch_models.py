"""Tiny models and batches shared by the tests of the torch engine."""

from __future__ import annotations

from typing import Any

import torch
from penstock.algorithms.roles import PolicyBatch, Rollout, Sampling
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.roles import PolicyWorker
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.tokenizer import TokenizerSpec
from penstock.workers.training.optimizer import OptimizerSpec
from torch import Tensor

VOCAB = 61
EOS = 2
TOKENIZER = TokenizerSpec(alphabet="".join(map(chr, range(65, 65 + 57))))  # ids 4 to 60
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**BASE, "model_type": "llama", "tie_word_embeddings": False},
    "llama-biased": {**BASE, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-all-heads": {**BASE, "model_type": "llama", "num_key_value_heads": 4},
    "llama3": {**BASE, "model_type": "llama", "tie_word_embeddings": True, "rope_theta": 5e5,
               "rope_scaling": {**ROPE, "original_max_position_embeddings": 64}},
    "mistral": {**BASE, "model_type": "mistral", "sliding_window": None},
    "qwen2": {**BASE, "model_type": "qwen2", "tie_word_embeddings": False},
    "qwen2-all-heads": {**BASE, "model_type": "qwen2", "num_key_value_heads": 4},
    "qwen2-tied": {**BASE, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**BASE, "model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "smollm3": {**BASE, "model_type": "smollm3", "no_rope_layers": [1, 0], "pad_token_id": None},
}  # fmt: skip
FOUR_QUERIES: dict[str, Any] = {
    **BASE,
    "model_type": "qwen3",
    "head_dim": 64,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
"""Four queries per key, and a head as long as a real one's: see `attend_cache`."""
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 256,
}


ALL_HEADS = {name: value for name, value in BASE.items() if name != "num_key_value_heads"}
PLAIN: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "mistral-window": {**BASE, "model_type": "mistral", "sliding_window": 8},
    "gemma2": {
        **BASE,
        "model_type": "gemma2",
        "head_dim": 32,
        "sliding_window": 8,
        "attn_logit_softcapping": 2.0,
    },
    "gpt_neox": {**ALL_HEADS, "model_type": "gpt_neox"},
}
"""Architectures that go through the Hugging Face forward."""
TWO_KINDS: dict[str, Any] = {"head_dim": 32, "sliding_window": 8,
                             "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
NEWEST: dict[str, dict[str, Any]] = {
    "gemma3": {**BASE, **TWO_KINDS, "model_type": "gemma3_text", "query_pre_attn_scalar": 24},
    "olmo2": {**BASE, "model_type": "olmo2"},
    "phi4": {**BASE, "model_type": "phi3", "partial_rotary_factor": 0.5},
    "gpt_oss": {**BASE, **TWO_KINDS, "model_type": "gpt_oss", "num_local_experts": 4,
                "num_experts_per_tok": 2},
}  # fmt: skip
"""The same, as they are published."""
MIXTURE: dict[str, Any] = {
    **BASE,
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_hidden_layers": 1,
}
SPARSE: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": MIXTURE,
    "qwen2_moe": {**BASE, **SPARSE, "model_type": "qwen2_moe", "num_experts": 4,
                  "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**BASE, **SPARSE, "model_type": "qwen3_moe", "num_experts": 8,
                  "num_experts_per_tok": 3, "norm_topk_prob": True, "head_dim": 16},
}  # fmt: skip


def architecture(name: str) -> dict[str, Any]:
    return {**FAMILIES, **PLAIN, **NEWEST, **MIXTURES, "four-queries": FOUR_QUERIES}[name]


def make_policy(
    name: str = "qwen2-tied",
    *,
    optimizer: OptimizerSpec | None = None,
    context: WorkerContext | None = None,
    spread: float = 0.15,
    **options: Any,
) -> PolicyWorker:
    """A policy whose weights and biases are all random and large enough to make choices."""
    dtype = options.pop("dtype", "float32")
    spec = TorchPolicySpec(
        model=ModelSpec(architecture=architecture(name), dtype=dtype),
        end_ids=(EOS,),
        optimizer=optimizer,
        **options,
    )
    policy = spec.build(context or WorkerContext("actor", seed=7))
    generator = torch.Generator().manual_seed(3)
    weights = policy.export_weights()
    policy.load_weights(
        {n: torch.randn(w.shape, generator=generator) * spread for n, w in weights.items()}
    )
    return policy


def module_of(worker: Any) -> Any:
    """The Hugging Face module of a worker that has all of it."""
    return worker.network.module


def assert_top_words(words: Tensor, logprob: Tensor, policy: PolicyWorker, batch: Any) -> None:
    """The likeliest by this policy's own numbers; which of two alike comes first is rounding."""
    tokens, mask = batch["tokens"], batch["mask"]
    whole = policy.top_words(tokens, mask, num_words=policy.model.config.vocab_size)
    torch.testing.assert_close(logprob, whole.logprob[..., : words.shape[2]], atol=1e-5, rtol=0)
    every = torch.zeros_like(whole.logprob).scatter(2, whole.words.clamp(min=0), whole.logprob)
    found = every.gather(2, words.clamp(min=0))
    torch.testing.assert_close(logprob[mask], found[mask], atol=1e-5, rtol=0)


def make_prompts(num: int, longest: int = 19, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Prompts of 1 to `longest` tokens with scattered ids."""
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(1, longest + 1, (num,), generator=generator)
    prompt = torch.randint(3, VOCAB, (num, longest), generator=generator)
    prompt[torch.arange(longest) >= length[:, None]] = -1
    return prompt, torch.arange(num) * 17 + 5


def make_batch(policy: PolicyWorker, num_prompts: int = 6, *, new: int = 20) -> PolicyBatch:
    prompt, prompt_id = make_prompts(num_prompts)
    sampling = Sampling(num_samples=4, max_new_tokens=new)
    return to_batch(policy.generate(prompt, prompt_id, sampling))


def to_batch(roll: Rollout) -> PolicyBatch:
    """With an advantage that depends on the row alone, in [-1, 1]."""
    total = roll.tokens.clamp(min=0).sum(1, keepdim=True)
    advantage = torch.sin(total.float()) * roll.mask
    return PolicyBatch(
        tokens=roll.tokens,
        mask=roll.mask,
        behavior_logprob=roll.behavior_logprob,
        advantage=advantage,
    )
