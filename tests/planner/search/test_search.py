"""The search against brute force, and what it promises besides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from penstock.dataflow.errors import PlanError
from penstock.planner.inputs.cluster import ClusterSpec, Mesh
from penstock.planner.search.options import Assignment, CallNode, Option, SearchResult
from penstock.planner.search.pins import Pins
from penstock.planner.search.search import search

from .brute_force import Best, Key, all_plans, least_with_devices
from .graphs import PPO, steps, units_of
from .tables import RandomTable, cluster_of, clusters, device, kinds_of

EXACT = 1e-12


def key_of(assignment: Assignment) -> Key:
    return frozenset(
        (frozenset(group.call_groups), kinds_of(group.mesh)) for group in assignment.groups
    )


def assert_agrees(result: SearchResult, plans: Sequence[Best]) -> None:
    """The best and the runner-up are those of brute force, up to ties."""
    times = {plan.key: plan.step_time_s for plan in plans}
    assert result.step_time_s == pytest.approx(plans[0].step_time_s, rel=EXACT)
    assert times[key_of(result.best)] == pytest.approx(result.step_time_s, rel=EXACT)
    assert result.lower_bound_s == result.step_time_s
    assert result.gap == 0.0
    assert not result.stopped_at_deadline
    if len(plans) == 1:
        assert result.runner_up is None
        return
    assert result.runner_up is not None
    assert key_of(result.runner_up) != key_of(result.best)
    assert result.runner_up.step_time_s == pytest.approx(plans[1].step_time_s, rel=EXACT)
    assert times[key_of(result.runner_up)] == pytest.approx(plans[1].step_time_s, rel=EXACT)


def assert_uses_every_device_once(assignment: Assignment, cluster: ClusterSpec) -> None:
    """Devices are disjoint, complete, and whole nodes or a part of one."""
    used = [d for group in assignment.groups for d in group.devices]
    assert sorted(used) == list(range(cluster.num_devices))
    for group in assignment.groups:
        held: dict[int, int] = {}
        for d in group.devices:
            held[cluster.node_of(d)] = held.get(cluster.node_of(d), 0) + 1
        sizes: dict[int, int] = {}
        for d in range(cluster.num_devices):
            sizes[cluster.node_of(d)] = sizes.get(cluster.node_of(d), 0) + 1
        assert len(held) == 1 or all(sizes[node] == n for node, n in held.items())
        assert group.mesh.num_devices == len(group.devices)
        options = group.options.values()
        resident = sum(option.resident_bytes for option in options)
        transient = max(size for option in options for size in option.transient_bytes.values())
        assert resident + transient <= group.mesh.memory_bytes


@pytest.mark.slow
@settings(max_examples=150)
@given(
    steps(max_calls=5, max_roles=4, min_calls=3), clusters(), st.integers(0, 1),
    st.integers(0, 10_000),
)  # fmt: skip
def test_equals_brute_force(
    calls: tuple[CallNode, ...], cluster: ClusterSpec, max_lag: int, seed: int
) -> None:
    table = RandomTable(calls, seed)
    plans = all_plans(calls, table, cluster, max_lag)
    if not plans:
        event("infeasible")
        with pytest.raises(PlanError, match=r"lacking|no legal layout|no way to divide"):
            search(calls, table, cluster, max_lag=max_lag)
        return
    event(f"{len(plans[0].key)} group(s) win")
    result = search(calls, table, cluster, max_lag=max_lag)
    assert_agrees(result, plans)
    assert_uses_every_device_once(result.best, cluster)


def test_slowing_a_call_down_can_help_and_is_left_out_by_default() -> None:
    """The schedule is work-conserving: a call that ends sooner lets the wrong one begin."""
    calls = (
        CallNode("c0", "r0", (), "r0"),
        CallNode("c1", "r2", ("c0",), "r2"),
        CallNode("c2", "r0", ("c1", "c0"), "r0"),
        CallNode("c3", "r1", ("c1", "c0"), "r1"),
    )
    cluster, table = cluster_of((3, 1, device("b", 24))), RandomTable(calls, 50941)
    fast = search(calls, table, cluster, max_lag=1)
    assert_agrees(fast, all_plans(calls, table, cluster, 1))
    slow, *_ = all_plans(calls, table, cluster, 1, everything=True)
    assert slow.step_time_s < fast.step_time_s


# --- pins


@pytest.mark.slow
@settings(max_examples=100)
@given(steps(max_calls=5, max_roles=4, min_calls=3), clusters(), st.data())
def test_pinned_groups_counts_and_layouts_equal_brute_force(
    calls: tuple[CallNode, ...], cluster: ClusterSpec, data: st.DataObject
) -> None:
    call_groups = units_of(calls)
    some = st.lists(st.sampled_from(call_groups), min_size=2, max_size=3, unique=True).map(tuple)
    none = st.just(())
    pins = Pins(
        together=tuple(data.draw(st.lists(some, max_size=1) if len(call_groups) > 1 else none)),
        apart=tuple(data.draw(st.lists(some, max_size=1) if len(call_groups) > 1 else none)),
        num_devices=data.draw(
            st.dictionaries(
                st.sampled_from(call_groups), st.integers(1, cluster.num_devices), max_size=1
            )
        ),
        layouts={calls[0].name: {"micro_batch": data.draw(st.integers(1, 2))}},
        allows=lambda call_group, option: (
            call_group != call_groups[-1] or option.resident_bytes > 0
        ),
    )

    class Filtered(RandomTable):
        def options(
            self, call_group: str, mesh: Mesh, *, beside: tuple[str, ...] = (), lagged: bool = False
        ) -> Sequence[Option]:
            found = super().options(call_group, mesh, beside=beside)
            wanted = pins.layouts[calls[0].name]["micro_batch"]
            if calls[0].call_group in (call_group, *beside):
                found = [o for o in found if o.layouts[calls[0].name].micro_batch == wanted]
            return [o for o in found if pins.allows(call_group, o)]

    def kept(plan: Best) -> bool:
        groups = [(group, sum(n for _, _, n in kinds)) for group, kinds in plan.key]
        return (
            all(any(set(s) <= group for group, _ in groups) for s in pins.together)
            and all(len(group & set(s)) < 2 for group, _ in groups for s in pins.apart)
            and all(n == m for u, n in pins.num_devices.items() for g, m in groups if u in g)
        )

    seed = data.draw(st.integers(0, 10_000))
    plans = [p for p in all_plans(calls, Filtered(calls, seed), cluster, 0) if kept(p)]
    if not plans:
        event("infeasible")
        with pytest.raises(PlanError):
            search(calls, RandomTable(calls, seed), cluster, max_lag=0, pins=pins)
        return
    event("feasible")
    table = RandomTable(calls, seed)
    assert_agrees(search(calls, table, cluster, max_lag=0, pins=pins), plans)


@pytest.mark.slow
@settings(max_examples=60)
@given(steps(max_calls=4, max_roles=3, min_calls=3), clusters(max_devices=6), st.data())
def test_pinned_devices_equal_brute_force(
    calls: tuple[CallNode, ...], cluster: ClusterSpec, data: st.DataObject
) -> None:
    call_groups = units_of(calls)
    ids = st.lists(st.integers(0, cluster.num_devices - 1), min_size=1, max_size=4, unique=True)
    devices = data.draw(st.dictionaries(st.sampled_from(call_groups), ids.map(tuple), max_size=2))
    pins = Pins(devices=devices)
    try:
        pins.check(calls, cluster)
    except PlanError:
        event("refused")
        return
    table = RandomTable(calls, data.draw(st.integers(0, 10_000)), missing=0.0)
    least_s = least_with_devices(calls, table, cluster, 0, devices)
    if least_s is None:
        event("infeasible")
        with pytest.raises(PlanError):
            search(calls, table, cluster, max_lag=0, pins=pins)
        return
    event(f"feasible, {len(devices)} pinned")
    result = search(calls, table, cluster, max_lag=0, pins=pins)
    assert result.step_time_s == pytest.approx(least_s, rel=EXACT)
    assert_uses_every_device_once(result.best, cluster)
    for group in result.best.groups:
        for call_group in group.call_groups:
            assert set(group.devices) == set(devices.get(call_group, group.devices))


# --- any time, deterministic, several schedules


NODES = cluster_of((6, 4, device("a", 40)))
TABLE = RandomTable(PPO, seed=7)


def ticking(step_s: float) -> Callable[[], float]:
    """A clock that goes on by `step_s` whenever somebody looks."""
    ticks = count()
    return lambda: next(ticks) * step_s


@pytest.mark.slow
def test_a_deadline_returns_the_best_so_far_with_a_bound_that_holds() -> None:
    full = search(PPO, TABLE, NODES, max_lag=1)
    gaps: list[float] = []
    for looks in [*range(1, 300, 10), 100_000]:
        result = search(PPO, TABLE, NODES, max_lag=1, deadline_s=looks, now_s=ticking(1.0))
        assert result.stopped_at_deadline == (looks < 300)
        assert result.lower_bound_s <= full.step_time_s <= result.step_time_s
        assert_uses_every_device_once(result.best, NODES)
        gaps.append(result.gap)
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] == 1.0
    assert any(0 < gap < 1 for gap in gaps)
    assert gaps[-1] == 0.0


def test_the_result_does_not_depend_on_the_clock_if_it_finishes() -> None:
    first = search(PPO, TABLE, NODES, max_lag=(0, 1), deadline_s=1e9, now_s=ticking(0.001))
    again = search(PPO, RandomTable(PPO, seed=7), NODES, max_lag=(0, 1))
    times = {"search_time_s": 0.0, "other_lags": ()}
    assert replace(first, **times) == replace(again, **times)
    assert [replace(r, **times) for r in first.other_lags] == [
        replace(r, **times) for r in again.other_lags
    ]


def test_the_best_of_several_schedules_wins_and_the_others_are_told() -> None:
    both = search(PPO, TABLE, NODES, max_lag=(0, 1))
    alone = [search(PPO, TABLE, NODES, max_lag=lag) for lag in (0, 1)]
    # Of equal plans it may be another: it begins with what was good for the schedule before.
    assert both.step_time_s == min(result.step_time_s for result in alone)
    assert both.best.max_lag == 1
    (other,) = both.other_lags
    assert other.best == alone[0].best
    assert other.lower_bound_s == alone[0].lower_bound_s


def test_equal_times_go_to_the_first_schedule() -> None:
    cluster = cluster_of((1, 1, device("a", 40)))
    result = search(PPO, RandomTable(PPO, 3, missing=0), cluster, max_lag=(1, 0))
    assert result.best.max_lag == 1
    assert [other.best.max_lag for other in result.other_lags] == [0]


def test_every_question_to_the_table_is_asked_once() -> None:
    asked: list[Any] = []

    class Counting(RandomTable):
        def options(
            self, call_group: str, mesh: Mesh, *, beside: tuple[str, ...] = (), lagged: bool = False
        ) -> Sequence[Option]:
            asked.append((call_group, mesh.counts, beside, lagged))
            return super().options(call_group, mesh, beside=beside)

    result = search(PPO, Counting(PPO, 7), NODES, max_lag=(0, 1))
    assert len(asked) == len(set(asked)) == result.num_asked


def test_a_plan_prints() -> None:
    result = search(PPO, TABLE, NODES, max_lag=0)
    assert str(result.best) == (
        "0.0580065 s per step: actor.generate, critic on 16 device(s); reward on 1 device(s); "
        "critic.value, actor on 4 device(s); ref on 3 device(s)"
    )


CLUSTER = cluster_of((2, 4, device("a", 40)))


NOTHING = RandomTable(PPO, 1, missing=1.0)
NO_CALLS: tuple[CallNode, ...] = ()


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (lambda: search(NO_CALLS, TABLE, CLUSTER, max_lag=0),
         "there is nothing to place: the step has no call of a model"),
        (lambda: search(PPO, TABLE, CLUSTER, max_lag=-1),
         "max_lag is -1; expected a number of steps, 0 or more, or several of them"),
        (lambda: search(PPO, TABLE, CLUSTER, max_lag=()),
         "max_lag is (); expected a number of steps, 0 or more, or several of them"),
        (lambda: search(PPO, TABLE, CLUSTER, max_lag=0, deadline_s=0.0),
         "deadline_s is 0.0; expected a positive number of seconds"),
        (lambda: search(PPO, NOTHING, CLUSTER, max_lag=0, deadline_s=5, now_s=ticking(1.0)),
         "no plan was found in 6 s; give deadline_s more time"),
    ],
)  # fmt: skip
def test_refused(ask: Callable[[], SearchResult], expected: str) -> None:
    with pytest.raises(PlanError) as caught:
        ask()
    assert str(caught.value) == expected
