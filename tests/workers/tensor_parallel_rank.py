"""A process of a tensor-parallel group of the torch engine: what it computes and samples.

python tensor_parallel_rank.py FOLDER SIZE [SIZE ...]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked_ranks import fork_groups
from penstock.algorithms.roles import Sampling
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.torch_engine.specs import (
    TorchGeneratorSpec,
    TorchPolicySpec,
    TorchRewardModelSpec,
)
from penstock.workers.models.spec import ModelSpec
from torch_models import EOS, make_prompts
from vllm_models import generate

SAMPLING = Sampling(num_samples=3, max_new_tokens=12)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "smollm3": {"model_type": "smollm3", "attention_bias": True, "mlp_bias": True,
                "no_rope_layers": [1, 0], "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "head_dim": 8},
}  # fmt: skip


def spec(name: str, **others: Any) -> ModelSpec:
    return ModelSpec(architecture={**SIZES, **MODELS[name]}, **others)


def found(name: str, context: WorkerContext) -> dict[str, Any]:
    """Everything that the process of a rank gets of its calls."""
    model = spec(name)
    generator = TorchGeneratorSpec(model=model, end_ids=(EOS,), num_words=60).build(context)
    policy = TorchPolicySpec(model=model, end_ids=(EOS,), num_words=60).build(context)
    reward = TorchRewardModelSpec(model=model).build(context)
    prompt, prompt_id = make_prompts(5)
    roll = generate(generator, prompt, prompt_id, SAMPLING)
    top = policy.top_words(roll.tokens, roll.mask, num_words=4)
    answers = {
        "tokens": roll.tokens,
        "behavior": roll.behavior_logprob,
        "mask": roll.mask,
        "logprob": policy.logprob(roll.tokens, roll.mask),
        "words": top.words,
        "top": top.logprob,
        "score": reward.score(roll.tokens, roll.mask, roll.prompt_id),
        "some": generate(generator, prompt[1:3], prompt_id[1:3], SAMPLING).tokens,
        "weights": policy.export_weights(),
        "held": sum(t.numel() for t in generator.local_tensors().values()),
    }
    flipped = model.causal_lm("cpu").named_parameters()
    generator.load_weights({name: weight.detach().flip(0) for name, weight in flipped})
    answers["after"] = generate(generator, prompt, prompt_id, SAMPLING).tokens
    return answers


def main(process: int, size: int, folder: Path, words: list[str]) -> None:
    torch.manual_seed(0)
    if size > 1:
        meeting = f"file://{folder}/meet-{size}"
        dist.init_process_group("gloo", init_method=meeting, rank=process, world_size=size)
    context = WorkerContext("actor", seed=3, tensor_parallel=size, tensor_rank=process)
    for name in MODELS:
        torch.save(found(name, context), folder / f"{name}-{size}-{process}.pt")


if __name__ == "__main__":
    fork_groups(main)
