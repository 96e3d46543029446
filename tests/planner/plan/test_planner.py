"""The planner as a whole: graph, models, cluster and workload in, a plan out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.algorithms.ops.advantages import broadcast_over_tokens, group_advantage
from penstock.algorithms.ppo import PPO, ppo_step
from penstock.algorithms.roles import (
    Policy,
    Prompts,
    ReferencePolicyBatch,
    Reward,
    Sampling,
    TrainMetrics,
)
from penstock.dataflow import build
from penstock.dataflow.errors import PlanError
from penstock.dataflow.kinds import NodeKind
from penstock.planner.cost.calibration import GPU_DEFAULTS
from penstock.planner.cost.engine_model import RoleEngines
from penstock.planner.cost.memory import weight_bytes
from penstock.planner.inputs.calls import Lengths, Workload, calls_of
from penstock.planner.inputs.cluster import ClusterSpec, Mesh
from penstock.planner.inputs.layout import Layout
from penstock.planner.inputs.model_shape import ModelShape
from penstock.planner.plan.plan import Plan
from penstock.planner.plan.planner import place_ops, plan_step, runner_up
from penstock.planner.plan.simulate import simulate, simulate_plan
from penstock.planner.search.option_table import ModelTable, call_nodes
from penstock.planner.search.options import Assignment, GroupAssignment, Option
from penstock.planner.search.pins import Pins
from penstock.workers.engines.engine import EngineKind
from penstock.workers.engines.fsdp_engine.declaration import FSDP
from penstock.workers.engines.torch_engine.declaration import TORCH
from penstock.workers.engines.vllm_engine.declaration import VLLM

from ..hand_made import CALLS, SPLIT, h100, ppo
from ..search.brute_force import all_plans
from ..search.tables import cluster_of, device
from ..shapes import llama

PPO_GRAPH = build(ppo_step, cfg=PPO(epochs=1, num_minibatches=4))
WORKLOAD = Workload(num_prompts=256, prompt=Lengths.constant(512), response=Lengths.constant(512))


def models(actor: int, critic: int) -> dict[str, ModelShape | None]:
    one, other = llama(actor), llama(critic)
    return {"actor": one, "ref": one, "critic": other, "reward": other}


def plan(cluster: ClusterSpec, actor: int = 1, critic: int = 1, **more: Any) -> Plan:
    options: dict[str, Any] = {"max_lag": 0, "constants": GPU_DEFAULTS, **more}
    return plan_step(PPO_GRAPH, models(actor, critic), cluster, WORKLOAD, **options)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    nodes=st.sampled_from([1, 2]),
    per_node=st.sampled_from([2, 4]),
    lag=st.sampled_from([0, 1]),
    critic=st.sampled_from([1, 7]),
)
def test_the_scheduler_takes_as_long_as_the_planner_says(
    nodes: int, per_node: int, lag: int, critic: int
) -> None:
    made = plan(h100(nodes, per_node), 1, critic, max_lag=lag)
    assert made.prediction is not None
    played = simulate_plan(PPO_GRAPH, made)
    assert played.step_time_s == pytest.approx(made.prediction.step_time_s, rel=1e-9)
    assert made.prediction.gap < 1e-9
    placement = made.placement(PPO_GRAPH)
    assert {group.num_ranks for group in placement.groups} <= set(range(1, nodes * per_node + 1))
    assert sorted(d for group in made.groups for d in group.devices) == list(
        range(nodes * per_node)
    )


def test_every_device_holds_what_the_plan_says_it_must() -> None:
    made = plan(h100(2), 7, 7)
    assert made.prediction is not None
    for memory in made.prediction.memory.values():
        assert 0 < memory.peak_bytes <= memory.capacity_bytes
    assert made.prediction.memory.keys() == {group.name for group in made.groups}
    assert made.prediction.nodes.keys() == made.layouts.keys()
    for node in made.prediction.nodes.values():
        assert sum(node.parts_s.values()) == pytest.approx(node.duration_s)


@pytest.mark.slow
def test_a_lag_is_chosen_by_time() -> None:
    made = plan(h100(2), 7, 7, max_lag=(0, 1))
    assert made.prediction is not None
    other = made.prediction.other_schedules[0]
    assert {other.max_lag, made.max_lag} == {0, 1}
    assert other.step_time_s is not None
    assert made.prediction.step_time_s <= other.step_time_s


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("model", [1, 7])
def test_groups_keep_to_nodes_with_a_network_of_their_own(lag: int, model: int) -> None:
    """Two islands of two nodes; over what is between the islands weights take long."""
    cluster = h100(2, 2)
    (node,) = cluster.node_groups
    devices = [node.device.model_copy(update={"name": f"h100-{name}"}) for name in "ab"]
    islands = tuple(
        node.model_copy(update={"device": device, "between": cluster.between}) for device in devices
    )
    slow = cluster.between.model_copy(update={"bytes_per_s": 1e8})
    apart = ClusterSpec(name="islands", node_groups=islands, between=slow)
    graph = build(grpo_step, cfg=GRPO(sampling=Sampling(num_samples=8)))
    shapes: dict[str, ModelShape | None] = {"actor": llama(model), "reward": None}
    made, near = (
        plan_step(graph, shapes, on, WORKLOAD, max_lag=lag, constants=GPU_DEFAULTS)
        for on in (apart, apart.model_copy(update={"between": cluster.between}))
    )
    assert made.prediction is not None
    assert near.prediction is not None
    assert near.prediction.step_time_s <= made.prediction.step_time_s
    calls = calls_of(graph, WORKLOAD, shapes)
    best, *_ = all_plans(
        call_nodes(calls), Lagged(ModelTable(calls, GPU_DEFAULTS), lag), apart, lag
    )
    assert made.prediction.step_time_s == pytest.approx(best.step_time_s, rel=1e-9)


@dataclass(frozen=True)
class Lagged:
    """The options of a table under a lag."""

    table: ModelTable
    lag: int

    def options(
        self, call_group: str, mesh: Mesh, *, beside: tuple[str, ...] = (), lagged: bool = False
    ) -> Sequence[Option]:
        return self.table.options(call_group, mesh, beside=beside, lagged=self.lag > 0)


def test_pins_are_kept() -> None:
    pins = Pins(
        together=(("actor", "ref"),),
        apart=(("actor", "critic"),),
        num_devices={"critic": 4},
        layouts={"actor.train": {"tp": 2, "zero": 1}},
    )
    made = plan(h100(1), 1, 1, pins=pins)
    assert made.nodes["actor.train"] == made.nodes["ref.logprob"] != made.nodes["critic.train"]
    assert len(made.group(made.nodes["critic.train"]).devices) == 4
    assert (made.layouts["actor.train"].tp, made.layouts["actor.train"].zero) == (2, 1)


def test_samples_and_updates_come_from_the_graph() -> None:
    cfg = GRPO(sampling=Sampling(num_samples=8), epochs=2, num_minibatches=3)
    calls = calls_of(build(grpo_step, cfg=cfg), WORKLOAD, {"actor": llama(1), "reward": None})
    assert [call.name for call in calls] == ["actor.generate", "actor.train"]
    assert [call.num_sequences for call in calls] == [2048, 2048]
    assert (calls[1].passes, calls[1].updates, calls[1].after) == (2, 6, ("actor.generate",))
    assert [call.call_group for call in calls] == ["actor.generate", "actor"]


def test_the_torch_engine_is_data_parallel_only() -> None:
    made = plan(h100(1, 4), engines=RoleEngines(TORCH.planned), max_lag=1)
    for layout in made.layouts.values():
        assert (layout.tp, layout.pp, layout.zero) == (1, 1, 0)


@pytest.mark.slow
def test_what_fits_nowhere_is_refused_with_the_ledger_and_a_way_out() -> None:
    with pytest.raises(PlanError) as refused:
        plan(h100(1), 70, 70)
    lines = str(refused.value).splitlines()
    assert lines[0] == (
        "'actor' fits nowhere on cluster 'h100'. At best: 'actor' alone on 8 x h100: 145 GiB per "
        "device are needed, 71.7 GiB are there, 73.0 GiB are lacking"
    )
    assert lines[1].startswith("group 'all' does not fit: during 'actor.generate' each of its 8")
    assert "always: critic" in str(refused.value)
    assert lines[-1].startswith("the cheapest change that makes it fit: cluster.num_nodes=")
    nodes = int(lines[-1].split("=")[1].split()[0])
    assert plan(h100(nodes), 70, 70, max_lag=0, deadline_s=5.0).prediction is not None


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        ({"actor.train": {"tp": 3}},
         "pin layouts.actor.train: tp=3 does not divide 32 heads (model 'llama-1b')"),
        ({"actor.train": {"tp": 16}},
         "pin layouts.actor.train: tp=16 is more than the 8 devices of a node; set "
         "plan.tp_across_nodes=true to allow it (model 'llama-1b')"),
        ({"actor.trian": {"tp": 2}},
         "pin layouts names call 'actor.trian'; the step's calls are actor.generate, "
         "reward.score, critic.value, ref.logprob, actor.train, critic.train"),
    ],
)  # fmt: skip
def test_illegal_pins_are_refused(layouts: dict[str, dict[str, int]], message: str) -> None:
    with pytest.raises(PlanError) as refused:
        plan(h100(2), pins=Pins(layouts=layouts))
    assert str(refused.value) == message


def test_a_pin_that_the_engine_does_not_run_is_refused() -> None:
    pins = Pins(layouts={"actor.train": {"tp": 2}})
    with pytest.raises(PlanError) as refused:
        plan(h100(1), engines=RoleEngines(TORCH.planned), pins=pins)
    assert str(refused.value) == (
        "pin layouts.actor.train is tp2, but the torch engine runs data-parallel only"
    )


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(PlanError, match="has no role 'judge'; its roles are actor, critic"):
        calls_of(PPO_GRAPH, WORKLOAD, {**models(1, 1), "judge": llama(1)})


@pytest.mark.parametrize(
    ("call_group", "beside"),
    [
        ("actor", ("actor.generate",)),
        ("actor.generate", ()),
        ("critic", ("critic.value",)),
        ("critic.value", ()),
        ("ref", ()),
    ],
)
def test_an_option_can_be_explained(call_group: str, beside: tuple[str, ...]) -> None:
    calls = calls_of(PPO_GRAPH, WORKLOAD, models(7, 7))
    table = ModelTable(calls, GPU_DEFAULTS)
    mesh = Mesh(h100(1), (8,))
    options = table.options(call_group, mesh, beside=beside)
    assert len(options) > 2
    for option in options:
        held, plans = table.explain(call_group, mesh, option, beside=beside)
        assert sum(parts.total for parts in held.values()) == option.resident_bytes
        assert {name: p.duration_s for name, p in plans.items()} == option.durations_s
        assert option.least_bytes <= mesh.memory_bytes
        for layout in option.layouts.values():
            assert isinstance(layout, Layout)
            assert layout.num_devices == 8


@pytest.mark.parametrize(("rollout", "divides"), [(TORCH, True), (VLLM, False)])
def test_a_call_that_converses_is_divided_where_its_engine_can(
    rollout: EngineKind, divides: bool
) -> None:
    calls = calls_of(PPO_GRAPH, WORKLOAD, models(7, 7))
    talks = [replace(call, converses=call.kind == "generate") for call in calls]
    engines = RoleEngines(FSDP.planned, rollout.planned)
    table, mesh = ModelTable(talks, GPU_DEFAULTS, engines=engines), Mesh(h100(1), (8,))
    found = table.options("actor", mesh, beside=("actor.generate",))
    assert any(option.layouts["actor.generate"].tp > 1 for option in found) == divides


@pytest.mark.parametrize("keeps_sent", [False, True])
def test_what_trains_keeps_two_versions_of_what_it_sends_in_its_memory(keeps_sent: bool) -> None:
    calls = calls_of(PPO_GRAPH, WORKLOAD, models(7, 7))
    engines = RoleEngines(TORCH.planned, VLLM.planned, keeps_sent=keeps_sent)
    table, mesh = ModelTable(calls, GPU_DEFAULTS, engines=engines), Mesh(h100(1), (8,))
    for beside in ((), ("actor.generate",)):
        for option in table.options("actor", mesh, beside=beside):
            held, _ = table.explain("actor", mesh, option, beside=beside)
            assert sum(parts.total for parts in held.values()) == option.resident_bytes
            layout, sent = option.layouts["actor.train"], llama(7).sent_bytes()
            kept = 2 * -(-sent // (layout.tp * layout.pp)) if keeps_sent and beside else 0
            assert sum(parts.transfer for parts in held.values()) == kept


def test_a_model_that_waits_in_host_memory_is_loaded_before_each_call() -> None:
    calls = calls_of(PPO_GRAPH, WORKLOAD, models(7, 7))
    table = ModelTable(calls, GPU_DEFAULTS)
    mesh = Mesh(h100(1), (8,))
    loads_s: dict[tuple[bool, int, int], float] = {}
    for option in table.options("ref", mesh):
        _, plans = table.explain("ref", mesh, option)
        layout = plans["ref.logprob"].layout
        loads_s[layout.offload, layout.tp, layout.pp] = plans["ref.logprob"].move_s
    assert {offload for offload, _, _ in loads_s} == {False, True}
    for (offload, tp, pp), seconds in loads_s.items():
        held = weight_bytes(llama(7), "vocabulary", Layout(tp=tp, pp=pp))
        assert seconds == (held / mesh.host_bytes_per_s if offload else 0.0)


GRAPH = ppo()
NODES = {node.name for node in GRAPH.nodes if node.kind is not NodeKind.SOURCE}


def test_with_one_group_there_is_nothing_to_choose() -> None:
    placed = place_ops(GRAPH, dict.fromkeys(CALLS, "all"), CALLS)
    assert placed == dict.fromkeys(NODES, "all")


def test_every_node_gets_a_group_and_calls_keep_theirs() -> None:
    placed = place_ops(GRAPH, SPLIT, CALLS)
    assert placed.keys() == NODES
    assert {name: placed[name] for name in SPLIT} == SPLIT


def test_no_op_waits_behind_a_generation_of_the_next_step() -> None:
    calls = {**dict.fromkeys(CALLS, "all"), "actor.generate": "rollout"}
    placed = place_ops(GRAPH, calls, CALLS, max_lag=1)
    assert simulate(GRAPH, placed, CALLS, max_lag=1).step_time_s == 34.0


def test_a_reached_target_ends_the_search() -> None:
    assert place_ops(GRAPH, SPLIT, CALLS, target_s=30.0) == place_ops(GRAPH, SPLIT, CALLS)


@pytest.mark.slow
@settings(max_examples=12)
@given(
    groups=st.lists(st.sampled_from("abc"), min_size=6, max_size=6),
    seconds=st.lists(st.integers(1, 40), min_size=6, max_size=6),
    max_lag=st.integers(0, 1),
)
def test_no_rule_alone_is_better(groups: list[str], seconds: list[int], max_lag: int) -> None:
    calls = dict(zip(CALLS, groups, strict=True))
    durations_s = dict(zip(CALLS, map(float, seconds), strict=True))
    placed = place_ops(GRAPH, calls, durations_s, max_lag=max_lag)
    found_s = simulate(GRAPH, placed, durations_s, max_lag=max_lag).step_time_s
    for group in dict.fromkeys(groups):
        nodes = {**dict.fromkeys(NODES, group), **calls}
        one_s = simulate(GRAPH, nodes, durations_s, max_lag=max_lag).step_time_s
        assert found_s <= one_s * (1 + 1e-9)


def test_an_unknown_call_is_refused() -> None:
    with pytest.raises(PlanError, match="'judge.score' is placed, but graph 'ppo' has no such"):
        place_ops(GRAPH, {"judge.score": "a"}, {})


def test_no_call_at_all_is_refused() -> None:
    with pytest.raises(PlanError, match="no node of graph 'ppo' is placed"):
        place_ops(GRAPH, {}, {})


# --- why the second best plan lost, in step times that agree with those beside it

CLUSTER = cluster_of((1, 4, device("cpu", 10**9)))


def assignment(step_time_s: float, **busy_s: float) -> Assignment:
    """Two devices for each call group, which is that busy."""
    groups = tuple(
        GroupAssignment(
            (call_group,),
            Mesh(CLUSTER, (2,)),
            (2 * i, 2 * i + 1),
            {call_group: Option({f"{call_group}.call": seconds}, 0, {f"{call_group}.call": 0}, {})},
        )
        for i, (call_group, seconds) in enumerate(busy_s.items())
    )
    return Assignment(groups, 0, step_time_s)


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (assignment(12.0, actor=11.5, ref=3.0),
         "its group of actor on 2 devices is busy 11.5 s of each step, longer than the 10.0 s of "
         "a whole step of the best plan"),
        (assignment(12.0, actor=9.5, ref=3.0),
         "its busiest group, actor on 2 devices, works 9.50 s of each step and waits the rest "
         "for other groups"),
        (assignment(10.02, actor=10.02, ref=3.0),
         "only 20.0 ms slower: its group of actor on 2 devices is busy 10.0 s of each step, "
         "longer than a whole step of the best plan takes"),
        (assignment(10.02, actor=9.5, ref=3.0),
         "only 20.0 ms slower: its busiest group, actor on 2 devices, works 9.50 s of each step "
         "and waits the rest for other groups"),
        (assignment(10.0, actor=10.0, ref=3.0),
         "as fast as the best plan; of plans that take the same time the first one found wins"),
    ],
)  # fmt: skip
def test_the_reason_compares_with_the_step_that_is_shown(second: Assignment, why: str) -> None:
    lost = runner_up(second, assignment(10.0, actor=8.0, ref=2.0))
    assert lost is not None
    assert lost.description == "actor on 2; ref on 2"
    assert lost.step_time_s == second.step_time_s
    assert lost.why == why


def test_no_other_plan() -> None:
    assert runner_up(None, assignment(10.0, actor=8.0)) is None


# --- a role that follows another


@dataclass(frozen=True, kw_only=True)
class Average:
    """Options of the step."""

    sampling: Sampling = Sampling(num_samples=8, max_new_tokens=8)
    loss: ClippedPolicyLoss = ClippedPolicyLoss()


def average_step(
    prompts: Prompts, ref: Policy, actor: Policy, reward: Reward, cfg: Average
) -> tuple[TrainMetrics, TrainMetrics]:
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    batch = ReferencePolicyBatch(
        tokens=roll.tokens,
        mask=roll.mask,
        behavior_logprob=roll.behavior_logprob,
        advantage=broadcast_over_tokens(group_advantage(score, roll.prompt_id), roll.mask),
        ref_logprob=ref.logprob(roll.tokens, roll.mask),
    )
    return actor.train(cfg.loss, batch), ref.follow(actor, share=0.1)


FOLLOWING = build(average_step, cfg=Average())
FOLLOWED = {"actor": llama(1), "ref": llama(1), "reward": None}


def test_it_is_one_call_group_with_what_it_follows_and_its_moves_cost_nothing() -> None:
    calls = {call.name: call for call in calls_of(FOLLOWING, WORKLOAD, FOLLOWED)}
    assert list(calls) == ["actor.generate", "ref.logprob", "actor.train"]
    assert [call.call_group for call in calls.values()] == ["actor.generate", "actor", "actor"]
    assert [call.leader for call in calls.values()] == ["", "actor", ""]
    assert not calls["ref.logprob"].trained


def test_without_a_model_to_follow_it_is_a_call_group_of_its_own() -> None:
    calls = calls_of(FOLLOWING, WORKLOAD, {**FOLLOWED, "actor": None})
    assert [(call.name, call.call_group) for call in calls] == [("ref.logprob", "ref")]


def test_a_leader_with_another_model_is_refused() -> None:
    with pytest.raises(PlanError) as refused:
        calls_of(FOLLOWING, WORKLOAD, {**FOLLOWED, "actor": llama(7)})
    assert str(refused.value) == (
        "'ref.follow': 'ref' follows 'actor' with another model, whose weights it cannot take; "
        "give both the same one"
    )


@pytest.mark.parametrize("apart", [False, True])
def test_a_plan_holds_both_in_one_layout(apart: bool) -> None:
    pins = Pins(apart=(("actor.generate", "actor"),) if apart else ())
    plan = planned(FOLLOWED, pins)
    home = plan.nodes["actor.train"]
    assert plan.nodes["ref.logprob"] == plan.nodes["ref.follow"] == home
    shared = [
        plan.layouts[name].model_dump(exclude={"micro_batch"})
        for name in ("ref.logprob", "actor.train")
    ]
    assert shared[0] == shared[1]


def test_its_weights_count_beside_those_it_follows() -> None:
    layout = {"tp": 2, "pp": 1, "dp": 4, "zero": 1, "checkpointing": False}
    pins = Pins(layouts={"actor.train": layout})
    alone, both = (
        held_bytes(planned(models, pins)) for models in ({**FOLLOWED, "ref": None}, FOLLOWED)
    )
    assert alone["actor"]["weights"] > 0
    assert both == {**alone, "ref": {"weights": alone["actor"]["weights"]}}


def planned(models: Mapping[str, ModelShape | None], pins: Pins) -> Plan:
    return plan_step(
        FOLLOWING, models, h100(1), WORKLOAD, max_lag=0, constants=GPU_DEFAULTS, pins=pins
    )


def held_bytes(plan: Plan) -> Mapping[str, Mapping[str, int]]:
    """What is always held on a device, and for whom."""
    assert plan.prediction is not None
    (memory,) = plan.prediction.memory.values()
    return memory.resident_bytes


def test_a_train_call_without_a_time_runs_where_its_role_is_asked() -> None:
    calls = {"actor.generate": "rollout", "ref.logprob": "train", "actor.train": "train"}
    for home in ("train", "rollout"):
        placed = place_ops(FOLLOWING, {**calls, "ref.logprob": home}, dict.fromkeys(calls, 1.0))
        assert placed["ref.follow"] == home
