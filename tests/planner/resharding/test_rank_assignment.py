from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.dataflow.errors import PlanError
from penstock.planner.inputs.layout import Layout
from penstock.planner.resharding.plan_transfer import plan_transfer
from penstock.planner.resharding.rank_assignment import (
    assign,
    fewest_bytes,
    kept_bytes,
    strided_generation,
)
from penstock.planner.resharding.sharding import Sharding, shard

from ..transfers import LLAMA_70B, TINY, cluster_of, models, shardings


def sent(source: Sharding, destination: Sharding) -> int:
    return plan_transfer(source, destination).sent_bytes


@st.composite
def small_transfers(draw: st.DrawFn) -> tuple[Sharding, Sharding]:
    model = draw(models())
    source = draw(shardings(model, "vocabulary", draw(st.sampled_from([2, 4])), 6))
    return source, draw(shardings(model, "vocabulary", draw(st.sampled_from([1, 2, 3, 4])), 6))


@pytest.mark.slow
@given(small_transfers())
@settings(max_examples=40, deadline=None)
def test_the_order_is_the_best_of_all(pair: tuple[Sharding, Sharding]) -> None:
    source, destination = pair
    best = min(sent(source, destination.on(p)) for p in permutations(destination.devices))
    found = fewest_bytes(source, destination)
    assert sorted(found.devices) == sorted(destination.devices)
    assert sent(source, found) == best


@given(small_transfers(), st.sampled_from([(6,), (3, 3), (2, 4), (1, 2, 1, 2)]))
@settings(max_examples=40, deadline=None)
def test_with_a_cluster_it_is_the_best_that_keeps_nodes_together(
    pair: tuple[Sharding, Sharding], nodes: tuple[int, ...]
) -> None:
    source, destination = pair
    cluster = cluster_of(*nodes)
    destination = destination.on(sorted(destination.devices))
    node_of = [cluster.node_of(device) for device in destination.devices]

    def together(devices: tuple[int, ...]) -> bool:
        pairs = {(old, cluster.node_of(d)) for old, d in zip(node_of, devices, strict=True)}
        return len(pairs) == len(set(node_of)) == len({new for _, new in pairs})

    allowed = [p for p in permutations(destination.devices) if together(p)]
    found = fewest_bytes(source, destination, cluster)
    assert together(found.devices)
    assert sent(source, found) == min(sent(source, destination.on(p)) for p in allowed)


@given(small_transfers())
@settings(max_examples=40, deadline=None)
def test_kept_bytes_are_what_a_plan_does_not_send(pair: tuple[Sharding, Sharding]) -> None:
    source, destination = pair
    kept = kept_bytes(source, destination)
    plan = plan_transfer(source, destination)
    for i, device in enumerate(destination.devices):
        assert kept[i, i] == plan.traffic[device].kept_bytes


DIVIDING = [
    (Layout(tp=4), Layout(tp=2, dp=2)),
    (Layout(tp=4, dp=2), Layout(dp=8)),
    (Layout(tp=2, pp=2, dp=2), Layout(tp=2, dp=4)),
    (Layout(tp=2, pp=2, cp=2), Layout(tp=1, pp=2, dp=4)),
    (Layout(tp=4, pp=2, dp=1), Layout(tp=4, pp=2, dp=1)),
    (Layout(tp=2, pp=4, dp=1), Layout(tp=1, pp=2, dp=4)),
]


@pytest.mark.parametrize(("train", "generate"), DIVIDING)
def test_strided_groups_leave_nothing_unused_and_are_as_good_as_any(
    train: Layout, generate: Layout
) -> None:
    model = TINY.model_copy(update={"num_layers": 4, "num_key_heads": 4})
    source = shard(model, train, range(8)[: train.num_devices])
    order = strided_generation(train, generate, source.devices)
    strided = shard(model, generate, order)
    plan = plan_transfer(source, strided)
    assert all(share.unused_bytes == 0 for share in plan.devices)
    assert plan.sent_bytes == sent(source, fewest_bytes(source, strided.on(source.devices)))


def test_strided_groups_of_hybridflow() -> None:
    """Groups of generation ranks are training ranks at a stride of 4 / 2."""
    order = strided_generation(Layout(tp=4, dp=2), Layout(tp=2, dp=4), range(8))
    assert [order[i : i + 2] for i in range(0, 8, 2)] == [(0, 2), (1, 3), (4, 6), (5, 7)]


def test_70b_finds_the_strided_order_by_itself() -> None:
    train, generate = Layout(tp=8, pp=2, dp=8), Layout(tp=4, dp=32)
    source = shard(LLAMA_70B, train, range(128))
    strided = shard(LLAMA_70B, generate, strided_generation(train, generate, range(128)))
    given_order = shard(LLAMA_70B, generate, range(128))
    cluster = cluster_of(*[8] * 16)
    found = fewest_bytes(source, given_order, cluster)
    assert _kept(source, found) == _kept(source, strided) > _kept(source, given_order)


def _kept(source: Sharding, destination: Sharding) -> int:
    return int(kept_bytes(source, destination).trace())


def test_groups_that_do_not_divide_are_refused() -> None:
    with pytest.raises(PlanError) as caught:
        strided_generation(Layout(tp=4), Layout(tp=3), range(4))
    assert str(caught.value) == (
        "generation tp=3 does not divide training tp=4; strided groups need it to, use "
        "fewest_bytes for any two layouts"
    )
    with pytest.raises(PlanError) as caught:
        strided_generation(Layout(tp=4), Layout(tp=2), range(4))
    assert str(caught.value) == (
        "training has 4 ranks, generation 2, and 4 devices were given; strided groups need all "
        "three equal"
    )


@given(st.integers(1, 6), st.integers(0, 10**6), st.sampled_from([1, 10, 10**15]))
def test_equals_the_best_of_all_permutations(n: int, seed: int, largest: int) -> None:
    cost = np.random.default_rng(seed).integers(-largest, largest + 1, (n, n))
    columns, total = assign(cost)
    assert sorted(columns) == list(range(n))
    assert total == sum(cost[i, c] for i, c in enumerate(columns))
    assert total == min(sum(cost[i, c] for i, c in enumerate(p)) for p in permutations(range(n)))


def test_nothing_to_assign() -> None:
    assert assign(np.zeros((0, 0), np.int64)) == ((), 0)
