from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.dataflow.errors import PlanError
from penstock.planner.inputs.layout import Layout, legal_layouts
from penstock.planner.inputs.model_shape import LogicalParam, ModelShape, logical_params
from penstock.planner.resharding.sharding import Rank, Sharding, Slice, StoredParam, rank_of, shard

from ..shapes import LLAMA_70B
from ..transfers import TINY, models


def copies(sharding: Sharding, param: StoredParam) -> set[int]:
    """How many devices hold an element, over all elements."""
    count = np.zeros(param.shape, np.int64)
    for piece in sharding.patterns[param.pattern]:
        count[tuple(slice(*span) for span in piece.box)] += 1
    return set(count.ravel().tolist())


def expected_copies(param: LogicalParam, layout: Layout, zero: bool) -> int:
    """By the roles of the axes: what cuts divides, what repeats multiplies."""
    whole = 1 if param.cut_dim is None else min(layout.tp, param.num_units)
    ends = 2 if param.place == "ends" and layout.pp > 1 else 1
    shared = layout.ep if param.by_expert else 1
    return layout.tp // whole * ends * (1 if zero else layout.cp * layout.dp // shared)


@given(st.data(), models(), st.sampled_from(["vocabulary", "scalar"]), st.booleans())
@settings(max_examples=100, deadline=None)
def test_every_element_is_held_as_often_as_the_layout_says(
    data: st.DataObject, model: ModelShape, head: str, zero: bool
) -> None:
    number = data.draw(st.sampled_from([1, 2, 4, 8, 12]))
    layout = data.draw(st.sampled_from(list(legal_layouts(model, number, node_size=12, max_cp=2))))
    layout = layout.model_copy(update={"zero": 3 if zero else 1})
    ending = "scalar" if head == "scalar" else "vocabulary"
    made = shard(model, layout, range(number), head=ending)
    for stored, param in zip(made.params, logical_params(model, ending), strict=True):
        assert (stored.name, stored.shape) == (param.name, param.shape)
        assert copies(made, stored) == {expected_copies(param, layout, zero)}, stored.name
    total = sum(
        prod(param.shape) * expected_copies(param, layout, zero)
        for param in logical_params(model, ending)
    )
    assert sum(made.bytes_on.values()) == total * 2


def test_ranks_are_numbered_tp_then_cp_then_dp_then_pp() -> None:
    layout = Layout(tp=2, cp=3, dp=4, pp=2)
    ranks = [rank_of(i, layout) for i in range(48)]
    assert ranks == [
        Rank(t, c, d, p) for p in range(2) for d in range(4) for c in range(3) for t in range(2)
    ]


def boxes(sharding: Sharding, name: str) -> dict[int, tuple[tuple[int, int], ...]]:
    param = next(param for param in sharding.params if param.name.endswith(name))
    return {piece.device: piece.box for piece in sharding.patterns[param.pattern]}


def test_tensor_parallelism_cuts_rows_columns_and_heads() -> None:
    """TINY has 4 query heads and 2 key heads of 2 rows; tp 4 shares each key head between two."""
    made = shard(TINY, Layout(tp=4), [10, 11, 12, 13])
    assert boxes(made, "0.self_attn.q_proj.weight") == {
        10: ((0, 2), (0, 6)), 11: ((2, 4), (0, 6)), 12: ((4, 6), (0, 6)), 13: ((6, 8), (0, 6)),
    }  # fmt: skip
    assert boxes(made, "0.self_attn.k_proj.weight") == {
        10: ((0, 2), (0, 6)), 11: ((0, 2), (0, 6)), 12: ((2, 4), (0, 6)), 13: ((2, 4), (0, 6)),
    }  # fmt: skip
    assert boxes(made, "0.mlp.down_proj.weight")[12] == ((0, 6), (4, 6))
    assert boxes(made, "model.norm.weight") == dict.fromkeys([10, 11, 12, 13], ((0, 6),))
    assert boxes(made, "lm_head.weight")[13] == ((9, 12), (0, 6))


def test_zero_3_cuts_rows_as_chunk_does() -> None:
    made = shard(TINY, Layout(dp=5, zero=3), range(5))
    for name, rows in {"0.self_attn.q_proj.weight": 8, "model.norm.weight": 6}.items():
        chunks = torch.arange(rows).chunk(5)
        expected = {i: (int(c[0]), int(c[-1]) + 1) for i, c in enumerate(chunks)}
        assert {device: box[0] for device, box in boxes(made, name).items()} == expected


def test_experts_are_dealt_to_ranks_in_runs() -> None:
    model = TINY.model_copy(update={"num_experts": 4, "experts_per_token": 1})
    made = shard(model, Layout(dp=4, ep=2), range(4))
    held = {device: box[0] for device, box in boxes(made, "0.mlp.experts.down_proj").items()}
    assert held == {0: (0, 2), 1: (2, 4), 2: (0, 2), 3: (2, 4)}


def test_gate_and_up_rows_of_experts_are_cut_apart() -> None:
    """TINY's experts have 8 gate rows and 8 up rows: a rank of two has 4 of each, end to end."""
    model = TINY.model_copy(update={"num_experts": 4, "experts_per_token": 1})
    made = shard(model, Layout(tp=2, dp=2, ep=2), range(4))
    fused = next(p for p in made.params if p.name.endswith("0.mlp.experts.gate_up_proj"))
    assert [(p.box[:2], p.start) for p in made.patterns[fused.pattern] if p.device == 3] == [
        (((2, 4), (4, 8)), (0, 0, 0)),
        (((2, 4), (12, 16)), (0, 4, 0)),
    ]


def test_a_70b_model_divides_evenly() -> None:
    made = shard(LLAMA_70B, Layout(tp=8, pp=2, dp=8), range(128))
    ideal = LLAMA_70B.num_params() * 2 / 16
    assert all(size == pytest.approx(ideal, rel=1e-3) for size in made.bytes_on.values())


def refusal(*slices: Slice, devices: tuple[int, ...] = (0,), dtype: str = "float32") -> str:
    with pytest.raises(PlanError) as caught:
        Sharding(devices, (StoredParam("w", (4,), 0, "w", (0,)),), (slices,), dtype)
    return str(caught.value)


def test_shardings_that_cannot_be_are_refused() -> None:
    assert refusal(Slice(0, ((0, 5),), (0,))) == (
        "parameter 'w' on device 0: slice ((0, 5),) does not fit in shape (4,)"
    )
    assert refusal(Slice(1, ((0, 4),), (0,))) == (
        "parameter 'w' on device 1: the sharding's devices do not include it"
    )
    assert refusal(Slice(0, ((0, 3),), (0,)), Slice(0, ((2, 4),), (3,))) == (
        "parameter 'w' on device 0: slices ((0, 3),) and ((2, 4),) overlap"
    )
    assert refusal(Slice(0, ((0, 4),), (0, 0))) == (
        "parameter 'w' on device 0: start (0, 0) should have 1 indices, as many as the engine's "
        "tensor has dimensions"
    )
    assert refusal(devices=(0, 3, 3)) == (
        "device 3 is listed twice; a rank needs a device of its own"
    )
    assert refusal(dtype="int8") == ("dtype is 'int8'; expected one of float32, bfloat16, float16")


def test_a_layout_needs_its_number_of_devices_and_a_model_it_divides() -> None:
    with pytest.raises(PlanError) as caught:
        shard(TINY, Layout(tp=2, dp=2), range(3))
    assert str(caught.value) == "layout tp2 dp2 has 4 ranks but 3 devices were given"
    with pytest.raises(PlanError, match=r"tp=3 does not divide 4 heads"):
        shard(TINY, Layout(tp=3), range(3))
    with pytest.raises(PlanError) as caught:
        shard(TINY, Layout(tp=2), range(2)).on([5])
    assert str(caught.value) == "2 ranks cannot run on 1 devices"
