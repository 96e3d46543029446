"""Collectives against ring formulas worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.planner.cost.time_parts import (
    Links,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    links_of,
    point_to_point_s,
)

from .time_cases import IDEAL, mesh

LINKS = Links(
    node_size=4,
    within_bytes_per_s=100.0,
    between_bytes_per_s=10.0,
    within_hop_s=1.0,
    between_hop_s=5.0,
    within_stage_s=2.0,
    between_stage_s=7.0,
)


def test_what_a_program_gets_of_a_link() -> None:
    constants = IDEAL.replaced(network_efficiency=0.5, hop_s=3e-6, stage_s=4e-6)
    links = links_of(mesh(8, within=1000.0, between=100.0, latency=1e-6), constants)
    expected = Links(4, 500.0, 50.0, 4e-6, 13e-6, 5e-6, 14e-6)
    assert links == pytest.approx(expected)


def test_a_ring_in_one_node() -> None:
    # 4 ranks end with 800 bytes: three hops of 200 bytes each.
    assert all_gather_s(LINKS, 800, 4) == pytest.approx(3 * (200 / 100 + 1))
    assert all_reduce_s(LINKS, 800, 4) == pytest.approx(2 * 3 * (200 / 100 + 1))


def test_two_levels_over_nodes() -> None:
    # 8 ranks on 2 nodes: one hop of 100 bytes between nodes, then three of 200 inside them.
    expected = (100 / 10 + 5) + 3 * (200 / 100 + 1)
    assert all_gather_s(LINKS, 800, 8) == pytest.approx(expected)


def test_ranks_that_lie_apart_share_a_node_with_fewer() -> None:
    # Stride 2: two ranks a node, so 4 ranks are 2 nodes; stride 4 or more: each rank its own node.
    expected = (200 / 10 + 5) + (400 / 100 + 1)
    assert all_gather_s(LINKS, 800, 4, stride=2) == pytest.approx(expected)
    assert all_gather_s(LINKS, 800, 4, stride=4) == pytest.approx(3 * (200 / 10 + 5))
    assert all_gather_s(LINKS, 800, 4, stride=16) == pytest.approx(3 * (200 / 10 + 5))


def test_every_rank_to_every_other() -> None:
    # 100 bytes to each: three neighbors on the node, four ranks on the other.
    expected = 3 * (100 / 100 + 1) + 4 * (100 / 10 + 5)
    assert all_to_all_s(LINKS, 800, 8) == pytest.approx(expected)


def test_a_pipeline_that_leaves_the_node_keeps_the_pace_of_the_network() -> None:
    assert point_to_point_s(LINKS, 50, block=4) == pytest.approx(50 / 100 + 2)
    assert point_to_point_s(LINKS, 50, block=5) == pytest.approx(50 / 10 + 7)


@given(stride=st.integers(1, 64), num_bytes=st.floats(0, 1e12))
def test_one_rank_sends_nothing(stride: int, num_bytes: float) -> None:
    for collective in (all_gather_s, all_reduce_s, all_to_all_s):
        assert collective(LINKS, num_bytes, 1, stride) == 0


@given(
    ranks=st.integers(2, 512),
    stride=st.integers(1, 16),
    num_bytes=st.floats(1, 1e9),
    more=st.floats(1, 100),
)
def test_better_links_are_never_slower_and_more_bytes_never_faster(
    ranks: int, stride: int, num_bytes: float, more: float
) -> None:
    for collective in (all_gather_s, all_reduce_s, all_to_all_s):
        time = collective(LINKS, num_bytes, ranks, stride)
        faster = LINKS._replace(between_bytes_per_s=10 * more, within_bytes_per_s=100 * more)
        assert collective(faster, num_bytes, ranks, stride) <= time
        assert collective(LINKS, num_bytes * more, ranks, stride) >= time


@given(ranks=st.integers(1, 128), num_bytes=st.floats(0, 1e9))
def test_a_gather_moves_no_less_than_what_a_rank_lacks(ranks: int, num_bytes: float) -> None:
    lacking = num_bytes * (ranks - 1) / ranks
    assert all_gather_s(LINKS, num_bytes, ranks) >= lacking / 100 * (1 - 1e-12)
