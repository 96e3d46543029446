from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.dataflow.errors import PlanError
from penstock.planner.inputs.layout import Layout
from penstock.planner.inputs.model_shape import ModelShape
from penstock.planner.resharding.plan_transfer import plan_transfer
from penstock.planner.resharding.sharding import Sharding, shard
from penstock.planner.resharding.storage import concatenate, interleave_qkv

from ..transfers import TINY, UNWRITTEN, Array, Tensors, logical_values, models, shardings

ATTENTION = "model.layers.1.self_attn"


def loaded(sharding: Sharding) -> Mapping[tuple[int, str], Array]:
    """The engine's tensors; every element of them is some weight's."""
    tensors = Tensors(sharding)
    tensors.fill(logical_values(sharding))
    assert all((values != UNWRITTEN).all() for values in tensors.values.values())
    return tensors.values


def test_concatenated_slices_lie_end_to_end() -> None:
    plain = shard(TINY, Layout(tp=2, pp=2), range(4))
    apart, fused = loaded(plain), loaded(concatenate(plain, ("q_proj", "k_proj", "v_proj"), "qkv"))
    for device in (2, 3):
        parts = [apart[device, f"{ATTENTION}.{letter}_proj.weight"] for letter in "qkv"]
        assert np.array_equal(fused[device, f"{ATTENTION}.qkv.weight"], np.concatenate(parts))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_interleaved_heads_come_group_by_group(tp: int) -> None:
    """TINY's two query heads per key head, as Megatron orders them: q q k v, q q k v."""
    model = TINY.model_copy(update={"qkv_bias": True})
    plain = shard(model, Layout(tp=tp), range(tp))
    apart, mixed = loaded(plain), loaded(interleave_qkv(plain, model.head_dim))
    for device in range(tp):
        for kind in ("weight", "bias"):
            q, k, v = (apart[device, f"{ATTENTION}.{letter}_proj.{kind}"] for letter in "qkv")
            groups = len(k) // model.head_dim
            parts = [part.reshape(groups, -1, *part.shape[1:]) for part in (q, k, v)]
            expected = np.concatenate(parts, axis=1).reshape(-1, *q.shape[1:])
            assert np.array_equal(mixed[device, f"{ATTENTION}.qkv_proj.{kind}"], expected)


@pytest.mark.slow
@given(st.data(), models())
@settings(max_examples=60, deadline=None)
def test_storage_changes_no_byte_of_a_transfer(data: st.DataObject, model: ModelShape) -> None:
    source = data.draw(shardings(model, "vocabulary", 4, 8))
    destination = data.draw(shardings(model, "vocabulary", 6, 8))
    plan = plan_transfer(source, destination)
    plain = plan_transfer(_plain(source), _plain(destination))
    for share, other in zip(plan.devices, plain.devices, strict=True):
        assert (share.needed_bytes, share.kept_bytes, share.received_bytes, share.unused_bytes) == (
            other.needed_bytes, other.kept_bytes, other.received_bytes, other.unused_bytes,
        )  # fmt: skip


def _plain(sharding: Sharding) -> Sharding:
    """Every slice in a tensor of its own."""
    params, patterns = list(sharding.params), list(sharding.patterns)
    for i, param in enumerate(params):
        zeros = (0,) * len(param.shape)
        pattern = [replace(piece, start=zeros) for piece in patterns[param.pattern]]
        params[i] = replace(
            param, tensor=param.name, dims=tuple(range(len(zeros))), pattern=len(patterns)
        )
        patterns.append(tuple(pattern))
    return Sharding(sharding.devices, tuple(params), tuple(patterns), sharding.dtype)


def test_what_cannot_be_fused_is_refused() -> None:
    cut = shard(TINY, Layout(dp=3, zero=3), range(3))
    with pytest.raises(PlanError) as caught:
        interleave_qkv(cut, TINY.head_dim)
    assert str(caught.value) == (
        "cannot interleave 'model.layers.0.self_attn.qkv_proj.weight': every device must hold "
        "whole heads of 2 rows, of queries and keys alike; cut it by tensor parallelism only"
    )
    with pytest.raises(PlanError) as caught:
        concatenate(cut, ("q_proj", "z_proj"), "qz_proj")
    assert str(caught.value) == (
        "cannot fuse 'model.layers.0.self_attn.q_proj.weight': there is no "
        "'model.layers.0.self_attn.z_proj.weight' beside it"
    )
