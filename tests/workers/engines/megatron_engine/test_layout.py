"""What the Megatron engine's description of itself says, without the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock.dataflow.errors import PlanError
from penstock.planner.inputs.layout import Layout
from penstock.planner.inputs.model_shape import ModelShape
from penstock.planner.resharding.sharding import volume
from penstock.workers.engines.megatron_engine.specs import megatron_sharding
from penstock.workers.models.spec import HeadName
from penstock.workers.training.checkpoint_files import StoredPiece, pieces_on, stored_view
from torch import Tensor


def shape(**options: Any) -> ModelShape:
    sizes: dict[str, Any] = {
        "name": "tiny",
        "hidden_size": 8,
        "num_layers": 4,
        "num_heads": 4,
        "num_key_heads": 2,
        "head_dim": 2,
        "intermediate_size": 12,
        "vocab_size": 16,
        "dtype": "float32",
    }
    return ModelShape(**{**sizes, **options})


SHAPES = st.builds(
    shape,
    num_heads=st.sampled_from([4, 8]),
    num_key_heads=st.sampled_from([2, 4]),
    tied_embeddings=st.booleans(),
    qkv_bias=st.booleans(),
    qk_norm=st.booleans(),
    num_experts=st.sampled_from([0, 4]),
    experts_per_token=st.just(2),
)
LAYOUTS = st.builds(
    Layout,
    tp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 2]),
)
HEADS: st.SearchStrategy[HeadName] = st.sampled_from(["lm_head", "value_head", "score"])


def room(pieces: list[StoredPiece]) -> dict[str, Tensor]:
    """The tensors that some pieces lie in, just large enough."""
    reach: dict[str, list[int]] = {}
    for piece in pieces:
        ends = [at + stop - start for at, (start, stop) in zip(piece.start, piece.box, strict=True)]
        known = reach.setdefault(piece.tensor, ends)
        reach[piece.tensor] = [max(pair) for pair in zip(known, ends, strict=True)]
    return {name: torch.full(size, torch.nan) for name, size in reach.items()}


@given(SHAPES, LAYOUTS, HEADS)
def test_every_parameter_lies_whole_on_every_rank(
    model: ModelShape, layout: Layout, head: HeadName
):
    if model.num_experts:
        layout = layout.model_copy(update={"ep": layout.dp})
        model = model.model_copy(update={"shared_expert_size": 6})
    sharding = megatron_sharding(model, layout, range(layout.num_devices), head=head)
    weights = {param.name: torch.randn(param.shape) for param in sharding.params}
    bias = 0 if head == "lm_head" else 1
    kind = "vocabulary" if head == "lm_head" else "scalar"
    assert sum(weight.numel() for weight in weights.values()) == model.num_params(kind) + bias
    found = {name: torch.full_like(weight, torch.nan) for name, weight in weights.items()}
    for device in sharding.devices:
        pieces = list(pieces_on(sharding, device))
        tensors = room(pieces)
        for piece in pieces:
            at = tuple(slice(start, stop) for start, stop in piece.box)
            stored_view(tensors, piece).copy_(weights[piece.name][at])
        # Pieces fill the tensors without a gap, so without an overlap if they have as many numbers.
        assert not any(bool(tensor.isnan().any()) for tensor in tensors.values())
        assert sum(volume(piece.box) for piece in pieces) == sum(
            tensor.numel() for tensor in tensors.values()
        )
        for piece in pieces:
            if piece.first:
                at = tuple(slice(start, stop) for start, stop in piece.box)
                assert found[piece.name][at].isnan().all()  # one owner
                found[piece.name][at] = stored_view(tensors, piece)
    for name, weight in weights.items():
        assert torch.equal(found[name], weight), name


def test_queries_keys_and_values_lie_head_by_head():
    sharding = megatron_sharding(shape(qkv_bias=True), Layout(tp=2), [0, 1])
    name = "decoder.layers.3.self_attention.linear_qkv.bias"
    held = [
        (piece.name.split(".")[-2], piece.box[0], piece.start[0])
        for piece in sorted(pieces_on(sharding, 1), key=lambda piece: piece.start)
        if piece.tensor == name
    ]
    # Process 1 has the second of two key heads with the two query heads (4 rows) that share it.
    assert held == [("q_proj", (4, 8), 0), ("k_proj", (2, 4), 4), ("v_proj", (2, 4), 6)]


def test_tensors_are_called_as_megatron_core_calls_them():
    model = shape(qk_norm=True, num_layers=1)
    sharding = megatron_sharding(model, Layout(), [0])
    layer = "decoder.layers.0."
    assert sorted({param.tensor for param in sharding.params}) == sorted(
        [
            "embedding.word_embeddings.weight",
            f"{layer}input_layernorm.weight",
            f"{layer}self_attention.linear_qkv.weight",
            f"{layer}self_attention.q_layernorm.weight",
            f"{layer}self_attention.k_layernorm.weight",
            f"{layer}self_attention.linear_proj.weight",
            f"{layer}pre_mlp_layernorm.weight",
            f"{layer}mlp.linear_fc1.weight",
            f"{layer}mlp.linear_fc2.weight",
            "decoder.final_layernorm.weight",
            "output_layer.weight",
        ]
    )


def test_experts_lie_as_in_the_module_and_the_shared_one_as_a_feed_forward():
    model = shape(num_experts=4, experts_per_token=2, shared_expert_size=6, num_layers=1)
    sharding = megatron_sharding(model, Layout(tp=2, dp=2, ep=2), range(4))
    prefix = "decoder.layers.0.mlp."
    held = {
        piece.tensor.removeprefix(prefix): piece.box
        for piece in pieces_on(sharding, 3)
        if piece.tensor.startswith(prefix)
    }
    assert held == {
        "gate.weight": ((0, 4), (0, 8)),
        "experts.gate_up_proj": ((2, 4), (18, 24), (0, 8)),  # gate rows 6 to 12 stand before
        "experts.down_proj": ((2, 4), (0, 8), (6, 12)),
        "shared_expert.linear_fc1.weight": ((3, 6), (0, 8)),  # of gate rows, then of up rows
        "shared_expert.down_proj.weight": ((0, 8), (3, 6)),
        "shared_expert_gate.weight": ((0, 1), (0, 8)),
    }


def test_tied_embeddings_lie_at_both_ends():
    sharding = megatron_sharding(shape(tied_embeddings=True), Layout(pp=2, tp=2), range(4))
    held = {
        device: [(piece.box[0], piece.first) for piece in pieces_on(sharding, device)
                 if piece.tensor == "embedding.word_embeddings.weight"]
        for device in range(4)
    }  # fmt: skip
    assert held == {
        0: [((0, 8), True)],
        1: [((8, 16), True)],
        2: [((0, 8), False)],
        3: [((8, 16), False)],
    }


@pytest.mark.parametrize(
    ("model", "layout", "said"),
    [
        (
            shape(num_key_heads=1),
            Layout(tp=2),
            "tp=2 does not divide 1 key heads, as the Megatron engine needs (model 'tiny'); take a "
            "tp that does",
        ),
        (
            shape(),
            Layout(dp=2, ep=2),
            "layout 'dp2 ep2' divides experts, and model 'tiny' has none; take ep=1",
        ),
        (shape(vocab_size=15), Layout(tp=2), "tp=2 does not divide the vocabulary of 15"),
        (shape(num_layers=3), Layout(pp=2), "pp=2 does not divide 3 layers"),
    ],
)
def test_layouts_it_cannot_have(model: ModelShape, layout: Layout, said: str):
    with pytest.raises(PlanError) as error:
        megatron_sharding(model, layout, range(layout.num_devices))
    assert said in str(error.value)
