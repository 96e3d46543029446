"""Which devices groups may have: against looking at every way."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.planner.inputs.cluster import ClusterSpec
from penstock.planner.search.allocation import Index, RangeMin, Space, pack

from .brute_force import Kinds, divisions
from .tables import cluster_of, clusters, device, kinds_of


@given(clusters(), st.integers(1, 3))
def test_the_allocations_that_fit_are_those_of_brute_force(
    cluster: ClusterSpec, num_groups: int
) -> None:
    space = Space(cluster)
    indices: list[Index] = [
        index for index in product(*map(range, space.shape)) if space.legal[index]
    ]
    found: list[tuple[Kinds, ...]] = []
    for allocation in product(indices, repeat=num_groups):
        if not space.fits(allocation):
            continue
        found.append(tuple(kinds_of(space.mesh(index)) for index in allocation))
        devices = space.devices(allocation)
        assert sorted(d for ids in devices for d in ids) == list(range(cluster.num_devices))
        for index, ids in zip(allocation, devices, strict=True):
            assert space.index_of(ids, "") == index
            assert space.num_devices(index) == len(ids)
    expected = [tuple(map(kinds_of, meshes)) for meshes in divisions(cluster, num_groups)]
    assert len(found) == len(set(found))
    assert set(found) == set(expected)


@given(st.lists(st.integers(1, 5), max_size=6), st.lists(st.integers(1, 8), min_size=1, max_size=3))
def test_pack_finds_a_way_exactly_if_there_is_one(sizes: list[int], rooms: list[int]) -> None:
    packed = pack(dict(enumerate(sizes)), rooms)

    def fills(order: tuple[int, ...]) -> bool:
        """Whether putting parts in this order into one room after another fills each."""
        left = list(order)
        for room in rooms:
            while room > 0 and left:
                room -= left.pop(0)
            if room:
                return False
        return not left

    assert (packed is not None) == any(fills(order) for order in set(permutations(sizes)))
    if packed is not None:
        assert [sum(sizes[key] for key in keys) for keys in packed] == rooms
        assert sorted(key for keys in packed for key in keys) == list(range(len(sizes)))


def test_equal_nodes_are_one_pool_wherever_they_are_listed() -> None:
    a, b = device("a", 10), device("b", 10)
    space = Space(cluster_of((1, 2, a), (1, 4, a), (2, 2, b), (3, 2, a)))
    assert [(pool.node_groups, pool.nodes) for pool in space.pools] == [
        ((0, 3), (0, 10, 12, 14)),
        ((1,), (2,)),
        ((2,), (6, 8)),
    ]
    assert space.pools[0].sizes == (0, 1, 2, 4, 6, 8)
    assert space.mesh((3, 0, 0)).counts == (2, 0, 0, 2)
    assert space.mesh((3, 0, 0)) is space.mesh((3, 0, 0))


@pytest.mark.parametrize(
    ("index", "legal"),
    [((0, 0), False), ((1, 0), True), ((4, 0), True), ((1, 1), False), ((1, 2), False),
     ((4, 2), True), ((4, 1), False)],
)  # fmt: skip
def test_a_part_of_a_node_stands_alone(index: Index, legal: bool) -> None:
    space = Space(cluster_of((2, 4, device("a", 10)), (2, 2, device("b", 10))))
    assert space.legal[index] == legal


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 3), st.data())
def test_equals_the_minimum_of_the_box(sides: list[int], rows: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    values = rng.random((rows, *sides))
    values[rng.random(values.shape) < 0.2] = np.inf
    ends = np.sort(np.stack([rng.integers(0, side, (20, 2)) for side in sides], 2), 1)
    low, high = ends[:, 0], ends[:, 1]
    found = RangeMin(values)(low, high)
    for k in range(20):
        box = (slice(None), *(slice(a, b + 1) for a, b in zip(low[k], high[k], strict=True)))
        assert found[k].tolist() == values[box].reshape(rows, -1).min(1).tolist()
