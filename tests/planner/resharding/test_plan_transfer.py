from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from inspect import cleandoc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.dataflow.errors import PlanError
from penstock.planner.inputs.layout import Layout
from penstock.planner.inputs.model_shape import ModelShape
from penstock.planner.resharding.plan_transfer import TransferPlan, plan_transfer
from penstock.planner.resharding.sharding import Box, Sharding, Slice, StoredParam, shard, volume

from ..shapes import LLAMA_7B, LLAMA_70B
from ..transfers import (
    TINY,
    Tensors,
    carry_out,
    lacking,
    logical_values,
    strided_generation,
    transfers,
)

BYTES = 2


@pytest.mark.slow
@given(transfers(), st.sampled_from([1, 200, 10**6]), st.sampled_from([1, 30, 10**6]))
@settings(max_examples=200, deadline=None)
def test_every_shard_arrives_whole_and_nothing_arrives_for_nothing(
    pair: tuple[Sharding, Sharding], bucket_bytes: int, min_part_bytes: int
) -> None:
    source, destination = pair
    plan = plan_transfer(
        source, destination, bucket_bytes=bucket_bytes, min_part_bytes=min_part_bytes
    )
    done = carry_out(plan, source, destination)  # fails if anything is written twice
    expected = Tensors(destination)
    expected.fill(logical_values(destination))
    for key, values in expected.values.items():
        assert np.array_equal(done.tensors.values[key], values), key
    bound = lacking(source, destination)
    for device, share in plan.traffic.items():
        assert share.received_bytes == share.lower_bound_bytes == bound.get(device, 0) * BYTES
        assert share.received_bytes == done.received.get(device, 0) * BYTES
        assert share.sent_bytes == done.sent.get(device, 0) * BYTES
        assert share.staging_bytes == done.most_staged.get(device, 0) * BYTES
        assert share.peak_bytes == destination.bytes_on.get(device, 0) + share.staging_bytes


@given(transfers())
@settings(max_examples=50, deadline=None)
def test_plans_are_deterministic_and_survive_json(pair: tuple[Sharding, Sharding]) -> None:
    source, destination = pair
    plan = plan_transfer(source, destination, min_part_bytes=1)
    assert plan_transfer(source, destination, min_part_bytes=1) == plan
    assert TransferPlan.from_json(plan.to_json()) == plan


@pytest.mark.slow
@given(transfers(), st.sampled_from([1, 30, 10**6]))
@settings(max_examples=200, deadline=None)
def test_replicas_share_the_sending_to_within_a_slice(
    pair: tuple[Sharding, Sharding], min_part_bytes: int
) -> None:
    source, destination = pair
    plan = plan_transfer(source, destination, min_part_bytes=min_part_bytes)
    replicas = defaultdict[frozenset[tuple[str, Box]], list[int]](list)
    for device in source.devices:
        held = frozenset(
            (param.name, piece.box)
            for param in source.params
            for piece in source.patterns[param.pattern]
            if piece.device == device
        )
        replicas[held].append(plan.traffic[device].sent_bytes)
    slices = [piece.box for pattern in source.patterns for piece in pattern]
    slice_bytes = max(map(volume, slices)) * BYTES
    for sent in replicas.values():
        assert max(sent) <= sum(sent) / len(sent) + slice_bytes
        assert max(sent) - min(sent) <= slice_bytes


def test_the_same_layout_on_the_same_devices_sends_nothing() -> None:
    there = shard(TINY, Layout(tp=2, pp=2, dp=2), range(8))
    plan = plan_transfer(there, there)
    assert plan.sent_bytes == 0
    assert all(move.is_copy for move in plan.moves)
    assert all(share.unused_bytes == 0 for share in plan.devices)


# HybridFlow Table 2 (section 5.4): training p-t-d, generation pg-tg on the same devices, M bytes.
# Its formulas count every weight as cut by tp; norms are not, hence the tolerance.
TABLE_2 = [
    (LLAMA_70B, 140, Layout(tp=8, dp=16), Layout(tp=2, dp=64), (138.9, 122.5, 52.5)),
    (LLAMA_70B, 140, Layout(tp=8, pp=2, dp=8), Layout(tp=4, dp=32), (138.9, 131.3, 26.3)),
    (LLAMA_7B, 14, Layout(tp=8, dp=2), Layout(tp=2, dp=8), (13.1, 12.3, 5.25)),
]


@pytest.mark.parametrize(("model", "size", "train", "generate", "published"), TABLE_2)
def test_strided_generation_receives_what_hybridflow_does(
    model: ModelShape, size: int, train: Layout, generate: Layout, published: tuple[float, ...]
) -> None:
    t, p, d, tg, pg = train.tp, train.pp, train.dp, generate.tp, generate.pp
    assert (t * p * d - 1) / (t * p * d) * size == pytest.approx(published[0], abs=0.05)
    assert (t * p - 1) / (t * p) * size == pytest.approx(published[1], abs=0.06)
    share = (t * p - tg * pg) / (tg * pg * t * p)
    assert share * size == pytest.approx(published[2], abs=0.06)
    devices = range(train.num_devices)
    source = shard(model, train, devices)
    order = strided_generation(train, generate, devices)
    plan = plan_transfer(source, shard(model, generate, order))
    total = model.num_params() * model.dtype_bytes
    for device in plan.devices:
        assert device.received_bytes == device.lower_bound_bytes
        assert device.received_bytes / total == pytest.approx(share, rel=1e-4)
        assert device.needed_bytes / total == pytest.approx(1 / (tg * pg), rel=1e-4)
        assert device.unused_bytes == 0


def test_strided_groups_are_training_ranks_at_a_stride() -> None:
    """4 / 2: what this file takes for HybridFlow's grouping is that."""
    order = strided_generation(Layout(tp=4, dp=2), Layout(tp=2, dp=4), range(8))
    assert order == [0, 2, 1, 3, 4, 6, 5, 7]


def by_hand(
    *slices: tuple[int, int, int], size: int, name: str = "w", devices: Sequence[int] = ()
) -> Sharding:
    """One vector; (device, start, stop) of each slice."""
    pattern = tuple(Slice(device, ((a, b),), (0,)) for device, a, b in slices)
    listed = devices or [device for device, _, _ in slices]
    return Sharding(tuple(listed), (StoredParam(name, (size,), 0, name, (0,)),), (pattern,))


def test_a_plan_says_what_it_sends() -> None:
    """Device 1 lacks half of 8 GB, 2 lacks all of it; each half is sent by its holder."""
    half, size = 2 * 10**9, 4 * 10**9
    source = by_hand((0, 0, half), (1, half, size), size=size)
    plan = plan_transfer(source, by_hand((1, 0, size), (2, 0, size), size=size))
    assert plan.explain() == cleandoc(
        """
        1 parameters in 1 bucket(s), 4 moves
        sent 12 GB in all (lower bound 12 GB)
        device 2 receives most: 8 GB of 8 GB; it sends 0 B
        most memory for shard and staging: 16 GB
        """
    )


def test_buckets_bound_what_a_device_stages() -> None:
    source = shard(LLAMA_7B, Layout(tp=2), range(2))
    destination = shard(LLAMA_7B, Layout(dp=2), range(2))
    largest = LLAMA_7B.embedding_params * 2
    plan = plan_transfer(source, destination, bucket_bytes=2 * largest)
    assert plan.num_buckets > 10
    assert max(share.staging_bytes for share in plan.devices) <= 2 * largest
    alone = plan_transfer(source, destination, bucket_bytes=1)
    assert alone.num_buckets == sum(len(p.shape) == 2 for p in plan.params)


def test_planning_70b_on_128_devices_is_a_matter_of_seconds() -> None:
    """The limit leaves room for a busy machine; alone it takes about a tenth of a second."""
    source = shard(LLAMA_70B, Layout(tp=8, pp=2, dp=8), range(128))
    destination = shard(LLAMA_70B, Layout(tp=4, dp=32), range(128))
    begin = time.process_time()
    plan = plan_transfer(source, destination)
    assert time.process_time() - begin < 5
    assert plan.sent_bytes == plan.lower_bound_bytes


def test_every_bucket_loads_all_pipeline_stages() -> None:
    """In no bucket does a device receive much more than its share of the bucket."""
    train, generate = Layout(tp=8, pp=2, dp=8), Layout(tp=4, dp=32)
    source = shard(LLAMA_70B, train, range(128))
    order = strided_generation(train, generate, range(128))
    plan = plan_transfer(source, shard(LLAMA_70B, generate, order))
    received = np.zeros((plan.num_buckets, 128))
    for move in plan.moves:
        for index in plan.groups[move.group] if not move.is_copy else ():
            received[plan.params[index].bucket, move.destination] += volume(move.box)
    assert plan.num_buckets > 50
    assert received.max(axis=1).sum() < 1.3 * received.sum(axis=0).max()


def refusal(source: Sharding, destination: Sharding, bucket_bytes: int = 1) -> str:
    with pytest.raises(PlanError) as caught:
        plan_transfer(source, destination, bucket_bytes=bucket_bytes)
    return str(caught.value)


def test_impossible_transfers_are_refused() -> None:
    good = by_hand((0, 0, 4), size=4)
    assert refusal(by_hand((0, 0, 3), size=4), by_hand((0, 0, 2), (1, 0, 4), size=4)) == (
        "cannot plan a transfer: no source device holds ((3, 4),) of parameter 'w', which device 1 "
        "needs"
    )
    assert refusal(good, by_hand((1, 0, 4), size=4, name="v")) == (
        "cannot plan a transfer: the source has no parameter 'v'; both sides must describe the "
        "same model with the same head"
    )
    assert refusal(good, by_hand((1, 0, 5), size=5)) == (
        "cannot plan a transfer: parameter 'w' is (4,) in the source and (5,) in the destination"
    )
    assert refusal(good, good, bucket_bytes=0) == "bucket_bytes is 0; expected at least 1"


def test_the_example_of_the_documentation_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "transfer_plans.md").read_text()
    code, output = page.split("```python\n")[1].split("```\n\n```text\n")
    exec(code, {})
    assert capsys.readouterr().out == output.split("```")[0]


def test_a_destination_that_holds_nothing_is_sent_nothing() -> None:
    plan = plan_transfer(by_hand((0, 0, 4), size=4), by_hand(size=4, devices=[1]))
    assert plan.moves == ()
    assert plan.sent_bytes == 0
