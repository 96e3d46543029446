"""Draining for a checkpoint, what it holds, and going on from it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from penstock.dataflow.kinds import WeightRead
from penstock.dataflow.scheduler.events import (
    AdmitStep,
    CheckpointSaved,
    Event,
    Finished,
    Load,
    NodeTask,
    Output,
    Pause,
    Publish,
    Release,
    ResumeState,
    RunCall,
    RunTrain,
    SaveCheckpoint,
    SourceReady,
    StepCompleted,
    TaskDone,
    Versions,
)
from penstock.dataflow.scheduler.schedule import Flow, FlowNode, Schedule
from penstock.dataflow.scheduler.scheduler import Scheduler
from penstock.dataflow.scheduler.simulate import dry_run

from .invariants import validate

PROMPTS = FlowNode("prompts", "source")
TRAIN = FlowNode("train", "train", False, "a", ("generate",), trains="actor")


def flow(rollout: str = "a") -> Flow:
    lagged = (WeightRead("actor", 0, lagged=True),)
    generate = FlowNode("generate", "rollout", True, rollout, ("prompts",), lagged)
    score = FlowNode("score", "op", True, rollout, ("generate",))
    train = replace(TRAIN, inputs=("generate", "score"))
    groups = dict.fromkeys(sorted({"a", rollout}), 1)
    return Flow("step", (PROMPTS, generate, score, train), groups, {"actor": "a"}, {"actor": 1})


def done(node: str, step: int, chunk: int | None = 0) -> TaskDone:
    return TaskDone(NodeTask(node, step, chunk), 1.0)


def validated(scheduler: Scheduler, event: Event) -> None:
    validate(scheduler)


def test_synchronous_checkpoints_hold_nothing_but_weights() -> None:
    scheduler = Scheduler(flow(), Schedule(), 3, checkpoint_every=2)
    simulation = dry_run(scheduler, lambda work: 1.0, after_event=validated)
    hashes = [save.resume.history_sha256 for save in simulation.checkpoints]
    assert simulation.checkpoints == [
        SaveCheckpoint(2, (), ResumeState(2, frozenset(), hashes[0])),
        SaveCheckpoint(3, (), ResumeState(3, frozenset(), hashes[1])),
    ]
    assert hashes[1] == scheduler.schedule_sha256()
    at = simulation.instructions.index(simulation.checkpoints[0])
    assert simulation.instructions[at - 1] == StepCompleted(1, ((0, 1),))
    assert simulation.instructions[at + 1] == AdmitStep(2)
    assert simulation.instructions[-2:] == [simulation.checkpoints[1], Finished()]


def test_one_step_ahead_the_checkpoint_holds_the_older_rollouts() -> None:
    s = Scheduler(flow("b"), Schedule(max_lag=1), 4, checkpoint_every=1)
    s.start(0.0)
    s.handle(SourceReady(1, 0.0))
    s.handle(SourceReady(0, 0.0))
    s.handle(done("generate", 1))
    assert list(s.running) == [NodeTask("generate", 0, 0)]
    assert s.handle(done("generate", 0))[1:] == [RunCall("score", 0, 0, 0)]
    assert s.handle(done("score", 0)) == [
        RunCall("score", 1, 0, 0),
        RunTrain("train", 0, (0,), (("actor", 0),)),
    ]
    # Step 0 completes and step 2 is not admitted: the run drains. Weights go on moving.
    assert s.handle(done("train", 0, None)) == [
        Release((Output("generate", 0, 0), Output("score", 0, 0))),
        StepCompleted(0, ((0, 1),)),
        Publish("actor", 1),
    ]
    assert s.handle(TaskDone(Publish("actor", 1), 1.0)) == []
    # All that training step 1 needs is there, but it would take the actor past the checkpoint.
    assert s.handle(done("score", 1)) == [Load("actor", 1, "b")]
    validate(s)
    *_, save = s.handle(TaskDone(Load("actor", 1, "b"), 1.0))
    tasks = {NodeTask("prompts", 1), NodeTask("generate", 1, 0), NodeTask("score", 1, 0)}
    assert isinstance(save, SaveCheckpoint)
    assert save.live == (Output("generate", 1, 0), Output("score", 1, 0))
    assert save.resume == ResumeState(1, frozenset(tasks), save.resume.history_sha256)
    assert s.handle(CheckpointSaved(1, 2.0)) == [
        AdmitStep(2),
        RunTrain("train", 1, (0,), (("actor", 1),)),
    ]
    validate(s)


def test_a_draining_run_starts_what_needs_older_weights_and_nothing_else() -> None:
    s = Scheduler(flow("b"), Schedule(max_lag=1), 4, checkpoint_every=1)
    s.start(0.0)
    s.handle(SourceReady(0, 0.0))
    for event in (done("generate", 0), done("score", 0), done("train", 0, None)):
        s.handle(event)
    s.handle(TaskDone(Publish("actor", 1), 1.0))
    # Step 1's batch comes late: its rollout at version 0 must still be made ...
    assert s.handle(SourceReady(1, 2.0)) == [RunCall("generate", 1, 0, 0, (("actor", 0),))]
    # ... but its score can wait until the checkpoint is saved.
    instructions = s.handle(done("generate", 1))
    assert instructions == [Release((Output("prompts", 1, 0),)), Load("actor", 1, "b")]
    *_, save = s.handle(TaskDone(Load("actor", 1, "b"), 3.0))
    assert isinstance(save, SaveCheckpoint)
    assert save.resume.done == {NodeTask("prompts", 1), NodeTask("generate", 1, 0)}
    assert s.handle(CheckpointSaved(1, 4.0)) == [AdmitStep(2), RunCall("score", 1, 0, 0)]
    validate(s)


def test_a_resumed_run_goes_on_with_what_is_left() -> None:
    done_tasks = frozenset({NodeTask("prompts", 1), NodeTask("generate", 1, 0)})
    resume = ResumeState(1, done_tasks)
    s = Scheduler(flow("b"), Schedule(max_lag=1), 4, checkpoint_every=1, resume=resume)
    assert s.start(100.0) == [AdmitStep(2), RunCall("score", 1, 0, 0)]
    # Every copy starts at the checkpoint's version: no publication is needed.
    assert s.handle(SourceReady(2, 101.0)) == []
    assert s.handle(done("score", 1)) == [
        RunCall("generate", 2, 0, 0, (("actor", 1),)),
        RunTrain("train", 1, (0,), (("actor", 1),)),
    ]
    validate(s)


def test_a_finished_run_resumes_as_finished() -> None:
    resume = ResumeState(3)
    s = Scheduler(flow(), Schedule(max_lag=1), 3, checkpoint_every=1, resume=resume)
    assert s.start(0.0) == [Finished()]


def test_steps_that_complete_together_are_admitted_one_by_one() -> None:
    """A slow logging op holds step 0 open while step 1 is done: step 2 must not be forgotten."""
    base = flow("b")
    slow = FlowNode("log", "op", False, "c", ("prompts",))
    groups = {**base.groups, "c": 1}
    s = Scheduler(
        replace(base, nodes=(*base.nodes, slow), groups=groups),
        Schedule(max_lag=1),
        4,
        checkpoint_every=2,
    )
    seconds = {("log", 0): 20.0}

    def duration_s(work: object) -> float:
        return seconds.get((getattr(work, "node", ""), getattr(work, "step", -1)), 1.0)

    simulation = dry_run(s, duration_s, after_event=validated)
    first = simulation.checkpoints[0]
    assert first.step == 2
    assert NodeTask("generate", 2, 0) in first.resume.done


@pytest.mark.parametrize(
    ("resume", "message"),
    [
        (ResumeState(5), "cannot resume at step 5 of a run of 4 steps"),
        (
            ResumeState(1, frozenset({NodeTask("prompts", 2)})),
            "a run resumed at step 1 of 4 cannot have tasks of step(s) 2 done",
        ),
        (
            ResumeState(1, frozenset({NodeTask("prompts", 1), NodeTask("score", 1, 0)})),
            "'score step 1 chunk 0' is said to be done, but not all of its inputs are",
        ),
        (
            ResumeState(1, frozenset({NodeTask("prompt", 1)})),
            "'prompt step 1' is not a task of flow 'step'",
        ),
        (
            ResumeState(1, frozenset({NodeTask("prompts", 1)})),
            "cannot resume at step 1: 'generate step 1 chunk 0' reads weights older than the "
            "checkpoint's and is not part of it. The checkpoint is the end of a shorter run or "
            "was made with a smaller Schedule.max_lag; resume with max_lag=0, or from a "
            "checkpoint at least max_lag steps before that run's end",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(resume: ResumeState, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Scheduler(flow(), Schedule(max_lag=1), 4, resume=resume)


def test_checkpoint_every_is_checked() -> None:
    with pytest.raises(ValueError, match="checkpoint_every must be at least 1 step, got 0"):
        Scheduler(flow(), Schedule(), 4, checkpoint_every=0)


@pytest.mark.parametrize("rollout", ["a", "b"])
@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_runs_that_pause_and_go_on_do_what_one_does(rollout: str, max_lag: int) -> None:
    schedule = Schedule(max_lag=max_lag)
    whole = Scheduler(flow(rollout), schedule, 7)
    reads = dry_run(whole, lambda work: 1.0).reads
    resume, parts = None, dict[NodeTask, Versions]()
    for pauses in ({2, 3}, {3}, set[int]()):
        one = Scheduler(flow(rollout), schedule, 7, pauses=pauses, resume=resume)
        simulation = dry_run(one, lambda work: 1.0, after_event=validated)
        parts |= simulation.reads
        last = simulation.instructions[-1]
        assert isinstance(last, Pause if pauses else Finished)
        if isinstance(last, Pause):
            assert last.place.step == min(pauses)
            resume = last.place.resume
    assert parts == reads
    assert one.schedule_sha256() == whole.schedule_sha256()


def test_a_checkpoint_due_at_a_pause_is_saved_before_it() -> None:
    scheduler = Scheduler(flow(), Schedule(), 4, checkpoint_every=2, pauses={2, 3})
    simulation = dry_run(scheduler, lambda work: 1.0, after_event=validated)
    (save,) = simulation.checkpoints
    assert simulation.instructions[-2:] == [save, Pause(save)]
