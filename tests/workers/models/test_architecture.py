"""Keys and values of an architecture that no model can be made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from penstock.dataflow.errors import ConfigError
from penstock.workers.models.architecture import checked_config, empty_model
from penstock.workers.models.spec import ModelSpec
from torch_models import FAMILIES, GPT2, MIXTURE, PLAIN
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

QWEN = FAMILIES["qwen2"]


@pytest.mark.parametrize("given", [*FAMILIES.values(), *PLAIN.values(), MIXTURE])
def test_models_that_can_be_made(given: dict[str, Any]) -> None:
    empty_model(checked_config(given))


CANNOT: list[tuple[dict[str, Any], str, Any, str]] = [
    (QWEN, "num_attention_heads", 0, "0; expected an integer from 1 to 16384"),
    (GPT2, "n_head", 0, "0; expected an integer from 1 to 16384"),
    (QWEN, "hidden_size", 10**9, "1000000000; expected an integer from 1 to 262144"),
    (QWEN, "vocab_size", -1, "-1; expected an integer from 1 to 16777216"),
    (QWEN, "hidden_size", "abc", "'abc'; expected an integer"),
    (QWEN, "tie_word_embeddings", "yes", "'yes'; expected true or false"),
    (GPT2, "n_embd", 33,
     "33; expected a multiple of n_head=2\n    change one of the two, as to 32, or set head_dim"),
    (QWEN, "num_key_value_heads", 3, "3; expected a number that divides num_attention_heads=4"),
    (QWEN, "hidden_size", 36,
     "36; expected a size that gives heads an even number of dimensions, not 9\n    rotary "
     "positions turn the dimensions of a head in pairs"),
    (MIXTURE, "num_experts_per_tok", 5, "5; expected at most the 4 experts there"),
    (QWEN, "hidden_act", "swiglu",
     "'swiglu'; expected an activation that transformers has; did you mean 'silu'?\n    common "
     "ones are: silu, gelu, gelu_new, relu"),
    (QWEN, "rms_norm_eps", float("nan"), "nan; expected a finite number"),
    (QWEN, "rms_norm_eps", 0.0, "0.0; expected a number above 0"),
    (QWEN, "initializer_range", -1.0, "-1.0; expected a number of at least 0"),
    (QWEN, "attention_dropout", 2.0, "2.0; expected a share from 0 to 1"),
    (QWEN, "rope_theta", 0, "0; expected a number above 0"),
    (QWEN, "rope_scaling", {"rope_type": "foo"},
     "{'rope_type': 'foo'}; expected a rope_type of default, linear, "),
    (QWEN, "model_type", "qwen7",
     "'qwen7', which transformers does not know; did you mean 'qwen3'?\n    give the model_type of "
     "a causal language model, such as qwen2 or llama; code of a folder's own is never run"),
]  # fmt: skip
NO_CONFIG = (
    ", and transformers makes no config of the fields beside it: Class validation error for "
)
OTHERS = [
    ({**QWEN, "hiden_size": 3},
     "there is no key 'model.architecture.hiden_size'; did you mean 'hidden_size'?\n    a qwen2 "
     "model has: vocab_size, hidden_size, intermediate_size, num_hidden_layers, "
     "num_attention_heads, num_key_value_heads, hidden_act, max_position_embeddings, "
     "initializer_range, rms_norm_eps, use_cache, tie_word_embeddings, rope_parameters, "
     "use_sliding_window, sliding_window, max_window_layers, layer_types, attention_dropout, "
     "pad_token_id, bos_token_id, eos_token_id"),
    ({**QWEN, "num_attention_heads": 5},
     "'model.architecture.hidden_size' is 48; expected a multiple of num_attention_heads=5\n    "
     "change one of the two, as to 45, or set head_dim"),
    ({**FAMILIES["qwen3"], "head_dim": 9},
     f"'model.architecture.model_type' is 'qwen3'{NO_CONFIG}validator 'validate_rope': "),
    ({**QWEN, "layer_types": ["full_attention"]},
     f"'model.architecture.model_type' is 'qwen2'{NO_CONFIG}validator 'validate_layer_type': "),
]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(
            ({**all_, key: v}, f"'model.architecture.{key}' is {said}")
            for all_, key, v, said in CANNOT
        ),
        *OTHERS,
    ],
)
def test_architectures_that_cannot_be_computed(given: dict[str, Any], message: str) -> None:
    before = repr(given)
    with pytest.raises(ConfigError) as error:
        checked_config(given)
    assert str(error.value)[: len(message)] == message
    assert repr(given) == before  # transformers writes to what it is given


@pytest.mark.slow
def test_no_familys_defaults_are_refused() -> None:
    refused = {
        kind: str(error) for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if (error := fault(kind))
    }
    # The one that transformers itself cannot make without parts, and one whose heads are rounded.
    assert refused.keys() <= {"musicgen", "musicgen_melody", "glm4_moe"}, refused


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "qwen3_moe", "deepseek_v3", "gemma3_text"])
def test_what_transformers_writes_of_a_config_is_taken(kind: str) -> None:
    checked_config(CONFIG_MAPPING[kind]().to_dict())


def fault(kind: str) -> ConfigError | None:
    try:
        checked_config({"model_type": kind})
    except ConfigError as error:
        return error
    return None


def test_a_family_that_is_no_language_model() -> None:
    with pytest.raises(ConfigError) as error:
        empty_model(checked_config({"model_type": "t5", "d_model": 16}))
    assert str(error.value).startswith(
        "'model.architecture.model_type' is 't5', of which transformers makes no causal language "
        "model: Unrecognized configuration class"
    )


@pytest.mark.parametrize("given", [*FAMILIES.values(), *PLAIN.values(), MIXTURE])
def test_in_16_bits_positions_are_as_exact_as_in_transformers(given: dict[str, Any]) -> None:
    """A rotary frequency of 16 bits would be another angle after a few hundred positions."""
    spec = ModelSpec(architecture=given, dtype="bfloat16")
    ours = spec.causal_lm("cpu")
    auto: Any = AutoModelForCausalLM
    theirs = auto.from_config(spec.config, dtype=torch.bfloat16).eval()
    theirs.load_state_dict(ours.state_dict())
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    buffers = dict(theirs.named_buffers())
    for name, buffer in ours.named_buffers():
        if "inv_freq" not in name:
            continue
        torch.testing.assert_close(buffer, buffers[name], rtol=0, atol=0)  # dtypes as well


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("given", [*FAMILIES.values(), *PLAIN.values(), MIXTURE])
def test_a_vocabulary_that_is_made_larger_changes_no_first_weight(
    given: dict[str, Any], tied: bool
) -> None:
    """Tensor parallelism needs such rows, added to a model of the words that texts have."""
    fields = {**given, "tie_word_embeddings": tied}
    small = ModelSpec(architecture={**fields, "vocab_size": 29}).causal_lm("cpu")
    large = ModelSpec(architecture={**fields, "vocab_size": 64}, num_words=29).causal_lm("cpu")
    assert large.config.vocab_size == 64
    grown = dict(large.named_parameters())
    assert any(
        len(weight) == 64 != len(small.get_parameter(name)) for name, weight in grown.items()
    )
    for name, weight in small.named_parameters():
        assert torch.equal(weight, grown[name][: len(weight)]), name
