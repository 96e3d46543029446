"""Placements: what a group must host, what the scheduler is told, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.algorithms.losses import CrossEntropyLoss
from penstock.algorithms.ppo import PPO, ppo_step
from penstock.algorithms.roles import Demonstrations, Policy
from penstock.dataflow.errors import PlanError
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.kinds import WeightRead
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.host import Host
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.messages import NodeCall, work
from penstock.dataflow.runtime.placement import (
    DeviceGroup,
    DeviceSharing,
    HandOff,
    Placement,
    flow_of,
    follow,
    one_group,
    sharing,
)
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.dataflow.scheduler.describe import describe
from penstock.dataflow.scheduler.events import NodeTask, Publish, Task
from penstock.dataflow.scheduler.schedule import Flow, Schedule
from penstock.dataflow.scheduler.scheduler import Scheduler
from penstock.dataflow.scheduler.simulate import Span, dry_run

from ..counter import COUNT, SOURCES, Counter, Key, Score, apart, seen
from ..scheduler.invariants import validate

GRAPH = build(grpo_step, cfg=GRPO())
NODES = {
    "actor.generate": "sampling",
    "reward.score": "sampling",
    "group_advantage": "sampling",
    "broadcast_over_tokens": "sampling",
    "actor.train": "training",
}
GROUPS = (DeviceGroup("sampling", 3), DeviceGroup("training", 2, "cuda"))


def split(nodes: Mapping[str, str] = NODES, num_chunks: int = 4) -> Placement:
    return Placement(GROUPS, nodes, num_chunks)


def test_one_group_holds_everything_with_a_chunk_for_each_rank() -> None:
    placement = one_group(GRAPH, num_ranks=3, device="cuda")
    assert placement.groups == (DeviceGroup("all", 3, "cuda"),)
    assert set(placement.nodes) == {node.name for node in GRAPH.nodes} - {"prompts"}
    assert placement.num_chunks == 3
    assert placement.hosted_roles(GRAPH, "all") == ("actor", "reward")
    assert placement.home(GRAPH, "actor") == "all"


def test_a_group_hosts_the_roles_its_nodes_read() -> None:
    assert split().hosted_roles(GRAPH, "sampling") == ("actor", "reward")
    assert split().hosted_roles(GRAPH, "training") == ("actor",)
    assert split().group("training").num_ranks == 2


def test_a_trained_role_s_home_is_where_it_trains_and_a_frozen_one_has_none() -> None:
    assert split().home(GRAPH, "actor") == "training"
    assert split().home(GRAPH, "reward") is None


def test_the_scheduler_is_told_groups_reads_and_chunks_and_nothing_of_frozen_roles() -> None:
    flow = flow_of(GRAPH, split())
    assert flow.groups == {"sampling": 3, "training": 2}
    assert flow.homes == {"actor": "training"}
    assert flow.trains_per_step == {"actor": 1}
    assert flow.num_chunks == 4
    shown = [(n.name, n.kind, n.chunked, n.group, n.inputs, n.reads, n.trains) for n in flow.nodes]
    generate, advantage = "actor.generate", "group_advantage"
    assert shown == [
        ("prompts", "source", True, "", (), (), None),
        (
            generate,
            "rollout",
            True,
            "sampling",
            ("prompts",),
            (WeightRead("actor", 0, True),),
            None,
        ),
        ("reward.score", "forward", True, "sampling", (generate,), (), None),
        (advantage, "op", True, "sampling", ("reward.score", generate), (), None),
        ("broadcast_over_tokens", "op", True, "sampling", (advantage, generate), (), None),
        (
            "actor.train",
            "train",
            False,
            "training",
            (generate, "broadcast_over_tokens"),
            (WeightRead("actor", 0),),
            "actor",
        ),
    ]


def test_a_batch_op_is_not_chunked() -> None:
    graph = build(ppo_step, cfg=PPO())
    flow = flow_of(graph, one_group(graph))
    assert [node.name for node in flow.nodes if not node.chunked] == [
        "whiten",
        "actor.train",
        "critic.train",
    ]


def test_a_second_graph_follows_the_first_one_s_roles() -> None:
    def imitate(demos: Demonstrations, actor: Policy, extra: Policy) -> object:
        batch = Demonstrations(tokens=demos.tokens, mask=demos.mask)
        logprob = extra.logprob(demos.tokens, demos.mask)
        return actor.train(CrossEntropyLoss(), batch), logprob

    graph = build(imitate)
    placement = follow(graph, GRAPH, split())
    assert placement.nodes == {"actor.train": "training", "extra.logprob": "sampling"}
    assert (placement.groups, placement.num_chunks) == (GROUPS, 4)
    flow_of(graph, placement)


def without(name: str) -> dict[str, str]:
    return {node: group for node, group in NODES.items() if node != name}


@pytest.mark.parametrize(
    ("nodes", "num_chunks", "message"),
    [
        (
            {**NODES, "actor.trian": "training"},
            4,
            "the placement names node 'actor.trian', which graph 'grpo_step' does not have; did "
            "you mean 'actor.train'?",
        ),
        (
            without("reward.score"),
            4,
            "node 'reward.score' has no group; add it to the placement's nodes",
        ),
        (
            {**NODES, "reward.score": "smapling"},
            4,
            "node 'reward.score' is placed on group 'smapling', which is not declared; did you "
            "mean 'sampling'?",
        ),
        (
            NODES,
            2,
            "num_chunks is 2 but the largest group has 3 ranks, so some would have no rows; use "
            "at least 3",
        ),
    ],
    ids=["unknown node", "missing node", "unknown group", "too few chunks"],
)
def test_a_placement_that_does_not_fit_is_refused(
    nodes: Mapping[str, str], num_chunks: int, message: str
) -> None:
    with pytest.raises(PlanError) as caught:
        flow_of(GRAPH, split(nodes, num_chunks))
    assert str(caught.value) == message


def test_a_role_trains_in_one_place() -> None:
    def twice(demos: Demonstrations, actor: Policy) -> object:
        batch = Demonstrations(tokens=demos.tokens, mask=demos.mask)
        return actor.train(CrossEntropyLoss(), batch), actor.train(CrossEntropyLoss(), batch)

    placement = split({"actor.train": "training", "actor.train#2": "sampling"})
    with pytest.raises(PlanError) as caught:
        flow_of(build(twice), placement)
    assert str(caught.value) == (
        "role 'actor' trains on groups ['sampling', 'training']; its weights have one home: put "
        "all its train nodes on one group"
    )


SPLIT = apart(COUNT, model__sample="rollout")
SHARED = replace(
    SPLIT, groups=tuple(replace(group, devices=(0,)) for group in SPLIT.groups)
)  # "main" and "rollout" on the same device


def test_groups_share_what_both_name() -> None:
    a, b = DeviceGroup("a", 2, devices=(0, 1)), DeviceGroup("b", 2, devices=(1, 2))
    c, d, e = DeviceGroup("c", devices=(3,)), DeviceGroup("d"), DeviceGroup("e")
    assert sharing((a, b, c, d, e)) == {"a": frozenset("b"), "b": frozenset("a")}


@pytest.mark.parametrize("devices", [(0,), (0, 0), (0, 1, 2)])
def test_every_process_has_one_device(devices: tuple[int, ...]) -> None:
    with pytest.raises(PlanError) as caught:
        DeviceGroup("a", 2, devices=devices)
    assert str(caught.value) == (
        f"group 'a' has 2 processes on devices {list(devices)}; every process needs a device of "
        "its own in the group"
    )


def test_fewer_ranks_keep_their_devices() -> None:
    whole = DeviceGroup("a", 2, "cpu", 2, 2, devices=tuple(range(8)))
    assert whole.with_ranks(1).devices == (0, 1, 4, 5)
    assert DeviceGroup("a", 2).with_ranks(1) == DeviceGroup("a")


def test_a_turn_puts_those_with_the_devices_to_sleep() -> None:
    groups = [DeviceGroup("a", 2, devices=(0, 1)), DeviceGroup("b", devices=(0,))]
    sharing = DeviceSharing([*groups, DeviceGroup("c", devices=(1,)), DeviceGroup("d")])
    assert sharing.hand_off("d") == HandOff()
    assert sharing.hand_off("b") == HandOff((), "b")
    assert sharing.hand_off("c") == HandOff((), "c")
    assert sharing.hand_off("c") == HandOff()
    assert sharing.hand_off("a") == HandOff(("b", "c"), "a")
    assert sharing.hand_off("b") == HandOff(("a",), "b")
    assert (sharing.others("a"), sharing.others("d")) == ({"b", "c"}, frozenset())


# --- what the scheduler does


def simulated(flow: Flow, max_lag: int) -> tuple[Scheduler, list[Span]]:
    scheduler = Scheduler(flow, Schedule(max_lag=max_lag), 4)
    spans = dry_run(scheduler, lambda work: 1.0, after_event=lambda s, _: validate(s)).spans
    return scheduler, spans


def group_of(task: Task) -> str:
    if isinstance(task, NodeTask):
        return "rollout" if task.node == "model.sample" else "main"
    return "main" if isinstance(task, Publish) else task.group


@pytest.mark.parametrize(("max_lag", "changes"), [(0, 7), (1, 3)])
def test_one_group_works_at_a_time_and_goes_on_while_it_can(max_lag: int, changes: int) -> None:
    """In 4 steps: sample, train, sample, train, ...; or, one step off, two of each in a turn."""
    placement = replace(SHARED, num_chunks=3)
    shared, spans = simulated(flow_of(COUNT, placement), max_lag)
    ordered = sorted(spans, key=lambda span: span.start_s)
    for one, other in pairwise(ordered):
        assert other.start_s >= one.end_s
    turns = [group_of(span.task) for span in ordered]
    assert sum(a != b for a, b in pairwise(turns)) == changes

    apart_too, _ = simulated(flow_of(COUNT, replace(SPLIT, num_chunks=3)), max_lag)
    assert shared.schedule_sha256() == apart_too.schedule_sha256()


def test_a_task_that_waits_for_its_devices_says_so() -> None:
    flow = flow_of(COUNT, SHARED)
    look = replace(flow.nodes[1], name="look", group="main", reads=())
    flow = replace(flow, nodes=(*flow.nodes, look))
    scheduler = Scheduler(flow, Schedule(), 1)
    seen_texts: list[str] = []
    dry_run(scheduler, lambda work: 1.0, after_event=lambda s, _: seen_texts.append(describe(s)))
    waits = "ready and waiting for its devices, on which another group works"
    assert any(waits in text for text in seen_texts)


# --- what an executor does


@dataclass
class Sleepy(Counter):
    """Refuses to work while it sleeps, and tells what it was asked."""

    name: str
    told: list[str] = field(default_factory=list[str])
    offload: bool = False
    awake: bool = True

    def __post_init__(self) -> None:
        super().__init__()

    def sleep(self) -> None:
        self.told.append(f"{self.name} sleeps")
        self.awake = False

    def wake(self) -> None:
        self.told.append(f"{self.name} wakes")
        self.awake = True

    def sample(self, key: Key) -> Score:
        assert self.awake
        self.told.append(f"{self.name} samples")
        return super().sample(key)


@dataclass(frozen=True)
class SleepySpec:
    told: list[str]
    offload: bool = False

    def build(self, context: WorkerContext) -> Sleepy:
        name = "rollout" if context.methods == frozenset({"sample"}) else "main"
        return Sleepy(name, self.told, self.offload)


def run(placement: Placement, told: list[str], *, offload: bool = False) -> list[float]:
    spec = SleepySpec(told, offload)
    engine = Engine(COUNT, placement, workers={"model": spec}, executor=InProcess())
    with engine:
        return seen(list(engine.run(SOURCES, 2)))


def test_groups_on_one_device_sleep_in_turn_and_learn_the_same() -> None:
    told: list[str] = []
    assert run(SHARED, told) == run(SPLIT, []) == [0.0, 1.0]
    assert told == [
        "main sleeps",
        "rollout sleeps",
        "rollout wakes",
        "rollout samples",
        "rollout sleeps",
        "main wakes",  # to train and publish
        "main sleeps",
        "rollout wakes",  # to load and sample
        "rollout samples",
        "rollout sleeps",
        "main wakes",
    ]


def test_who_waits_in_host_memory_is_on_the_device_for_its_own_work_alone() -> None:
    told: list[str] = []
    assert run(SPLIT, told, offload=True) == run(SPLIT, []) == [0.0, 1.0]
    for name in ("main", "rollout"):
        mine = [what.removeprefix(f"{name} ") for what in told if what.startswith(name)]
        states = [what for what in mine if what != "samples"]
        assert states == ["sleeps", *["wakes", "sleeps"] * (len(states) // 2)]
    # A hand-over of the devices leaves it where it waits.
    shared: list[str] = []
    assert run(SHARED, shared, offload=True) == [0.0, 1.0]
    assert shared[-1].endswith("sleeps")


def test_nobody_sleeps_who_has_the_device_alone() -> None:
    told: list[str] = []
    run(SPLIT, told)
    assert told == ["rollout samples", "rollout samples"]


def test_to_say_how_weights_are_held_needs_no_device() -> None:
    assert work(Host.layout, "model").needs == "nothing"
    assert work(Host.call, NodeCall("model.sample", 0, None, {})).needs == "workers"
