"""What FSDP's processes hold where they share rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from penstock.configs.references import option_file
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.planner.inputs.calls import Call, Lengths
from penstock.planner.inputs.layout import Layout
from penstock.planner.inputs.model_shape import ModelShape, shape_of
from penstock.workers.engines.fsdp_engine.declaration import FSDP
from penstock.workers.engines.fsdp_engine.mesh import check_division
from penstock.workers.engines.fsdp_engine.specs import FsdpPolicySpec
from penstock.workers.models.spec import ModelSpec
from torch import Tensor

MODEL = ModelShape(
    name="tiny",
    hidden_size=64,
    num_layers=4,
    num_heads=8,
    num_key_heads=2,
    head_dim=8,
    intermediate_size=96,
    vocab_size=256,
)
MEMORY = FSDP.planned.memory


def call(kind: str, *, trained: bool = True) -> Call:
    """64 rows of 32 + 96 tokens."""
    return Call(
        name=f"actor.{kind}",
        role="actor",
        kind="train" if kind == "train" else "forward",
        model=MODEL,
        head="vocabulary",
        trained=trained,
        num_sequences=64,
        prompt=Lengths.constant(32),
        response=Lengths.constant(96),
    )


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(
    ("shared", "alone"),
    [
        (Layout(cp=2, dp=2, zero=3), Layout(dp=4, zero=3)),
        (Layout(cp=2, dp=2, zero=2), Layout(dp=4, zero=2)),
        # With stage 0 those divide the weights that share rows; the others hold the same.
        (Layout(cp=2, dp=2), Layout(dp=2, zero=3)),
    ],
)
def test_weights_are_divided_over_all_that_share_rows(
    shared: Layout, alone: Layout, trained: bool
) -> None:
    kind = "train" if trained else "forward"
    one = call(kind, trained=trained)
    assert MEMORY.resident(one, shared) == MEMORY.resident(one, alone)
    found, expected = MEMORY.transient(one, shared), MEMORY.transient(one, alone)
    assert (found.weights, found.gradients) == (expected.weights, expected.gradients)


@pytest.mark.parametrize(
    ("kind", "again", "layers"), [("train", False, 4), ("train", True, 1), ("forward", False, 1)]
)
def test_activations_are_those_of_a_part_of_the_tokens_and_of_all_keys(
    kind: str, again: bool, layers: int
) -> None:
    one = call(kind)
    layout = Layout(cp=2, zero=3, checkpointing=again, micro_batch=2)
    found = MEMORY.transient(one, layout)
    whole = MEMORY.transient(one, layout.model_copy(update={"cp": 1}))
    keys = 2 * MODEL.num_key_heads * MODEL.head_dim * MODEL.dtype_bytes
    assert (found.activations - layers * 128 * keys) * 2 == whole.activations
    assert found.logits * 2 == whole.logits


@pytest.mark.parametrize(
    ("stages", "shards", "share_rows", "message"),
    [
        (1, 3, 1,
         "'actor' has shards=3, which does not divide the 4 processes that share its model\n    "
         "set executor.tensor_parallel to a multiple of shards"),
        (1, 4, 3,
         "'actor' has context_parallel=3, which does not divide the 4 processes that share its "
         "model\n    set executor.tensor_parallel to a multiple of it"),
        (1, 2, 4,
         "'actor' has context_parallel=4, which does not divide its 2 shards\n    set "
         "engine.options.shards to a multiple of it"),
        (2, 4, 2,
         "'actor' is on a group of 2 pipeline stages, which engine=fsdp does not have\n    set "
         "executor.pipeline_parallel to 1, or engine=megatron"),
    ],
)  # fmt: skip
def test_processes_that_cannot_be_divided_so(
    stages: int, shards: int, share_rows: int, message: str
) -> None:
    context = WorkerContext("actor", tensor_parallel=4, pipeline_parallel=stages)
    with pytest.raises(ConfigError) as refused:
        check_division(context, shards, share_rows)
    assert str(refused.value) == message


def test_processes_that_can_be_divided_so() -> None:
    check_division(WorkerContext("actor", tensor_parallel=4), 4, 2)


def test_more_processes_than_experts_are_refused_as_some_would_hold_nothing() -> None:
    architecture: dict[str, Any] = {
        "model_type": "mixtral",
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
    }
    spec = FsdpPolicySpec(model=ModelSpec(architecture=architecture), end_ids=(1,))
    spec.check_group(WorkerContext("actor", tensor_parallel=4))
    with pytest.raises(ConfigError, match="divides the 4 experts of this 'mixtral' among at most"):
        spec.check_group(WorkerContext("actor", tensor_parallel=8))


# --- a 7B at 16k tokens on devices of 80 GB

QWEN_7B = shape_of(option_file("model", "qwen2.5-7b")["architecture"])


def needed_gb(layout: Layout, model: ModelShape = QWEN_7B) -> tuple[float, float]:
    """GB of each device between calls, and of what training adds, one row at a time."""
    one = replace(
        call("train"),
        model=model,
        prompt=Lengths.constant(1024),
        response=Lengths.constant(15 * 1024),
    )
    parts = MEMORY.resident(one, layout), MEMORY.transient(one, layout)
    return parts[0].total / 1e9, parts[1].total / 1e9


def test_a_7b_at_16k_tokens_needs_its_activations_computed_again() -> None:
    """18 bytes per weight over 8 devices are 17 GB. 8 states and 5 widths of 28 layers are 115 GB,
    within a tenth; of the logits, 25 GB more, only some exist. Computed again, a state is kept of
    each layer: 25 GB in all, within a fifth, with what is gathered of the weights."""
    held, adds = needed_gb(Layout(dp=8, zero=3))
    assert held == pytest.approx(17.1, rel=0.01)
    assert adds == pytest.approx(115, rel=0.1)
    assert held + adds > 80
    held, adds = needed_gb(Layout(dp=8, zero=3, checkpointing=True))
    assert held + adds == pytest.approx(25, rel=0.2)


def test_a_7b_fits_on_one_device_of_80_gb_with_adapters_alone() -> None:
    again = Layout(checkpointing=True)
    assert needed_gb(again)[0] == pytest.approx(137, rel=0.01)
    adapted = QWEN_7B.model_copy(update={"adapter_params": 40_000_000})
    assert sum(needed_gb(again, adapted)) < 40


def saved_bytes(model: ModelShape, num_layers: int, tokens: int) -> int:
    """Bytes of all that transformers' own layers keep for the backward pass."""
    config = transformers.AutoConfig.for_model(
        "qwen2",
        hidden_size=model.hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_key_heads,
        intermediate_size=model.intermediate_size,
        vocab_size=model.vocab_size,
    )
    made = transformers.AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, model.dtype), attn_implementation="sdpa"
    )
    weights = {parameter.untyped_storage().data_ptr() for parameter in made.parameters()}
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            kept[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        made.base_model(input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_layer_keeps_what_transformers_does(dtype: str) -> None:
    """Counted, to the byte: what a third layer adds to two."""
    model = MODEL.model_copy(update={"dtype": dtype})
    found = saved_bytes(model, 3, 128) - saved_bytes(model, 2, 128)
    one = replace(call("train"), model=model)
    parts = MEMORY.transient(one, Layout())
    assert parts.activations == model.num_layers * found


def test_a_gpu_keeps_logits_of_16_bits_and_makes_none_of_float32() -> None:
    model = MODEL.model_copy(update={"dtype": "bfloat16", "vocab_size": 100_000})
    train, forward = (replace(call(kind), model=model) for kind in ("train", "forward"))
    layout = Layout(zero=3, micro_batch=8)
    kept = MEMORY.transient(train, layout, on_cpu=False).logits
    assert kept == 8 * 128 * model.vocab_size * 2
    assert MEMORY.transient(forward, layout, on_cpu=False).logits == kept
    assert MEMORY.transient(train, layout).logits > kept
