"""Failures, deadlines and the texts a person reads; the texts are golden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.dataflow.kinds import WeightRead
from penstock.dataflow.scheduler.describe import describe
from penstock.dataflow.scheduler.events import (
    Abort,
    CheckpointSaved,
    Instruction,
    NodeTask,
    Publish,
    SourceReady,
    TaskDone,
    TaskFailed,
    Tick,
)
from penstock.dataflow.scheduler.schedule import Flow, FlowNode, Schedule
from penstock.dataflow.scheduler.scheduler import Scheduler

from .invariants import validate

FLOW = Flow(
    "grpo_step",
    (
        FlowNode("prompts", "source"),
        FlowNode(
            "actor.generate",
            "rollout",
            True,
            "rollout",
            ("prompts",),
            (WeightRead("actor", 0, lagged=True), WeightRead("tokenizer")),
        ),
        FlowNode("reward.score", "op", True, "rollout", ("actor.generate",)),
        FlowNode(
            "actor.train", "train", False, "train", ("actor.generate", "reward.score"), (), "actor"
        ),
    ),
    {"train": 2, "rollout": 2},
    {"actor": "train"},
    {"actor": 1},
    num_chunks=4,
)


STREAMED = replace(
    FLOW,
    nodes=tuple(
        replace(
            node, streams=node.kind == "rollout", order_of="actor.generate" if node.trains else ""
        )
        for node in FLOW.nodes
    ),
)
"""Each rank samples its two chunks together; the ranks that train take one each at a time."""


def started(max_lag: int = 0) -> Scheduler:
    """Chunks 0 and 2 of the rollout are done by 9 s; chunk 1 has run since 1 s, 3 waits for it."""
    scheduler = Scheduler(FLOW, Schedule(max_lag=max_lag, deadline_s=60.0), 5)
    scheduler.start(0.0)
    scheduler.handle(SourceReady(0, 1.0, num_rows=(32, 32, 32, 16)))
    scheduler.handle(TaskDone(NodeTask("actor.generate", 0, 0), 5.0, num_rows=(32,)))
    scheduler.handle(TaskDone(NodeTask("actor.generate", 0, 2), 9.0, num_rows=(32,)))
    scheduler.handle(TaskDone(NodeTask("reward.score", 0, 0), 9.5))
    scheduler.handle(TaskDone(NodeTask("reward.score", 0, 2), 9.75))
    validate(scheduler)
    return scheduler


def finish(scheduler: Scheduler, node: str, chunks: Sequence[int], at_s: float) -> None:
    for chunk in chunks:
        scheduler.handle(TaskDone(NodeTask(node, 0, chunk), at_s))


def abort_text(instructions: list[Instruction]) -> str:
    assert len(instructions) == 1
    assert isinstance(instructions[0], Abort)
    return str(instructions[0].report)


def test_a_hang_report_names_everything() -> None:
    scheduler = started()
    assert scheduler.handle(Tick(61.0)) == []
    assert abort_text(scheduler.handle(Tick(61.5))) == HANG
    assert scheduler.aborted
    assert scheduler.handle(TaskDone(NodeTask("actor.generate", 0, 1), 62.0)) == []
    validate(scheduler)


HANG = """\
no progress within 60 s (Schedule.deadline_s), at 61.5 s
    actor.generate of step 0 has run for 60.5 s
        on rollout[1]
        with weights actor@0, tokenizer
        working on 32 rows
        not done: chunk(s) 1, 3 of 4 (48 rows)
waiting to start:
    actor.generate step 0: 1 task(s) ready and waiting for ranks
    reward.score step 0: 2 task(s) waiting for 1 input part(s)
    actor.train step 0: 1 task(s) waiting for 4 input part(s)
last event of each rank:
    train[0]  nothing yet
    train[1]  nothing yet
    rollout[0]  9.8 s  done reward.score step 0 chunk 2 on rollout[0]
    rollout[1]  1.0 s  start actor.generate step 0 chunk 1 on rollout[1] with actor@0
weights:
    actor on rollout  version 0, kept for actor.generate step 0
    actor on train (home)  version 0"""


def test_a_hung_training_names_all_its_ranks() -> None:
    scheduler = started()
    finish(scheduler, "actor.generate", (1, 3), 10.0)
    finish(scheduler, "reward.score", (1, 3), 11.0)
    lines = abort_text(scheduler.handle(Tick(100.0))).splitlines()
    assert lines[:4] == [
        "no progress within 60 s (Schedule.deadline_s), at 100.0 s",
        "    actor.train of step 0 has run for 89.0 s",
        "        on train[0], train[1]",
        "        with weights actor@0",
    ]


def test_a_hung_publication_is_named() -> None:
    scheduler = started()
    finish(scheduler, "actor.generate", (1, 3), 10.0)
    finish(scheduler, "reward.score", (1, 3), 11.0)
    instructions = scheduler.handle(TaskDone(NodeTask("actor.train", 0), 12.0))
    assert instructions[-1] == Publish("actor", 1)
    text = abort_text(scheduler.handle(Tick(100.0)))
    assert "    publish actor@1 has run for 88.0 s\n        on train[0]\n" in text
    assert "    batch of step 1 has been awaited for 88.0 s\n" in text
    assert "actor on train (home)  version 1 since 12.0 s\n" in text + "\n"


def test_a_batch_that_never_comes_is_noticed() -> None:
    scheduler = Scheduler(FLOW, Schedule(deadline_s=60.0), 5)
    scheduler.start(1000.0)
    assert scheduler.handle(Tick(1060.0)) == []
    text = abort_text(scheduler.handle(Tick(1060.1)))
    assert text.splitlines()[:3] == [
        "no progress within 60 s (Schedule.deadline_s), at 1060.1 s",
        "    batch of step 0 has been awaited for 60.1 s",
        "waiting to start:",
    ]
    assert "actor.generate step 0: 4 task(s) waiting for the step's batch" in text


def test_a_checkpoint_that_is_never_saved_is_noticed() -> None:
    flow = Flow("data", (FlowNode("prompts", "source"),), {}, {}, {})
    scheduler = Scheduler(flow, Schedule(deadline_s=60.0), 1, checkpoint_every=1)
    scheduler.start(0.0)
    scheduler.handle(SourceReady(0, 50.0))
    assert scheduler.handle(Tick(110.0)) == []
    text = abort_text(scheduler.handle(Tick(110.1)))
    assert "checkpoint of step 1 has been awaited for 60.1 s" in text
    assert scheduler.handle(CheckpointSaved(1, 111.0)) == []


def test_what_waits_for_weights_says_so() -> None:
    scheduler = started(max_lag=1)
    scheduler.handle(SourceReady(1, 9.9))
    finish(scheduler, "actor.generate", (1, 3), 10.0)
    text = describe(scheduler)
    assert text.splitlines()[0] == (
        "flow 'grpo_step': 0 of 5 steps complete, 2 in flight, 2 task(s) running"
    )
    assert "actor on rollout  version 0, kept for actor.generate step 1" in text


def test_a_failure_report_has_the_error_and_the_story() -> None:
    scheduler = started()
    error = "Traceback (most recent call last):\n  ...\nRuntimeError: out of memory"
    failed = TaskFailed(NodeTask("actor.generate", 0, 1), 1, error, 12.0)
    assert abort_text(scheduler.handle(failed)) == FAILURE
    assert scheduler.handle(failed) == []
    validate(scheduler)


FAILURE = """\
actor.generate step 0 chunk 1 failed on rollout[1]
    Traceback (most recent call last):
      ...
    RuntimeError: out of memory
what happened before:
    0.0 s  admit step
    1.0 s  stored batch
    1.0 s  ready actor.generate step 0 chunk 0
    1.0 s  ready actor.generate step 0 chunk 1
    1.0 s  ready actor.generate step 0 chunk 2
    1.0 s  ready actor.generate step 0 chunk 3
    1.0 s  start actor.generate step 0 chunk 0 on rollout[0] with actor@0
    1.0 s  start actor.generate step 0 chunk 1 on rollout[1] with actor@0
    5.0 s  done actor.generate step 0 chunk 0 on rollout[0] with actor@0
    5.0 s  start actor.generate step 0 chunk 2 on rollout[0] with actor@0
    9.0 s  done actor.generate step 0 chunk 2 on rollout[0] with actor@0
    12.0 s  failed actor.generate step 0 chunk 1 on rollout[1] with actor@0"""


def test_a_source_can_fail_too() -> None:
    scheduler = Scheduler(FLOW, Schedule(), 5)
    scheduler.start(0.0)
    failed = TaskFailed(NodeTask("prompts", 0), None, "no such file: x.jsonl", 1.0)
    assert abort_text(scheduler.handle(failed)) == (
        "prompts step 0 failed on the source\n"
        "    no such file: x.jsonl\n"
        "what happened before:\n"
        "    0.0 s  admit step\n"
        "    1.0 s  failed prompts step 0"
    )


def test_where_tasks_are_done_one_at_a_time_the_oldest_is_timed_from_the_last_event() -> None:
    ticks: dict[bool, list[list[Instruction]]] = {}
    for one_at_a_time in (False, True):
        schedule = Schedule(deadline_s=60.0)
        scheduler = Scheduler(FLOW, schedule, 5, one_at_a_time=one_at_a_time)
        scheduler.start(0.0)
        scheduler.handle(SourceReady(0, 1.0))  # chunks 0 and 1 of the rollout are handed out
        scheduler.handle(TaskDone(NodeTask("actor.generate", 0, 0), 50.0))
        ticks[one_at_a_time] = [scheduler.handle(Tick(at_s)) for at_s in (109.0, 110.5)]
    parallel, serial = ticks[False][0], ticks[True]
    assert "actor.generate of step 0 has run for 108.0 s" in abort_text(parallel)
    assert serial[0] == []
    report = abort_text(serial[1])
    assert "actor.generate of step 0 has run for 60.5 s" in report
    assert "on rollout[1]" in report
    assert report.count("has run for") == 1


def streamed() -> Scheduler:
    """Of its two chunks, rank 0 has answered 2 at 5 s and rank 1 has answered 3 at 9 s."""
    scheduler = Scheduler(STREAMED, Schedule(streaming=4, deadline_s=60.0), 5)
    scheduler.start(0.0)
    scheduler.handle(SourceReady(0, 1.0, num_rows=(32, 32, 32, 16)))
    scheduler.handle(TaskDone(NodeTask("actor.generate", 0, 2), 5.0, num_rows=(32,), size=7))
    scheduler.handle(TaskDone(NodeTask("actor.generate", 0, 3), 9.0, num_rows=(16,), size=9))
    validate(scheduler)
    return scheduler


def test_what_streams_is_described_chunk_by_chunk() -> None:
    assert describe(streamed()) == (
        "flow 'grpo_step': 0 of 5 steps complete, 1 in flight, 2 task(s) running\n"
        "    running actor.generate step 0 chunk 0 on rollout[0]\n"
        "    running actor.generate step 0 chunk 1 on rollout[1]\n"
        "    reward.score step 0: 2 task(s) waiting for 1 input part(s)\n"
        "    reward.score step 0: 2 task(s) ready and waiting for ranks\n"
        "    actor.train step 0: 2 task(s) waiting for its turn, or for its inputs\n"
        "    actor on rollout  version 0, kept for actor.generate step 0\n"
        "    actor on train (home)  version 0"
    )


def test_a_stream_is_timed_from_its_last_answer_and_names_what_is_left() -> None:
    scheduler = streamed()
    assert scheduler.handle(Tick(65.0)) == []  # 64 s after it began, 60 s after it answered
    assert abort_text(scheduler.handle(Tick(65.5))).splitlines()[:6] == [
        "no progress within 60 s (Schedule.deadline_s), at 65.5 s",
        "    actor.generate of step 0 has run for 60.5 s",
        "        on rollout[0]",
        "        with weights actor@0, tokenizer",
        "        working on 32 rows",
        "        not done: chunk(s) 0, 1 of 4 (64 rows)",
    ]


def test_a_part_of_a_training_that_hangs_names_its_rows() -> None:
    scheduler = streamed()
    for chunk, size in ((0, 8), (1, 10)):
        done = NodeTask("actor.generate", 0, chunk)
        scheduler.handle(TaskDone(done, 10.0, num_rows=(32,), size=size))
    finish(scheduler, "reward.score", range(4), 11.0)
    lines = abort_text(scheduler.handle(Tick(100.0))).splitlines()
    assert lines[:5] == [
        "no progress within 60 s (Schedule.deadline_s), at 100.0 s",
        "    actor.train of step 0 has run for 89.0 s",
        "        on train[0], train[1]",
        "        with weights actor@0",
        "        working on 64 rows",
    ]
    assert "    actor.train step 0: 1 task(s) ready and waiting for ranks" in lines


# --- deadlines of calls that a plan predicts


def expecting(predicted_s: float | None) -> Flow:
    """The flow with a prediction of the rollout's time."""
    nodes = (
        replace(node, predicted_s=predicted_s) if node.kind == "rollout" else node
        for node in FLOW.nodes
    )
    return replace(FLOW, nodes=tuple(nodes))


def generating(predicted_s: float | None, deadline_s: float | None = None) -> Scheduler:
    """The rollout's four chunks have run on two ranks since 0 s, or wait for those."""
    schedule = Schedule() if deadline_s is None else Schedule(deadline_s=deadline_s)
    scheduler = Scheduler(expecting(predicted_s), schedule, 5)
    scheduler.start(0.0)
    scheduler.handle(SourceReady(0, 0.0))
    return scheduler


def test_a_generation_of_forty_minutes_has_its_time() -> None:
    scheduler = generating(predicted_s=2400.0)
    assert scheduler.handle(Tick(601.0)) == []
    assert scheduler.handle(Tick(12_000.0)) == []
    text = abort_text(scheduler.handle(Tick(12_000.5)))
    assert text.splitlines()[:2] == [
        "no progress within 12000 s (5 x the 2,400 s that the plan predicts), at 12000.5 s",
        "    actor.generate of step 0 has run for 12000.5 s",
    ]


def test_a_deadline_that_is_set_holds_for_every_call() -> None:
    scheduler = generating(predicted_s=2400.0, deadline_s=900.0)
    assert scheduler.handle(Tick(900.0)) == []
    text = abort_text(scheduler.handle(Tick(901.0)))
    assert text.startswith("no progress within 900 s (Schedule.deadline_s), at 901.0 s\n")


def test_what_is_predicted_to_be_short_has_ten_minutes() -> None:
    for predicted_s in (None, 0.0, 3.0, 120.0):
        scheduler = generating(predicted_s)
        assert scheduler.handle(Tick(600.0)) == []
        text = abort_text(scheduler.handle(Tick(600.5)))
        assert text.startswith("no progress within 600 s (Schedule.deadline_s), at 600.5 s\n")


def test_a_call_with_less_time_is_missed_while_an_older_one_has_more() -> None:
    flow = expecting(2400.0)
    apart = tuple(
        replace(node, group="train") if node.name == "reward.score" else node for node in flow.nodes
    )
    scheduler = Scheduler(replace(flow, nodes=apart), Schedule(), 5)
    scheduler.start(0.0)
    scheduler.handle(SourceReady(0, 0.0))
    scheduler.handle(TaskDone(NodeTask("actor.generate", 0, 0), 100.0))
    assert scheduler.handle(Tick(700.0)) == []
    lines = abort_text(scheduler.handle(Tick(701.0))).splitlines()
    assert lines[:2] == [
        "no progress within 600 s (Schedule.deadline_s), at 701.0 s",
        "    reward.score of step 0 has run for 601.0 s",
    ]
    assert not any("actor.generate of step 0 has run" in line for line in lines)
