"""Which of Ray's nodes stands for which node of a plan; and what is said if there is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.dataflow.runtime.placement import ClusterNode, DeviceGroup
from penstock.workers.executors.assignment import Machine, NoRoom, assign, shares_of


def node(name: str, gpus: float = 0, *, free: float | None = None, **labels: str) -> Machine:
    there = gpus if free is None else free
    return Machine(name, name, {"GPU": gpus, "CPU": 8}, {"GPU": there, "CPU": 8}, labels)


def group(
    name: str, nodes: dict[int, int], *, tensor: int = 1, device: str = "cuda"
) -> DeviceGroup:
    """Devices of a group -> the node of each."""
    num_ranks = len(nodes) // tensor
    where = tuple(ClusterNode(number) for number in nodes.values())
    return DeviceGroup(name, num_ranks, device, tensor, devices=tuple(nodes), nodes=where)


def test_each_node_of_the_plan_gets_a_node_of_its_own() -> None:
    train = group("train", {0: 0, 1: 0, 2: 1, 3: 1}, tensor=2)
    rollout = group("rollout", {4: 1, 2: 1})
    found = assign(shares_of([train, rollout]), [node("a", 2), node("b", 3)], {}, free_only=False)
    assert found == {0: "a", 1: "a", 2: "b", 3: "b", 4: "b"}


def test_a_small_node_is_left_to_what_fits_no_other() -> None:
    """Node 0 fits both, and gives the large one up to node 1."""
    shares = shares_of([group("one", {0: 0}), group("two", {2: 1, 3: 1})])
    found = assign(shares, [node("large", 2), node("small", 1)], {}, free_only=False)
    assert found == {0: "small", 2: "large", 3: "large"}


def test_labels_say_which_node_it_may_be() -> None:
    fast = (ClusterNode(0, {"kind": "fast"}),)
    one = DeviceGroup("one", device="cuda", devices=(0,), nodes=fast)
    nodes = [node("a", 8), node("b", 8, kind="slow"), node("c", 8, kind="fast")]
    assert assign(shares_of([one]), nodes, {}, free_only=False) == {0: "c"}
    with pytest.raises(NoRoom) as raised:
        assign(shares_of([one]), nodes[:2], {}, free_only=False)
    assert str(raised.value) == (
        "node 0 of the plan needs 1 GPU and the label kind=fast, which no node has\n"
        "    a: 8 GPUs, kind=nothing\n"
        "    b: 8 GPUs, kind=slow"
    )


def test_a_node_that_is_missing_and_a_gpu_less_than_planned() -> None:
    shares = shares_of([group("train", {0: 0, 1: 0, 2: 1, 3: 1})])
    with pytest.raises(NoRoom) as raised:
        assign(shares, [node("a", 2)], {}, free_only=False)
    assert str(raised.value) == (
        "node 1 of the plan needs 2 GPUs, which no node has\n    a: 2 GPUs (is node 0 of the plan)"
    )
    with pytest.raises(NoRoom) as raised:
        assign(shares, [node("a", 2), node("b", 2, free=1)], {}, free_only=True)
    assert str(raised.value) == (
        "node 1 of the plan needs 2 GPUs, which no node has free\n"
        "    a: 2 GPUs free (is node 0 of the plan)\n"
        "    b: 1 GPU free"
    )


def test_cpus_are_taken_only_where_the_plan_has_several_nodes() -> None:
    one = group("one", {0: 0, 1: 0}, device="cpu")
    assert [dict(share.needs) for share in shares_of([one])] == [{}]
    two = group("two", {0: 0, 1: 1, 2: 1}, device="cpu")
    assert [dict(share.needs) for share in shares_of([two])] == [{"CPU": 1}, {"CPU": 2}]
    assert shares_of([DeviceGroup("anywhere", 2)]) == []


def test_a_node_that_stands_for_another_already_stays_with_it() -> None:
    shares = shares_of([group("train", {0: 0, 4: 1})])
    nodes = [node("a", 2), node("b", 2), node("c", 2)]
    assert assign(shares, nodes, {1: "a", 2: "b"}, free_only=False) == {0: "c", 4: "a"}


def test_without_a_plan_only_what_shares_matrices_is_together() -> None:
    train = DeviceGroup("train", 2, "cuda", tensor_parallel=2)
    rollout = DeviceGroup("rollout", 1, "cuda")
    nodes = [node("a", 2), node("b", 3)]
    found = assign(shares_of([rollout, train]), nodes, {}, free_only=False)
    assert found == {
        **{("train", 0): "a", ("train", 1): "a", ("train", 2): "b", ("train", 3): "b"},
        ("rollout", 0): "b",
    }
    with pytest.raises(NoRoom, match="rank 1 of 'train' needs 2 GPUs, which no node has\n"):
        assign(shares_of([train]), [node("a", 3)], {}, free_only=False)


def test_a_rank_larger_than_any_node_is_spread() -> None:
    sharded = DeviceGroup("train", 1, "cuda", tensor_parallel=4)
    found = assign(shares_of([sharded]), [node("a", 3), node("b", 3)], {}, free_only=False)
    assert list(found.values()) == ["a", "a", "a", "b"]


def test_devices_that_groups_share_are_counted_once() -> None:
    train = DeviceGroup("train", 1, "cuda", tensor_parallel=2, devices=(0, 1))
    rollout = DeviceGroup("rollout", 2, "cuda", devices=(0, 1))
    assert assign(shares_of([train, rollout]), [node("a", 2)], {}, free_only=False) == {
        0: "a",
        1: "a",
    }


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.permutations(range(6)))
def test_whatever_fits_in_some_order_is_placed(sizes: list[int], order: list[int]) -> None:
    """As many GPUs as each node needs, on nodes in any order: there is always a way."""
    devices = iter(range(100))
    numbers = {next(devices): number for number, size in enumerate(sizes) for _ in range(size)}
    nodes = [node(f"n{i}", sizes[i]) for i in order if i < len(sizes)]
    found = assign(shares_of([group("all", numbers)]), nodes, {}, free_only=True)
    by_number = {
        number: {found[d] for d, n in numbers.items() if n == number} for number in numbers.values()
    }
    assert all(len(where) == 1 for where in by_number.values())
    assert len(set.union(*by_number.values())) == len(sizes)
