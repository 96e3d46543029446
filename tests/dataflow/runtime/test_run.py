"""A run's sources: what they may give, and what happens if they do not."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from penstock.dataflow.errors import ConfigError, WorkerError
from penstock.dataflow.runtime.dispatcher import Submission
from penstock.dataflow.runtime.engine import Source
from penstock.dataflow.runtime.executor import Completion, Restart
from penstock.dataflow.runtime.messages import Report
from penstock.dataflow.runtime.run import OpenStreams
from penstock.dataflow.scheduler.events import NodeTask, RunStream

from ..counter import SOURCES, Keys, Numbers, count_step, engine

# The deadline of a source is SIGALRM's, which pytest-timeout otherwise takes.
pytestmark = pytest.mark.timeout(120, method="thread")

LINE = count_step.__code__.co_firstlineno


class FromStepOne(Numbers):
    """Good in step 0; does something else afterwards."""

    def __init__(self, then: Any) -> None:
        super().__init__()
        self.then = then

    def batch(self, step: int) -> Any:
        return super().batch(step) if step == 0 else self.then()


def fail_with(source: Source, deadline_s: float = 60.0) -> WorkerError:
    steps: list[int] = []
    with engine(deadline_s=deadline_s) as one:
        with pytest.raises(WorkerError) as raised:
            steps.extend(step.step for step in one.run({"keys": source}, 3))
        assert len(list(one.run(SOURCES, 1))) == 1, "the workers are as good as before"
    return raised.value


def test_what_a_source_raises_ends_the_run_with_its_name_and_step() -> None:
    def broken() -> None:
        raise ZeroDivisionError("on purpose")

    error = fail_with(FromStepOne(broken))
    assert str(error).startswith(
        f"counter.py:{LINE}\n"
        "    def count_step(...)\n"
        "keys step 1 failed on the source\n"
        "    ZeroDivisionError: on purpose\n"
        "what happened before:\n"
    )
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert error.__cause__.__traceback__ is not None


def test_a_source_that_gives_nothing_in_time_ends_the_run() -> None:
    error = fail_with(FromStepOne(lambda: time.sleep(60)), deadline_s=0.5)
    assert (
        "keys step 1 failed on the source\n"
        "    TimeoutError: it gave nothing within 0.5 s (Schedule.deadline_s)\n"
    ) in str(error)


def test_a_column_that_is_not_as_declared_is_the_source_s_failure() -> None:
    error = fail_with(FromStepOne(lambda: Keys(key=torch.zeros(4))))
    assert (
        "keys step 1 failed on the source\n"
        "    WorkerError: 'keys.key' should be i64[row], but the call returned float32[4]; make it "
        "torch.int64 with 1 axes\n"
    ) in str(error)


def test_a_source_of_another_table_is_a_mistake_in_the_configuration() -> None:
    with engine() as one, pytest.raises(ConfigError) as raised:
        list(one.run({"keys": FromStepOne(dict)}, 3))
    assert str(raised.value) == "source 'keys' should give a Keys, but gave a dict"


def test_a_source_that_nobody_gives_is_named_at_once() -> None:
    with engine() as one, pytest.raises(ConfigError) as raised:
        one.run({}, 3)
    assert str(raised.value) == (
        "graph 'count_step' reads a source 'keys' that is not provided; give sources={'keys': ...}"
    )


CHUNKS = (1, 3, 5)
GIVEN = (3, 5, 1)
"""Which of them the rank answers first, second and third."""


def answer(number: int) -> Submission:
    """Heard of under the task under which the answer with this number was asked for."""
    report = Report(0.0, 1.0, chunk=GIVEN[number])
    done = Completion(number, 0, report)
    return Submission(NodeTask("generate", 0, CHUNKS[number]), "rollout", set(), [done])


@pytest.mark.parametrize("together", [1, 2, 3])
@pytest.mark.parametrize("heard", list(itertools.permutations(range(3))))
def test_answers_are_taken_in_as_they_were_given(heard: tuple[int, ...], together: int) -> None:
    """Also where several are heard of before one is taken in."""
    streams = OpenStreams(in_flight=False)
    streams.begin(RunStream("generate", 0, CHUNKS, 0), "rollout")
    taken: list[int | None] = []
    for first in range(0, len(heard), together):
        some = [answer(number) for number in heard[first : first + together]]
        for one in [ready for each in some for ready in streams.in_order(each)]:
            assert isinstance(one, Submission)
            assert isinstance(one.task, NodeTask)
            task, _ = streams.answered(one.task, one)
            taken.append(task.chunk if task else None)
    assert taken == list(GIVEN)


def test_whatever_else_is_heard_of_is_taken_in_at_once() -> None:
    streams = OpenStreams(in_flight=False)
    streams.begin(RunStream("generate", 0, CHUNKS, 0), "rollout")
    failed = answer(2)
    failed.failed = Completion(2, 0, None, error=ValueError("on purpose"))
    other = Submission(NodeTask("score", 0, 1), "main", set())
    for one in (failed, other, Restart("rollout", 1.0)):
        assert streams.in_order(one) == [one]
