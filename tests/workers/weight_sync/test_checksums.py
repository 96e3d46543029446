"""Checksums of what lies on a device; those of bytes in host memory are in `test_packets`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.planner.inputs.layout import Layout
from penstock.planner.resharding.plan_transfer import plan_transfer
from penstock.planner.resharding.sharding import shard, unsharded
from penstock.workers.weight_sync.packets import (
    Message,
    checksum,
    checksums,
    checksums_of_sums,
    messages_of,
)

from ...planner.transfers import TINY

SHAPES = {"a": (3, 2000), "b": (7,), "c": (2, 4096), "d": (9001,)}


def message(dtype: str = "bfloat16") -> Message:
    """Of four parameters that end in the middle of rows, or fill them."""
    plan = plan_transfer(unsharded(SHAPES, [0], dtype=dtype), unsharded(SHAPES, [1], dtype=dtype))
    (made,) = messages_of(plan, [0])[0]
    return made


def payload(made: Message, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (made.num_bytes,), dtype=torch.uint8, generator=random)


def test_sums_of_rows_and_columns_are_hashed_with_the_identity() -> None:
    made = message()
    data = payload(made)
    at = [part.param.name for part in made.parts].index("c")
    table = data.split(made.sizes)[at].numpy().view(np.int16).reshape(2, 4096).astype(np.int64)
    sums = np.concatenate([table.sum(0), table.sum(1)])
    identity = f"c\0{made.parts[at].move.box}\0{2 * 2 * 4096}".encode()
    stamp = (5).to_bytes(8, "little", signed=True)
    seed = xxhash.xxh3_64_intdigest(stamp, xxhash.xxh3_64_intdigest(identity))
    expected = xxhash.xxh3_64_digest(sums.tobytes(), seed)
    found = checksums_of_sums(made, data, 5)
    assert found[at] == int.from_bytes(expected, "little", signed=True)
    assert len(set(found)) == 4


def test_bytes_in_host_memory_are_hashed_themselves() -> None:
    made = message()
    data = payload(made)
    parts = zip(made.parts, made.slices(data), strict=True)
    assert checksums(made, data, 5) == [checksum(part, one, 5) for part, one in parts]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@given(st.integers(0, 2**30), st.integers(0, 2**30), st.integers(1, 255))
@settings(max_examples=60)
def test_sums_see_any_element_and_any_two_that_change_places(
    dtype: str, one: int, other: int, flip: int
) -> None:
    made = message(dtype)
    data, width = payload(made), made.element_bytes
    before = checksums_of_sums(made, data, 1)
    assert checksums_of_sums(made, data.clone(), 1) == before
    assert not set(before) & set(checksums_of_sums(made, data, 2))
    damaged = data.clone()
    damaged[one % len(data)] ^= flip
    assert checksums_of_sums(made, damaged, 1) != before
    swapped = data.clone().view(-1, width)
    i, j = one % len(swapped), other % len(swapped)
    swapped[[i, j]] = swapped[[j, i]]
    is_same = torch.equal(swapped.view(-1), data)
    assert (checksums_of_sums(made, swapped.view(-1), 1) == before) == is_same


def test_a_part_of_another_shape_or_name_has_another_checksum() -> None:
    """The same bytes in another tensor-parallel place."""
    plan = plan_transfer(shard(TINY, Layout(tp=2), [0, 1]), shard(TINY, Layout(), [2]))
    made, other = messages_of(plan, [0])[0][0], messages_of(plan, [1])[1][0]
    zeros = torch.zeros(made.num_bytes, dtype=torch.uint8)
    found = checksums_of_sums(made, zeros, 1) + checksums_of_sums(
        other, zeros[: other.num_bytes], 1
    )
    assert len(set(found)) == len(found)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_gpu_makes_the_same_sums(dtype: str) -> None:
    made = message(dtype)
    data = payload(made)
    assert checksums(made, data.cuda(), 3) == checksums_of_sums(made, data, 3)
