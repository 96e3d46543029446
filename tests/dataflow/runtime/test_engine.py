"""The engine with a small real role, in this process: runs after runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from penstock.dataflow.errors import StateError
from penstock.dataflow.graph.role import Role
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime.engine import Engine, StepResult
from penstock.dataflow.runtime.executor import Completion, Program, Restart
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.placement import Placement, flow_of, one_group
from penstock.dataflow.runtime.worker_protocol import WorkerSpec
from penstock.dataflow.scheduler.schedule import Schedule

from ..counter import COUNT, LOOK, SOURCES, Counter, CounterSpec, Keys, Model, apart, engine, seen

APART = apart(COUNT, model__sample="rollout")


def look_twice_step(keys: Keys, model: Model, judge: Model) -> object:
    return model.sample(keys.key), judge.sample(keys.key)


def sampled_with(steps: list[StepResult]) -> list[int]:
    """The version that each step's rollout is said to have read."""
    return [
        version
        for step in steps
        for span in step.spans
        if span.node == "model.sample"
        for _, version in span.versions
    ]


# --- several runs of one engine


@pytest.mark.parametrize("placement", [one_group(COUNT), APART], ids=["together", "apart"])
@pytest.mark.parametrize(
    ("max_lag", "first", "second"),
    [(0, [0, 1, 2], [3, 4, 5]), (1, [0, 0, 1], [3, 3, 4]), (2, [0, 0, 0], [3, 3, 3])],
)
def test_a_second_run_samples_with_the_weights_that_the_first_one_made(
    placement: Placement, max_lag: int, first: list[int], second: list[int]
) -> None:
    with engine(placement, max_lag=max_lag) as one:
        for expected in (first, second):
            steps = list(one.run(SOURCES, 3))
            assert seen(steps) == expected
            assert sampled_with(steps) == first  # versions count from the run's own start
        assert one.call("model", "count") == 6


def test_another_program_sees_the_newest_weights_wherever_it_runs() -> None:
    look = Program(LOOK, apart(LOOK, model__sample="rollout"))
    with engine(APART, also={"look": look}) as one:
        list(one.run(SOURCES, 3))
        (looked,) = one.run(SOURCES, 1, program="look")
        assert looked.metrics["model.sample/mean"] == 3


def test_programs_that_train_one_role_in_two_places_follow_one_another() -> None:
    there = Program(COUNT, apart(COUNT, model__sample="rollout", model__train="rollout"))
    with engine(one_group(COUNT), also={"there": there}) as one:
        programs = ("main", "there", "there", "main")
        runs = [seen(list(one.run(SOURCES, 2, program=name))) for name in programs]
    assert runs == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_an_engine_started_again_begins_with_new_workers() -> None:
    one = engine(APART)
    for _ in range(2):
        with one:
            assert seen(list(one.run(SOURCES, 2))) == [0, 1]


def test_a_live_worker_is_used_as_it_is() -> None:
    model = Counter()
    with engine(worker=model) as one:
        list(one.run(SOURCES, 2))
    assert model.count() == 2


# --- asking and stopping in the middle


@pytest.mark.parametrize("placement", [one_group(COUNT), APART], ids=["together", "apart"])
@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_asking_during_a_run_does_not_disturb_it(placement: Placement, max_lag: int) -> None:
    with engine(placement, max_lag=max_lag) as one:
        undisturbed = list(one.run(SOURCES, 5))
    steps: list[StepResult] = []
    with engine(placement, max_lag=max_lag) as one:
        for step in one.run(SOURCES, 5):
            assert one.call("model", "count") == step.step + 1
            steps.append(step)
    assert seen(steps) == seen(undisturbed)
    assert sampled_with(steps) == sampled_with(undisturbed)


@pytest.mark.parametrize("placement", [one_group(COUNT), APART], ids=["together", "apart"])
@pytest.mark.parametrize("max_lag", [0, 1, 2])
@pytest.mark.parametrize("last", [0, 1])
def test_after_breaking_out_of_a_run_another_can_begin(
    placement: Placement, max_lag: int, last: int
) -> None:
    with engine(placement, max_lag=max_lag) as one:
        for step in one.run(SOURCES, 5):
            if step.step == last:
                break
        trained = one.call("model", "count")
        assert trained == last + 1
        expected = [trained + max(0, step - max_lag) for step in range(3)]
        assert seen(list(one.run(SOURCES, 3))) == expected


def test_what_a_run_left_behind_does_not_reach_the_next_one() -> None:
    graph = build(look_twice_step)
    with engine(apart(graph, judge__sample="other"), graph=graph, max_lag=2) as one:
        next(one.run(SOURCES, 5))
        assert [step.step for step in one.run(SOURCES, 5)] == [0, 1, 2, 3, 4]


def test_a_run_that_nobody_took_steps_of_never_began() -> None:
    with engine() as one:
        unused = one.run(SOURCES, 3)
        assert seen(list(one.run(SOURCES, 2))) == [0, 1]
        assert seen(list(unused)) == [2, 3, 4]


def test_an_engine_does_one_run_at_a_time() -> None:
    with engine(max_lag=1) as one:
        first = one.run(SOURCES, 3)
        next(first)
        with pytest.raises(StateError) as raised:
            next(one.run(SOURCES, 3))
        assert str(raised.value) == (
            "a run of program 'main' is not over, and an engine does one at a time; take the rest "
            "of its steps, or call close() on what Engine.run returned"
        )
        assert [step.step for step in first] == [1, 2]
        assert seen(list(one.run(SOURCES, 1))) == [3]


def test_a_run_ends_with_its_engine() -> None:
    one = engine(max_lag=1)
    steps = one.run(SOURCES, 3)
    next(steps)
    one.close()
    with pytest.raises(StateError) as raised:
        next(steps)
    assert str(raised.value) == "this run cannot go on: its engine has been closed"


def test_a_step_says_when_weights_were_brought_to_copies() -> None:
    with engine(APART) as one:
        steps = list(one.run(SOURCES, 3))
    # Published and loaded once between two steps; nothing reads those of the last step.
    assert [len(step.weights_s) for step in steps][1] == 2
    assert all(start <= end for step in steps for start, end in step.weights_s)
    with engine() as one:
        assert [step.weights_s for step in one.run(SOURCES, 2)] == [(), ()]


class Listening(InProcess):
    """Asks what workers do whenever they are waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.ask: Callable[[], tuple[str, float] | None] = lambda: None

    def wait(self, timeout_s: float) -> Sequence[Completion | Restart]:
        working = self.ask()
        if working is not None:
            self.said.append(working[0])
        return super().wait(timeout_s)


def test_what_workers_do_now_is_said_in_words() -> None:
    listening = Listening()
    with engine(APART, executor=listening) as one:
        listening.ask = one.working
        assert one.working() is None
        list(one.run(SOURCES, 2))
        assert one.working() is None
    assert listening.said == [
        "step 1: model.sample",
        "step 1: model.train",
        "weights of model",
        "weights of model",
        "step 2: model.sample",
        "step 2: model.train",
    ]


# --- how long calls may take


class Deadlines(InProcess):
    """Notes what it is given."""

    def start(
        self,
        programs: Mapping[str, Program],
        workers: Mapping[str, WorkerSpec | Role],
        seed: int,
        deadline_s: float,
    ) -> None:
        self.given = deadline_s, {name: one.longest_s for name, one in programs.items()}
        super().start(programs, workers, seed, deadline_s)


@pytest.mark.parametrize(
    ("deadline_s", "predicted", "wait_s", "call_s"),
    [
        (None, {"model.sample": 2400.0, "model.train": 60.0}, 600.0, 12_000.0),
        (None, {"model.sample": 2.0}, 600.0, 600.0),
        (None, {}, 600.0, 600.0),
        (900.0, {"model.sample": 2400.0}, 900.0, 900.0),
    ],
)
def test_executors_wait_as_long_as_the_longest_call_may_take(
    deadline_s: float | None, predicted: Mapping[str, float], wait_s: float, call_s: float
) -> None:
    """An evaluation of which nothing is predicted has as long as the longest call of a step."""
    placement = replace(one_group(COUNT), predicted_s=predicted)
    executor = Deadlines()
    with Engine(
        COUNT,
        placement,
        workers={"model": CounterSpec()},
        schedule=Schedule() if deadline_s is None else Schedule(deadline_s=deadline_s),
        executor=executor,
        also={"look": Program(LOOK, one_group(LOOK))},
    ) as one:
        assert executor.given == (wait_s, {"main": call_s, "look": call_s})
        assert one.longest.limit_s == call_s
        flow = flow_of(LOOK, one.programs["look"].placement)
    longest_s = max(predicted.values(), default=None)
    assert {node.predicted_s for node in flow.nodes if node.group} == {longest_s}


# --- memory


def test_every_call_says_the_most_that_its_gpu_held(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine() as one:
        (step,) = one.run(SOURCES, 1)
    assert {span.peak_bytes for span in step.spans} == {0}, "without a GPU nothing is known"
    peaks: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peaks.append(0))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1000 + len(peaks))
    with engine() as one:
        (step,) = one.run(SOURCES, 1)
    assert [span.peak_bytes for span in step.spans] == [1001 + n for n in range(len(step.spans))]
