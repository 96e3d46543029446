"""Seconds of verifying on cores: worked examples, bounds, and the number of processes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from penstock.planner.cost.verification import Verifier, makespan_s
from penstock.planner.inputs.cluster import ClusterSpec, Mesh
from penstock.planner.inputs.task_profile import VerifierProfile

from ..search.tables import cluster_of, device


def cluster(cores: int, devices: int = 2, kind: str = "cpu", host_bytes: int = 0) -> ClusterSpec:
    """One node with so many cores."""
    made = cluster_of((1, devices, device(kind, 64)))
    (node,) = made.node_groups
    known = {"cores_per_node": cores, "host_bytes": host_bytes or None}
    return made.model_copy(update={"node_groups": (node.model_copy(update=known),)})


def verifier(rows: int, *item_s: float, waits: float = 0.0, **fields: object) -> Verifier:
    """One whose responses take these seconds, of which it waits a share."""
    cpu_s = (1.0 - waits) * sum(item_s) / len(item_s)
    profile = VerifierProfile.model_validate(
        {"item_s": sorted(item_s), "item_cpu_s": cpu_s, "most": 256, **fields}
    )
    return Verifier("reward.score", "reward", profile, rows)


def test_worked_examples() -> None:
    # Eight responses of 1 s each: on two cores 4 s, in however many processes above one.
    alike, mesh = verifier(8, 1.0), Mesh(cluster(2), (1,))
    assert [alike.seconds(1, n, cores=2.0) for n in (1, 2, 4)] == [8.0, 4.0, 4.0]
    assert alike.on(mesh, lagged=False) == (4.0, 2)
    # Under a lag the other rank has its core: one process is as good as more.
    assert alike.on(mesh, lagged=True) == (8.0, 1)
    # Two ranks have a process each.
    assert alike.on(Mesh(cluster(2), (2,)), lagged=True) == (4.0, 1)
    # Responses that wait nine tenths: 8 at once take as long as the longest.
    waiting = verifier(8, 1.0, waits=0.9)
    assert waiting.on(mesh, lagged=False) == (1.0, 8)
    # ... and no more of them are started than the node's memory holds.
    small = verifier(8, 1.0, waits=0.9, process_bytes=30)
    assert small.on(Mesh(cluster(2, host_bytes=64), (1,)), lagged=False) == (4.0, 2)
    # Processes that slow each other down by half, as two threads of one core do.
    slowed = verifier(8, 1.0, at_once=2, crowded=1.5)
    assert slowed.on(mesh, lagged=False) == (6.0, 2)


def test_a_gpu_has_a_core_under_a_lag_and_what_is_fixed_is_not_chosen() -> None:
    one = verifier(64, 1.0)
    assert Mesh(cluster(16, 8, "h100"), (2,)).cores(lagged=True) == 8.0
    assert Mesh(cluster(16, 8, "h100"), (2,)).cores(lagged=False) == 16.0
    assert Mesh(cluster(16, 8), (2,)).cores(lagged=True) == 4.0
    judge = VerifierProfile(item_s=(0.5,), item_cpu_s=0.0)
    mesh = Mesh(cluster(16, 8, "h100"), (2,))
    assert Verifier("judge.score", "judge", judge, 64).on(mesh, lagged=False) == (16.0, 1)
    pinned = Verifier(one.name, one.role, one.profile, 64, num_processes=3)
    assert pinned.on(mesh, lagged=False)[1] == 3


@given(
    items=st.lists(st.floats(0.01, 10.0), min_size=1, max_size=8),
    num_items=st.integers(1, 300),
    processes=st.integers(1, 9),
)
def test_the_last_process_is_late_by_one_response_at_most(
    items: list[float], num_items: int, processes: int
) -> None:
    item_s = tuple(sorted(items))
    whole_s = makespan_s(item_s, num_items, 1)
    least_s = whole_s / processes
    found_s = makespan_s(item_s, num_items, processes)
    # Of many responses the mean is that of the distribution; of few, of as many quantiles.
    assert found_s >= least_s * (1 - 0.02) or num_items > 32
    assert found_s <= least_s * (1 + 0.02) + item_s[-1]


@given(
    rows=st.integers(1, 40),
    items=st.lists(st.floats(0.01, 10.0), min_size=1, max_size=5),
    waits=st.sampled_from([0.0, 0.5, 1.0]),
    cores=st.integers(1, 12),
    devices=st.integers(1, 4),
    lagged=st.booleans(),
)
def test_no_number_of_processes_that_is_not_looked_at_is_much_better(
    rows: int, items: list[float], waits: float, cores: int, devices: int, lagged: bool
) -> None:
    """Where responses are alike, none is; else by less than one response takes."""
    one = verifier(rows, *items, waits=waits)
    mesh = Mesh(cluster(cores, devices), (devices,))
    seconds, number = one.on(mesh, lagged=lagged)
    ranks = min(devices, rows)
    free = mesh.cores(lagged=lagged)
    every = [one.seconds(ranks, n, free) for n in range(1, rows + 1)]
    assert seconds == one.seconds(ranks, number, free)
    slack = 0.0 if len(set(items)) == 1 and waits == 0.0 else max(items)
    assert seconds <= min(every) * 1.01 + slack
