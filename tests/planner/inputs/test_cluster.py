"""Clusters like a given one, with fewer nodes or better hardware."""

from __future__ import annotations

import pytest
from penstock.planner.inputs.cluster import (
    MOST_DEVICES,
    ClusterSpec,
    Mesh,
    halvings,
    improved,
    part,
    smaller,
)

from ..hand_made import GB, h100


def mixed() -> ClusterSpec:
    """Two nodes of 8 devices, then three of 4."""
    cluster = h100(2)
    other = cluster.node_groups[0].model_copy(update={"num_nodes": 3, "devices_per_node": 4})
    groups = (*cluster.node_groups, other)
    return ClusterSpec(name="mixed", node_groups=groups, between=cluster.between)


def test_nodes_with_a_network_of_their_own_are_near_each_other_alone() -> None:
    cluster = h100(2)
    slow = cluster.between.model_copy(update={"bytes_per_s": 1e9})
    (node,) = cluster.node_groups
    island = node.model_copy(update={"between": cluster.between})
    both = ClusterSpec(name="islands", node_groups=(island, island, node), between=slow)
    assert Mesh(both, (16, 0, 0)).between == cluster.between
    assert Mesh(both, (8, 8, 0)).between == Mesh(both, (0, 0, 16)).between == slow
    faster = improved(both)["2 x bandwidth between nodes"]
    assert Mesh(faster, (16, 0, 0)).between.bytes_per_s == 2 * cluster.between.bytes_per_s
    assert Mesh(faster, (8, 0, 8)).between.bytes_per_s == 2e9


def test_halvings_end_with_one() -> None:
    assert halvings(12) == [12, 6, 3, 1]


@pytest.mark.parametrize(("devices", "groups"), [(3, [(1, 3)]), (20, [(2, 8), (1, 4)])])
def test_a_part_has_its_own_number_of_devices(devices: int, groups: list[tuple[int, int]]) -> None:
    cluster = mixed()
    assert cluster.num_devices == 28
    found = part(cluster, devices)
    assert found.num_devices == devices
    assert [(g.num_nodes, g.devices_per_node) for g in found.node_groups] == groups


def test_every_number_of_nodes_of_a_small_cluster() -> None:
    assert {name: one.num_devices for name, one in smaller(mixed()).items()} == {
        "1 node": 8, "2 nodes": 16, "3 nodes": 20, "4 nodes": 24, "5 nodes": 28,
    }  # fmt: skip


def test_halvings_of_a_large_cluster() -> None:
    assert list(smaller(h100(40))) == ["1 node", "2 nodes", "5 nodes", "10 nodes", "20 nodes",
                                       "40 nodes"]  # fmt: skip


def test_better_hardware_differs_in_one_thing() -> None:
    cluster = h100(2)
    found = improved(cluster)
    device, group = cluster.node_groups[0].device, cluster.node_groups[0]
    assert list(found) == [
        "2 x device memory", "2 x bandwidth of device memory", "2 x peak flops",
        "2 x bandwidth within nodes", "2 x bandwidth between nodes", "2 x devices",
    ]  # fmt: skip
    better = [one.node_groups[0].device for one in found.values()]
    assert [one.memory_bytes for one in better] == [160 * GB] + [80 * GB] * 5
    assert better[1].memory_bytes_per_s == 2 * device.memory_bytes_per_s
    assert better[2].flops_per_s == {"bfloat16": 2 * 989e12}
    links = [one.node_groups[0].within.bytes_per_s for one in found.values()]
    assert links == [group.within.bytes_per_s * (2 if i == 3 else 1) for i in range(6)]
    networks = [one.between.bytes_per_s for one in found.values()]
    assert networks == [cluster.between.bytes_per_s * (2 if i == 4 else 1) for i in range(6)]
    assert [one.num_devices for one in found.values()] == [16] * 5 + [32]


def test_links_that_are_not_there_are_not_improved() -> None:
    single = part(h100(2), 1)
    assert list(improved(single))[3:] == ["2 x devices"]
    assert "2 x bandwidth between nodes" not in improved(h100(1))


def test_more_devices_than_can_be_planned_for_are_left_out() -> None:
    assert "2 x devices" not in improved(h100(MOST_DEVICES // 8))
