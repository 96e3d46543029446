from __future__ import annotations

import pickle
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.planner.inputs.layout import Layout
from penstock.planner.resharding.plan_transfer import TransferPlan, plan_transfer
from penstock.planner.resharding.sharding import Sharding, shard
from penstock.planner.resharding.storage import concatenate
from penstock.workers.weight_sync.packets import (
    Packed,
    Packet,
    Part,
    WeightsError,
    checksum,
    messages_of,
    pack,
    unpack,
    unpack_whole,
)

from ...planner.transfers import TINY, transfers, transposed
from .transfer_engines import Engine, empty, engine, expected, is_same

VERSION = 3


def plan_of(source: Sharding, destination: Sharding, bucket_bytes: int = 200) -> TransferPlan:
    return plan_transfer(source, destination, bucket_bytes=bucket_bytes, min_part_bytes=1)


def packed(plan: TransferPlan, source: Engine, version: int = VERSION) -> dict[int, list[Packet]]:
    """Destination -> its packets."""
    found = defaultdict[int, list[Packet]](list)
    for device, tensors in source.items():
        for destination, packet in pack(plan, device, tensors, version).items():
            found[destination].append(packet)
    return found


@pytest.mark.slow
@given(
    transfers(), st.sampled_from(["float32", "bfloat16"]), st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from([1, 200, 10**6]), st.sampled_from([1, 30, 10**6]),
)  # fmt: skip
@settings(max_examples=150)
def test_packets_rebuild_every_shard_and_hold_nothing_else(
    pair: tuple[Sharding, Sharding], from_dtype: str, to_dtype: str, bucket_bytes: int,
    min_part_bytes: int,
) -> None:  # fmt: skip
    """All bits right and no more bytes than are lacking: so nothing came twice."""
    source, destination = replace(pair[0], dtype=from_dtype), replace(pair[1], dtype=to_dtype)
    destination = destination.on([100 + device for device in destination.devices])
    plan = plan_transfer(
        source, destination, bucket_bytes=bucket_bytes, min_part_bytes=min_part_bytes
    )
    before, after = engine(source), empty(destination)
    sent = packed(plan, before)
    for device in destination.devices:
        share = plan.traffic[device]
        received = unpack(plan, device, sent[device], after[device], VERSION)
        assert received == share.received_bytes == share.lower_bound_bytes
    assert is_same(after, expected(destination, from_dtype))


def small() -> tuple[TransferPlan, Engine, Engine, dict[int, list[Packet]]]:
    """From tp 2 on devices 0, 1 to one fused, partly transposed whole on device 2."""
    source = shard(TINY, Layout(tp=2), [0, 1])
    destination = concatenate(
        transposed(shard(TINY, Layout(), [2]), "down_proj"),
        ("q_proj", "k_proj", "v_proj"),
        "qkv_proj",
    )
    plan = plan_of(source, destination)
    before = engine(source, version=VERSION)
    return plan, before, empty(destination), packed(plan, before)


def refusal(plan: TransferPlan, packets: list[Packet], after: Engine) -> str:
    """The error's text; nothing has been written."""
    untouched = {device: {n: t.clone() for n, t in ts.items()} for device, ts in after.items()}
    with pytest.raises(WeightsError) as caught:
        unpack(plan, 2, packets, after[2], VERSION)
    assert is_same(after, untouched)
    return str(caught.value)


def slices(plan: TransferPlan, source: int) -> list[tuple[int, Part, slice]]:
    """Bucket in its packet, part and bytes of everything that device 2 gets from a device."""
    messages = [m for m in messages_of(plan, [2])[2] if m.source == source]
    return [
        (bucket, part, slice(begin, end))
        for bucket, message in enumerate(messages)
        for part, begin, end in zip(message.parts, (0, *message.ends), message.ends, strict=False)
    ]


def altered(packet: Packet, bucket: int, data: np.ndarray) -> Packet:
    buckets = [*packet.buckets]
    buckets[bucket] = data
    return replace(packet, buckets=tuple(buckets))


def test_whole_packets_are_taken() -> None:
    plan, _, after, packets = small()
    again = pickle.loads(pickle.dumps(packets[2]))
    unpack(plan, 2, again[::-1], after[2], VERSION)
    assert [p.num_bytes for p in packets[2]] == [p.num_bytes for p in again]


@pytest.mark.parametrize("which", [0, 7, -1])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_flipped_bit_is_refused(which: int, bit: int) -> None:
    plan, _, after, packets = small()
    bucket, part, where = slices(plan, 0)[which]
    data = packets[2][0].buckets[bucket].copy()
    data[where.stop - 1] ^= 1 << bit
    assert refusal(plan, [altered(packets[2][0], bucket, data), packets[2][1]], after) == (
        f"packet from device 0 to device 2: slice {part.move.box} of parameter "
        f"'{part.param.name}' has the wrong checksum; send it again"
    )


@pytest.mark.parametrize("which", [0, 7, -1])
def test_a_dropped_slice_is_refused(which: int) -> None:
    plan, _, after, packets = small()
    bucket, _, where = slices(plan, 0)[which]
    packet = packets[2][0]
    shorter = altered(packet, bucket, np.delete(packet.buckets[bucket], where))
    at = which % len(packet.checksums)
    honest = replace(shorter, checksums=np.delete(packet.checksums, at))
    assert "is not whole: its bucket has" in refusal(plan, [honest, packets[2][1]], after)
    assert "is not whole: its bucket has" in refusal(plan, [shorter, packets[2][1]], after)
    assert refusal(plan, [packet], after).startswith(
        f"device 2 lacks {slices(plan, 1)[0][1]}: no packet has come from device 1"
    )


def test_an_old_version_is_refused() -> None:
    """As it is, or under a new stamp."""
    plan, before, after, packets = small()
    old = pack(plan, 0, before[0], VERSION - 1)[2]
    first = slices(plan, 0)[0][1]
    assert refusal(plan, [old, packets[2][1]], after) == (
        f"packet from device 0 to device 2: {first} and all others are of version 2; expected "
        "version 3. Pack them again after the update"
    )
    assert refusal(plan, [replace(old, version=VERSION), packets[2][1]], after) == (
        f"packet from device 0 to device 2: {first} has the wrong checksum; send it again"
    )


def test_packets_of_others_are_refused() -> None:
    plan, before, after, packets = small()
    one, other = packets[2]
    elsewhere = [replace(one, destination=5), other]
    assert "a packet from device 0 for device 5" in refusal(plan, elsewhere, after)
    # Of another plan: the same bytes in another order.
    foreign = pack(plan_of(shard(TINY, Layout(tp=2), [0, 1]), shard(TINY, Layout(), [2]), 10**6), 0,
                   before[0], VERSION)[2]  # fmt: skip
    assert "is not whole" in refusal(plan, [foreign, other], after)


def test_tensors_that_do_not_fit_are_refused() -> None:
    plan, before, after, packets = small()
    with pytest.raises(WeightsError, match="and there is no such tensor; the engine has 0"):
        pack(plan, 0, {}, VERSION)
    name = "model.norm.weight"
    with pytest.raises(WeightsError, match="which is float32; the plan is for bfloat16"):
        unpack(plan, 2, packets[2], {**after[2], name: torch.zeros(6)}, VERSION)
    narrow = {**before[0], name: torch.zeros(5)}
    with pytest.raises(WeightsError, match=r"from \[0\] over \[6\]; the tensor is only \[5\]"):
        pack(plan_of(shard(TINY, Layout(), [0]), shard(TINY, Layout(), [1])), 0,
             {**engine(shard(TINY, Layout(), [0]))[0], name: narrow[name]}, VERSION)  # fmt: skip


def test_what_several_groups_need_alike_is_packed_once() -> None:
    source = shard(TINY, Layout(), [0])
    alike, divided = (shard(TINY, layout, [2, 3]) for layout in (Layout(dp=2), Layout(tp=2)))
    packed: Packed = {}
    before = engine(source, version=VERSION)
    first, again, other = (
        pack(plan_of(source, there), 0, before[0], VERSION, packed=packed)
        for there in (alike, alike, divided)
    )
    for packet in (first[3], again[2], again[3]):
        assert all(one is made for one, made in zip(packet.buckets, first[2].buckets, strict=True))
    after = empty(divided)
    for device in (2, 3):
        unpack(plan_of(source, divided), device, [other[device]], after[device], VERSION)
    assert is_same(after, expected(divided, source.dtype, version=VERSION))


@pytest.mark.parametrize("bucket_bytes", [1, 10**6])
def test_whole_parameters_are_views_of_their_packets_and_others_put_together(
    bucket_bytes: int,
) -> None:
    """From tensor parallelism, where norms are whole and matrices are not."""
    source, destination = shard(TINY, Layout(tp=2), [0, 1]), shard(TINY, Layout(), [2])
    plan = plan_transfer(source, destination, bucket_bytes=bucket_bytes)  # small parts are whole
    packets = packed(plan, engine(source, version=VERSION))[2]
    found = unpack_whole(plan, 2, packets, VERSION)
    assert is_same({2: found}, expected(destination, source.dtype, version=VERSION))
    spans = [(b.ctypes.data, b.ctypes.data + len(b)) for p in packets for b in p.buckets]
    views = {n for n, t in found.items() if any(a <= t.data_ptr() < z for a, z in spans)}
    assert views == {name for name in found if name.endswith(("norm.weight", "layernorm.weight"))}
    damaged = [altered(packets[0], 0, packets[0].buckets[0] ^ 1), packets[1]]
    with pytest.raises(WeightsError, match="has the wrong checksum"):
        unpack_whole(plan, 2, damaged, VERSION)


@pytest.mark.slow
@given(
    st.integers(0, 70000), st.integers(0, 7), st.integers(0, 2**20), st.integers(0, 2**20),
    st.integers(1, 255),
)  # fmt: skip
@settings(max_examples=200)
def test_a_checksum_sees_any_byte_and_any_two_that_change_places(
    length: int, offset: int, one: int, other: int, flip: int
) -> None:
    part = slices(small()[0], 0)[0][1]
    made = torch.Generator().manual_seed(length)
    whole = torch.randint(0, 256, (length + offset,), dtype=torch.uint8, generator=made)
    data = whole[offset:]
    found = checksum(part, data, 1)
    assert found == checksum(part, data.clone(), 1)
    assert found != checksum(part, data, 2)
    if length:
        i, j = one % length, other % length
        damaged = data.clone()
        damaged[i] ^= flip
        assert checksum(part, damaged, 1) != found
        swapped = data.clone()
        swapped[i], swapped[j] = data[j], data[i]
        assert (checksum(part, swapped, 1) == found) == (data[i] == data[j]).item()
        assert checksum(part, data[:-1], 1) != found
