"""Events in, instructions out, compared by equality; no workers, no clocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from penstock.dataflow.errors import StateError
from penstock.dataflow.kinds import WeightRead
from penstock.dataflow.scheduler.events import (
    AdmitStep,
    CheckpointSaved,
    DropSnapshot,
    Event,
    Finished,
    Instruction,
    Load,
    NodeTask,
    Output,
    Publish,
    Release,
    RunCall,
    RunTrain,
    SourceReady,
    StepCompleted,
    Task,
    TaskDone,
    Tick,
)
from penstock.dataflow.scheduler.schedule import Flow, FlowNode, Schedule
from penstock.dataflow.scheduler.scheduler import Scheduler
from penstock.dataflow.scheduler.simulate import dry_run

from .invariants import validate


def grpo(rollout: str = "gpu", num_chunks: int = 1, num_ranks: int = 1) -> Flow:
    """prompts -> generate -> score -> advantage -> train; rollouts on the group named."""
    lagged = (WeightRead("actor", 0, lagged=True),)
    return Flow(
        "grpo_step",
        (
            FlowNode("prompts", "source"),
            FlowNode("generate", "rollout", True, rollout, ("prompts",), lagged),
            FlowNode("score", "op", True, rollout, ("generate",)),
            FlowNode("advantage", "op", False, "gpu", ("generate", "score")),
            FlowNode("train", "train", False, "gpu", ("generate", "advantage"), trains="actor"),
        ),
        dict.fromkeys(sorted({"gpu", rollout}), num_ranks),
        {"actor": "gpu"},
        {"actor": 1},
        num_chunks,
    )


class Driver:
    """A scheduler with a counting clock that validates after every event."""

    def __init__(self, flow: Flow, schedule: Schedule, num_steps: int) -> None:
        self.scheduler = Scheduler(flow, schedule, num_steps)
        self.at_s = 0.0

    def start(self) -> list[Instruction]:
        instructions = self.scheduler.start(self.at_s)
        validate(self.scheduler)
        return instructions

    def send(self, event: Event) -> list[Instruction]:
        self.at_s += 1.0
        instructions = self.scheduler.handle(replace(event, at_s=self.at_s))
        validate(self.scheduler)
        return instructions

    def done(self, node: str, step: int, chunk: int | None = None) -> list[Instruction]:
        return self.send(TaskDone(NodeTask(node, step, chunk), 0.0))

    def ready(self, step: int) -> list[Instruction]:
        return self.send(SourceReady(step, 0.0))


def out(node: str, step: int, chunk: int = 0) -> Output:
    return Output(node, step, chunk)


def call(node: str, step: int, chunk: int | None, rank: int = 0, **versions: int) -> RunCall:
    return RunCall(node, step, chunk, rank, tuple(sorted(versions.items())))


def train(step: int, version: int, ranks: tuple[int, ...] = (0,)) -> RunTrain:
    return RunTrain("train", step, ranks, (("actor", version),))


def test_grpo_synchronous_on_one_group() -> None:
    d = Driver(grpo(), Schedule(), 2)
    assert d.start() == [AdmitStep(0)]
    assert d.ready(0) == [call("generate", 0, 0, actor=0)]
    assert d.done("generate", 0, 0) == [Release((out("prompts", 0),)), call("score", 0, 0)]
    assert d.done("score", 0, 0) == [call("advantage", 0, None)]
    assert d.done("advantage", 0) == [Release((out("score", 0),)), train(0, 0)]
    assert d.done("train", 0) == [
        Release((out("generate", 0), out("advantage", 0))),
        StepCompleted(0, ((0, 1),)),
        AdmitStep(1),
    ]
    assert d.ready(1) == [call("generate", 1, 0, actor=1)]
    d.done("generate", 1, 0)
    d.done("score", 1, 0)
    d.done("advantage", 1)
    assert d.done("train", 1) == [
        Release((out("generate", 1), out("advantage", 1))),
        StepCompleted(1, ((0, 1),)),
        Finished(),
    ]
    assert d.scheduler.done


def test_a_home_trains_only_once_its_views_have_been_read() -> None:
    flow = Flow(
        "read_late",
        (
            FlowNode("prompts", "source"),
            FlowNode("slow", "op", False, "cpu", ("prompts",)),
            FlowNode("logprob", "forward", False, "view", ("slow",), (WeightRead("actor"),)),
            FlowNode("train", "train", False, "gpu", ("prompts",), trains="actor"),
        ),
        dict.fromkeys(("cpu", "gpu", "view"), 1),
        {"actor": "gpu"},
        {"actor": 1},
        sharing={"gpu": frozenset({"view"}), "view": frozenset({"gpu"})},
    )
    copied = Driver(flow, Schedule(), 1)
    copied.start()
    assert copied.ready(0) == [call("slow", 0, None), train(0, 0)]
    d = Driver(replace(flow, views=frozenset({"view"})), Schedule(), 1)
    d.start()
    assert d.ready(0) == [call("slow", 0, None)]
    assert call("logprob", 0, None, actor=0) in d.done("slow", 0)
    assert train(0, 0) in d.done("logprob", 0)


def test_one_step_ahead_on_one_group_generates_before_it_trains() -> None:
    d = Driver(grpo(), Schedule(max_lag=1), 3)
    assert d.start() == [AdmitStep(0), AdmitStep(1)]
    assert d.ready(0) == [call("generate", 0, 0, actor=0)]
    assert d.ready(1) == []
    assert d.done("generate", 0, 0) == [Release((out("prompts", 0),)), call("score", 0, 0)]
    assert d.done("score", 0, 0) == [call("advantage", 0, None)]
    # Training would overwrite version 0, which step 1 must still read.
    assert d.done("advantage", 0) == [Release((out("score", 0),)), call("generate", 1, 0, actor=0)]
    assert d.done("generate", 1, 0) == [Release((out("prompts", 1),)), train(0, 0)]
    assert d.done("train", 0) == [
        Release((out("generate", 0), out("advantage", 0))),
        StepCompleted(0, ((0, 1),)),
        AdmitStep(2),
        call("score", 1, 0),
    ]
    d.ready(2)
    assert d.done("score", 1, 0) == [call("advantage", 1, None)]
    assert d.done("advantage", 1) == [Release((out("score", 1),)), call("generate", 2, 0, actor=1)]
    assert d.done("generate", 2, 0) == [Release((out("prompts", 2),)), train(1, 1)]


def test_one_step_ahead_on_two_groups_overlaps() -> None:
    d = Driver(grpo("rollout"), Schedule(max_lag=1), 4)
    d.start()
    d.ready(0)
    d.ready(1)
    d.done("generate", 0, 0)
    assert d.done("score", 0, 0) == [call("generate", 1, 0, actor=0), call("advantage", 0, None)]
    assert d.done("advantage", 0) == [Release((out("score", 0),)), train(0, 0)]
    running: set[Task] = {NodeTask("generate", 1, 0), NodeTask("train", 0)}
    assert set(d.scheduler.running) == running
    assert d.done("train", 0) == [
        Release((out("generate", 0), out("advantage", 0))),
        StepCompleted(0, ((0, 1),)),
        AdmitStep(2),
        Publish("actor", 1),
    ]
    d.ready(2)
    # The replica may not leave version 0 before step 1 has read it.
    assert d.send(TaskDone(Publish("actor", 1), 0.0)) == []
    assert d.done("generate", 1, 0) == [Release((out("prompts", 1),)), Load("actor", 1, "rollout")]
    assert d.send(TaskDone(Load("actor", 1, "rollout"), 0.0)) == [
        DropSnapshot("actor", 1),
        call("score", 1, 0),
    ]
    d.done("score", 1, 0)
    assert NodeTask("generate", 2, 0) in d.scheduler.running


@pytest.mark.parametrize("rollout", ["gpu", "rollout"])
def test_one_step_ahead_reads_versions_0_0_1_2(rollout: str) -> None:
    """The one-step asynchronous schedule of Cleanba and of Noukhovitch et al. 2024."""
    scheduler = Scheduler(grpo(rollout), Schedule(max_lag=1), 4)
    reads = dry_run(scheduler, lambda work: 1.0).reads
    generate = [dict(reads[NodeTask("generate", step, 0)])["actor"] for step in range(4)]
    learner = [dict(reads[NodeTask("train", step)])["actor"] for step in range(4)]
    assert generate == [0, 0, 1, 2]
    assert learner == [0, 1, 2, 3]
    assert scheduler.lag_counts == {0: 1, 1: 3}


def ppo() -> Flow:
    actor, lagged = (WeightRead("actor", 0),), (WeightRead("actor", 0, lagged=True),)
    return Flow(
        "ppo_step",
        (
            FlowNode("prompts", "source"),
            FlowNode("generate", "rollout", True, "actor", ("prompts",), lagged),
            FlowNode("value", "forward", True, "critic", ("generate",), (WeightRead("critic"),)),
            FlowNode("ref", "forward", True, "ref", ("generate",), (WeightRead("ref"),)),
            FlowNode("score", "forward", True, "reward", ("generate",), (WeightRead("reward"),)),
            FlowNode("logprob", "forward", True, "actor", ("generate",), actor),
            FlowNode("gae", "op", False, "ref", ("value", "ref", "score", "logprob")),
            FlowNode("train", "train", False, "actor", ("generate", "gae"), trains="actor"),
            FlowNode("fit", "train", False, "critic", ("generate", "gae"), trains="critic"),
        ),
        {"actor": 2, "critic": 1, "ref": 1, "reward": 1},
        {"actor": "actor", "critic": "critic"},
        {"actor": 1, "critic": 1},
    )


def test_ppo_runs_independent_nodes_on_disjoint_groups_at_once() -> None:
    d = Driver(ppo(), Schedule(), 1)
    d.start()
    d.ready(0)
    assert d.done("generate", 0, 0) == [
        Release((out("prompts", 0),)),
        call("logprob", 0, 0, actor=0),
        call("value", 0, 0, critic=0),
        call("ref", 0, 0),
        call("score", 0, 0),
    ]
    for node in ("score", "value", "logprob"):
        assert d.done(node, 0, 0) == []
    assert d.done("ref", 0, 0) == [call("gae", 0, None)]
    assert d.done("gae", 0) == [
        Release(tuple(out(name, 0) for name in ("value", "ref", "score", "logprob"))),
        RunTrain("train", 0, (0, 1), (("actor", 0),)),
        RunTrain("fit", 0, (0,), (("critic", 0),)),
    ]
    d.done("fit", 0)
    assert d.done("train", 0) == [
        Release((out("generate", 0), out("gae", 0))),
        StepCompleted(0, ((0, 1),)),
        Finished(),
    ]


def test_reward_streams_behind_generation() -> None:
    flow = grpo("rollout", num_chunks=2)
    nodes = tuple(replace(n, group="gpu") if n.name == "score" else n for n in flow.nodes)
    d = Driver(replace(flow, nodes=nodes), Schedule(), 1)
    d.start()
    assert d.ready(0) == [call("generate", 0, 0, actor=0)]
    assert d.done("generate", 0, 0) == [
        Release((out("prompts", 0, 0),)),
        call("generate", 0, 1, actor=0),
        call("score", 0, 0),
    ]
    assert d.done("score", 0, 0) == []
    assert d.done("generate", 0, 1) == [Release((out("prompts", 0, 1),)), call("score", 0, 1)]
    assert d.done("score", 0, 1) == [call("advantage", 0, None)]


def test_chunks_go_round_the_ranks_and_training_takes_them_all() -> None:
    d = Driver(grpo(num_chunks=3, num_ranks=2), Schedule(), 1)
    d.start()
    assert d.ready(0) == [call("generate", 0, 0, 0, actor=0), call("generate", 0, 1, 1, actor=0)]
    assert d.done("generate", 0, 1) == [Release((out("prompts", 0, 1),)), call("score", 0, 1, 1)]
    # Chunk 2 comes before score of chunk 0: node order goes before chunk order.
    assert d.done("generate", 0, 0)[1:] == [call("generate", 0, 2, 0, actor=0)]
    d.done("score", 0, 1)
    assert d.done("generate", 0, 2)[1:] == [call("score", 0, 0, 0)]
    assert d.done("score", 0, 0) == [call("score", 0, 2, 0)]
    assert d.done("score", 0, 2) == [call("advantage", 0, None)]
    assert d.done("advantage", 0)[1:] == [train(0, 0, ranks=(0, 1))]


def test_two_trainings_of_a_role_in_one_step() -> None:
    """Offsets name the line: the second log-probability reads what the first training made."""
    reads = (WeightRead("actor", 1),)
    flow = Flow(
        "twice",
        (
            FlowNode("prompts", "source"),
            FlowNode("train", "train", False, "a", ("prompts",), trains="actor"),
            FlowNode("logprob", "forward", True, "b", ("prompts",), reads),
            FlowNode("again", "train", False, "a", ("logprob",), trains="actor"),
        ),
        {"a": 1, "b": 1},
        {"actor": "a"},
        {"actor": 2},
    )
    d = Driver(flow, Schedule(), 2)
    d.start()
    assert d.ready(0) == [train(0, 0)]
    assert d.done("train", 0) == [Publish("actor", 1)]
    assert d.send(TaskDone(Publish("actor", 1), 0.0)) == [Load("actor", 1, "b")]
    assert d.send(TaskDone(Load("actor", 1, "b"), 0.0)) == [
        DropSnapshot("actor", 1),
        call("logprob", 0, 0, actor=1),
    ]
    again = RunTrain("again", 0, (0,), (("actor", 1),))
    assert d.done("logprob", 0, 0) == [Release((out("prompts", 0),)), again]
    # Nobody reads version 2 on the other group, so it is not published.
    assert d.done("again", 0) == [Release((out("logprob", 0),)), StepCompleted(0), AdmitStep(1)]
    assert d.ready(1) == [train(1, 2)]


def test_a_waiting_training_is_not_starved() -> None:
    """An SPMD task that is first in line keeps its ranks from starting what is behind it."""
    flow = Flow(
        "busy",
        (
            FlowNode("prompts", "source"),
            FlowNode("train", "train", False, "a", ("prompts",), trains="actor"),
            FlowNode("log", "op", True, "a", ("prompts",)),
        ),
        {"a": 2},
        {"actor": "a"},
        {"actor": 1},
        num_chunks=4,
    )
    d = Driver(flow, Schedule(max_lag=1), 2)
    d.start()
    assert d.ready(1) == [call("log", 1, 0, 0), call("log", 1, 1, 1)]
    assert d.ready(0) == []
    assert d.done("log", 1, 1) == []
    assert d.scheduler.ranks.groups["a"].running[1] == []
    assert d.done("log", 1, 0)[-1] == train(0, 0, ranks=(0, 1))


def test_a_lagged_read_behind_an_exact_one_is_exact() -> None:
    """Its inputs exist only after the trainings it would have to run ahead of."""
    flow = grpo()
    exact = FlowNode("logprob", "forward", True, "gpu", ("prompts",), (WeightRead("actor"),))
    nodes = tuple(
        replace(n, inputs=("prompts", "logprob")) if n.name == "generate" else n
        for n in (flow.nodes[0], exact, *flow.nodes[1:])
    )
    scheduler = Scheduler(replace(flow, nodes=nodes), Schedule(max_lag=2), 4)
    reads = dry_run(scheduler, lambda work: 1.0, after_event=lambda s, e: validate(s)).reads
    assert [dict(reads[NodeTask("generate", s, 0)])["actor"] for s in range(4)] == [0, 1, 2, 3]


def test_no_steps_is_a_finished_run() -> None:
    scheduler = Scheduler(grpo(), Schedule(), 0)
    assert scheduler.start(5.0) == [Finished()]
    assert scheduler.handle(Tick(1e9)) == []


def ended(node: str, step: int, chunk: int | None = None) -> TaskDone:
    return TaskDone(NodeTask(node, step, chunk), 9.0)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (ended("generate", 0, 0), "TaskDone for 'generate step 0 chunk 0', which is done already"),
        (
            ended("generat", 0, 0),
            "TaskDone for 'generat step 0 chunk 0', which is not a task of flow 'grpo_step'",
        ),
        (
            ended("generate", 0, 7),
            "TaskDone for 'generate step 0 chunk 7', which is not a task of flow 'grpo_step'",
        ),
        (ended("train", 0), "TaskDone for 'train step 0', which is waiting for 1 input part(s)"),
        (ended("train", 3), "TaskDone for 'train step 3', which is of a step not admitted yet"),
        (
            TaskDone(Publish("actor", 1), 9.0),
            "TaskDone for 'publish actor@1', which is not asked for",
        ),
        (SourceReady(0, 9.0), "SourceReady for step 0, whose batch is not awaited"),
        (CheckpointSaved(1, 9.0), "CheckpointSaved(1), which was not asked for"),
        (
            replace(ended("score", 0, 0), num_rows=(3, 4)),
            "'score' of step 0 made 1 chunk(s), but the event counts the rows of 2",
        ),
    ],
)
def test_impossible_events_are_refused_with_the_story(event: Event, message: str) -> None:
    scheduler = Scheduler(grpo(), Schedule(), 4)
    scheduler.start(0.0)
    scheduler.handle(SourceReady(0, 1.0))
    scheduler.handle(TaskDone(NodeTask("generate", 0, 0), 2.0))
    if "train step 0" in message:
        scheduler.handle(TaskDone(NodeTask("score", 0, 0), 3.0))
    with pytest.raises(StateError) as caught:
        scheduler.handle(event)
    assert str(caught.value).splitlines()[0] == message


def test_the_error_carries_the_story_of_the_node() -> None:
    scheduler = Scheduler(grpo(), Schedule(), 4)
    scheduler.start(0.0)
    scheduler.handle(SourceReady(0, 1.0))
    scheduler.handle(TaskDone(NodeTask("generate", 0, 0), 2.5))
    with pytest.raises(StateError) as caught:
        scheduler.handle(TaskDone(NodeTask("generate", 0, 0), 3.0))
    assert caught.value.story == (
        "0.0 s  admit step",
        "1.0 s  stored batch",
        "1.0 s  ready generate step 0 chunk 0",
        "1.0 s  start generate step 0 chunk 0 on gpu[0] with actor@0",
        "2.5 s  done generate step 0 chunk 0 on gpu[0] with actor@0",
    )
    assert scheduler.log.story(node="score") == (
        "2.5 s  ready score step 0 chunk 0",
        "2.5 s  start score step 0 chunk 0 on gpu[0]",
    )


def test_the_interface_is_used_in_order() -> None:
    scheduler = Scheduler(grpo(), Schedule(), 1)
    with pytest.raises(StateError, match=r"SourceReady came before start\(\)"):
        scheduler.handle(SourceReady(0, 0.0))
    scheduler.start(0.0)
    with pytest.raises(StateError, match=r"start\(\) was called twice"):
        scheduler.start(0.0)


def test_the_schedule_hash_sees_every_version() -> None:
    def sha256(max_lag: int, num_steps: int = 3) -> str:
        scheduler = Scheduler(grpo(), Schedule(max_lag=max_lag), num_steps)
        dry_run(scheduler, lambda work: 1.0)
        return scheduler.schedule_sha256()

    assert sha256(0) == sha256(0)
    assert len({sha256(0), sha256(1), sha256(2), sha256(0, num_steps=2)}) == 4
