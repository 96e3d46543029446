"""A rank's answers are taken in as it has given them, in whatever order they are heard of."""

from __future__ import annotations

import itertools

import pytest
from penstock.dataflow.runtime.dispatcher import Submission
from penstock.dataflow.runtime.executor import Completion, Restart
from penstock.dataflow.runtime.messages import Report
from penstock.dataflow.runtime.open_streams import OpenStreams
from penstock.dataflow.scheduler.events import NodeTask, RunStream

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
