"""Plans as data: what they hold, what they refuse, and that they come back from JSON unchanged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from penstock.algorithms.env_ppo import EnvPPO, env_ppo_step
from penstock.dataflow.errors import PlanError
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime.placement import flow_of
from penstock.planner.inputs.layout import Layout
from penstock.planner.plan.plan import GroupMemory, GroupPlan, Plan, Prediction, one_group_plan

from ..hand_made import GB, h100, memory_a, ppo, prediction, split_plan


def test_a_plan_comes_back_from_its_file_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(split_plan().model_dump_json(indent=2))
    assert Plan.read(file) == split_plan()


def test_a_plan_written_by_hand_needs_neither_devices_nor_a_prediction() -> None:
    plan = Plan(groups=(GroupPlan(name="train"), GroupPlan(name="rollout")),
                nodes={"actor.generate": "rollout"}, default_group="train")  # fmt: skip
    placement = plan.placement(ppo())
    assert placement.nodes["actor.generate"] == "rollout"
    assert placement.nodes["actor.train"] == "train"
    assert plan.memory_bytes_per_device == {}


def test_a_group_has_a_rank_per_device() -> None:
    plan = split_plan()
    assert [group.num_ranks for group in plan.groups] == [8, 8]
    assert flow_of(ppo(), plan.placement(ppo())).groups == {"a": 8, "b": 8}
    assert plan.num_devices == 16


@pytest.mark.parametrize(
    ("layouts", "said"),
    [
        (
            {"actor.train": Layout(tp=2, dp=3)},
            "node 'actor.train' has layout tp2 dp3, which uses 6 of the 8 devices of group 'a'; "
            "tp x pp x dp x cp must be 8",
        ),
        ({"gae": Layout()}, "has a layout for 'gae', which is no call of graph 'ppo'"),
    ],
    ids=["unused devices", "no call"],
)
def test_a_layout_that_does_not_fit_is_refused(layouts: dict[str, Layout], said: str) -> None:
    with pytest.raises(PlanError, match=re.escape(said)):
        split_plan().model_copy(update={"layouts": layouts}).placement(ppo())


def test_options_of_a_role_that_is_not_there_are_refused() -> None:
    plan = split_plan().model_copy(update={"role_options": {"env": {"num_overlapped": 2}}})
    said = (
        "the plan has role_options for 'env', which is no role of graph 'ppo'\n    give one of "
        "actor, critic, "
    )
    with pytest.raises(PlanError, match=re.escape(said)):
        plan.placement(ppo())


def test_groups_may_share_devices() -> None:
    groups = (GroupPlan(name="a", devices=(0, 1)), GroupPlan(name="b", devices=(1, 2)))
    plan = Plan(groups=groups, nodes={"actor.generate": "b"})
    assert plan.num_devices == 3
    assert [group.devices for group in plan.placement(ppo()).groups] == [(0, 1), (1, 2)]


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (
            [{"name": "a", "num_ranks": 2, "devices": (0, 1, 2)}],
            "group 'a' has 2 ranks on 3 devices; a rank has one device: leave num_ranks out",
        ),
        ([{"name": "a", "devices": (0, 0)}], "device 0 is in group 'a' twice over"),
        ([{"name": "a"}, {"name": "a"}], "two groups of the plan are named 'a'"),
        ([{"name": "a", "devices": (16,)}], "cluster 'h100' has no device 16; its 16 devices"),
    ],
    ids=["ranks", "twice", "names", "unknown device"],
)
def test_groups_that_cannot_be_are_refused(groups: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(PlanError, match=re.escape(said)):
        Plan(groups=tuple(GroupPlan(**group) for group in groups), cluster=h100())


def test_a_file_that_is_no_plan_is_refused_with_its_key(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    with pytest.raises(PlanError, match="plan.json does not exist"):
        Plan.read(file)
    file.write_text('{"groups": [{"name": "a", "num_ranks": 0}]}')
    with pytest.raises(PlanError, match=r"groups\.0\.num_ranks: .* \(got 0\)"):
        Plan.read(file)
    file.write_text('{"groups": [{"name": "a"}], "layouts": {"x.train": {"tp": -2}}}')
    with pytest.raises(PlanError, match=r"layouts\.x\.train\.tp: .* \(got -2\)"):
        Plan.read(file)


def test_a_ledger_peaks_in_its_hungriest_call() -> None:
    ledger = memory_a()
    assert ledger.resident_total_bytes == 41 * GB
    assert ledger.peak_call == "actor.train"
    assert ledger.peak_bytes == 66 * GB


def test_a_ledger_without_transient_memory_peaks_at_rest() -> None:
    ledger = GroupMemory(resident_bytes={"a": {"weights": 3}}, transient_bytes={"a.x": {}},
                         capacity_bytes=4)  # fmt: skip
    assert (ledger.peak_call, ledger.peak_bytes) == (None, 3)


def test_memory_is_known_for_every_device() -> None:
    bytes_of = split_plan().memory_bytes_per_device
    assert list(bytes_of) == list(range(16))
    assert (bytes_of[0], bytes_of[15]) == (66 * GB, 57 * GB)


def test_the_gap_is_the_share_of_the_time_that_might_be_saved() -> None:
    assert prediction().gap == pytest.approx(0.02)
    exact = Prediction(step_time_s=2.0, lower_bound_s=2.0, nodes={})
    assert exact.gap == 0.0


def test_everything_on_one_group() -> None:
    assert set(one_group_plan(2).placement(ppo()).nodes.values()) == {"all"}


SERVED = Plan(
    groups=(
        GroupPlan(name="main"),
        GroupPlan(name="acting", num_ranks=2, served={"actor": "policy"}),
        GroupPlan(name="policy"),
    ),
    nodes={"env": "acting"},
)


def test_a_plan_says_which_group_serves_which() -> None:
    graph = build(env_ppo_step, cfg=EnvPPO())
    placement = SERVED.placement(graph)
    assert placement.serving(graph) == (("actor", "policy"),)
    assert placement.hosted_roles(graph, "policy") == ("actor",)
    assert placement.hosted_roles(graph, "acting") == ("env",)
    assert Plan.model_validate_json(SERVED.model_dump_json()) == SERVED


def test_a_role_that_nobody_is_given_cannot_be_served() -> None:
    acting = GroupPlan(name="acting", served={"actor": "policy", "critic": "policy"})
    groups = (SERVED.groups[0], acting, SERVED.groups[2])
    with pytest.raises(PlanError) as caught:
        SERVED.model_copy(update={"groups": groups}).placement(build(env_ppo_step, cfg=EnvPPO()))
    assert str(caught.value) == (
        "group 'acting' is served 'critic', which no node there is given; they are given actor"
    )
