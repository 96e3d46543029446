"""Which processes can stand in for each other, and which give each other weights."""

from __future__ import annotations

import pytest
from penstock.dataflow.runtime.executor import Program
from penstock.dataflow.runtime.placement import DeviceGroup, Placement
from penstock.workers.executors.on_ray.backend import RayBackend
from penstock.workers.executors.rank_group import RankGroup, routes_of
from penstock.workers.weight_sync.packet_server import Route

from ...algorithms import runs


def key(group: DeviceGroup, hosted: bytes, *, threads: int = 1) -> object:
    return RankGroup(RayBackend(), group, threads, 60.0, hosted).key


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_process_that_shares_no_model_can_take_on_another(num_ranks: int):
    group = DeviceGroup("rollout", num_ranks=num_ranks)
    assert key(group, b"one model") == key(group, b"another")
    assert key(group, b"one model") != key(group, b"one model", threads=2)
    assert key(group, b"one model") != key(DeviceGroup("judges"), b"one model")


def test_processes_that_share_a_model_stay_with_it():
    group = DeviceGroup("rollout", tensor_parallel=2)
    assert key(group, b"one model") == key(group, b"one model")
    assert key(group, b"one model") != key(group, b"another")


def program(**groups: tuple[str, ...]) -> Program:
    """PPO with the named nodes, or roles, on groups of two ranks of their own; the rest on main."""
    graph = runs.make("ppo").graph
    chosen = {name: group for group, names in groups.items() for name in names}
    nodes = {
        node.name: chosen.get(node.name) or chosen.get(node.role or "") or "main"
        for node in graph.nodes
        if node.name not in graph.sources
    }
    main = DeviceGroup("main", tensor_parallel=2)
    return Program(graph, Placement((main, *(DeviceGroup(g, 2) for g in groups)), nodes))


def test_a_route_is_for_all_roles_of_two_groups() -> None:
    one = program(apart=("actor.generate", "critic.value"))
    assert routes_of({"train": one}) == [Route("main", "apart", (0, 1), (0, 1))]


def test_groups_may_give_to_each_other_and_those_who_read_nothing_get_nothing() -> None:
    one = program(apart=("actor.generate", "critic.train"), judges=("ref", "reward"))
    assert [(route.senders, route.receivers) for route in routes_of({"train": one})] == [
        ("apart", "main"),
        ("main", "apart"),
    ]


def test_a_role_may_be_trained_here_by_one_program_and_there_by_another() -> None:
    here, there = program(apart=("actor.generate",)), program(apart=("actor.train",))
    assert [(r.senders, r.receivers) for r in routes_of({"a": here, "b": there})] == [
        ("apart", "main"),
        ("main", "apart"),
    ]
