from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock.planner.inputs.model_shape import (
    Head,
    ModelShape,
    adapter_params,
    logical_params,
    shape_of,
)
from penstock.workers.models.lora import LoraSpec, insert_adapters
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from ..shapes import LLAMA_7B, LLAMA_70B
from ..transfers import models

SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 12,
    "vocab_size": 20,
    "head_dim": 2,
    "pad_token_id": 0,
}
MIXTURE: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "shared_expert_intermediate_size": 10,
}


@given(models(), st.sampled_from(["vocabulary", "scalar"]))
def test_sizes_add_up_to_the_shapes_own_count(model: ModelShape, head: Head) -> None:
    params = logical_params(model, head)
    assert sum(prod(param.shape) for param in params) == model.num_params(head)
    assert len({param.name for param in params}) == len(params)


def test_known_models_have_their_known_numbers() -> None:
    both = (LLAMA_7B, LLAMA_70B)
    sizes = {m.name: sum(prod(p.shape) for p in logical_params(m)) for m in both}
    assert sizes == {"llama-7b": 6_738_415_616, "llama-70b": 68_976_648_192}
    assert len(logical_params(LLAMA_70B)) == 723


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "config", [LlamaConfig, Qwen2Config, Qwen3Config, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig]
)
def test_names_and_shapes_are_hugging_faces(config: type[PretrainedConfig], tied: bool) -> None:
    mixture = {name: size for name, size in MIXTURE.items() if hasattr(config(), name)}
    settings: dict[str, Any] = {**SIZES, "tie_word_embeddings": tied}
    made = config(**settings, **(mixture if "num_experts_per_tok" in mixture else {}))
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(made).named_parameters()
    ours = logical_params(shape_of(made.to_dict()))
    assert {p.name: p.shape for p in ours} == {name: tuple(p.shape) for name, p in theirs}


@pytest.mark.parametrize(
    ("config", "targets"),
    [
        (LlamaConfig, ()),
        (Qwen3Config, ("q_proj", "mlp.up_proj")),
        (Qwen3MoeConfig, ("q_proj", "o_proj")),
    ],
)
def test_adapters_are_as_many_as_peft_makes(
    config: type[PretrainedConfig], targets: tuple[str, ...]
) -> None:
    names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    mixture = {name: MIXTURE[name] for name in names if config is Qwen3MoeConfig}
    made = config(**SIZES, **mixture)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(made)
    theirs = insert_adapters(
        module, LoraSpec(rank=3, alpha=6.0, target_modules=targets), but="lm_head"
    )
    shape = shape_of(made.to_dict())
    adapters = adapter_params(shape, 3, targets)
    assert adapters == sum(parameter.numel() for parameter in theirs.values())
    assert shape.sent_bytes() == shape.num_params() * 2
    assert shape.model_copy(update={"adapter_params": adapters}).sent_bytes() == adapters * 4


def test_a_scalar_head_is_called_score() -> None:
    settings: dict[str, Any] = {**SIZES, "num_labels": 1}
    made = LlamaConfig(**settings)
    with torch.device("meta"):
        theirs = AutoModelForSequenceClassification.from_config(made).named_parameters()
    ours = logical_params(shape_of(made.to_dict()), "scalar")
    assert {p.name: p.shape for p in ours} == {name: tuple(p.shape) for name, p in theirs}


def test_every_cut_falls_between_units() -> None:
    for param in logical_params(LLAMA_70B):
        if param.cut_dim is not None:
            assert param.shape[param.cut_dim] % param.num_units == 0
