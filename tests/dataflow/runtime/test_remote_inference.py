"""Roles that are served: who may be asked what, and which version of the weights answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from penstock.dataflow.errors import PlanError, WorkerError
from penstock.dataflow.graph.role import Role, call
from penstock.dataflow.runtime.engine import Engine, StepResult
from penstock.dataflow.runtime.executor import Program
from penstock.dataflow.runtime.placement import DeviceGroup, Placement, flow_of
from penstock.dataflow.runtime.remote_inference import (
    Array,
    InferenceRequest,
    ServedRole,
    ServedWeights,
    remote_methods,
)
from penstock.dataflow.scheduler.schedule import Schedule

from . import watched


class Sums(NamedTuple):
    """What the request returns."""

    total: Array
    rest: Array | None


class Adder(Role):
    @call("forward")
    def look(self) -> None:
        raise NotImplementedError

    def add(self, left: Array, right: Array | None = None) -> Sums:
        raise NotImplementedError


class OneByOne(Adder):
    def add(self, left: Array, right: Array | None = None) -> Sums:
        if left.sum() < 0:
            raise ValueError("no debts")
        return Sums(left if right is None else left + right, right)


class Together(Adder):
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def answer_all(self, method: str, calls: Sequence[tuple[Array | None, ...]]) -> Sequence[Sums]:
        assert method == "add"
        self.sizes.append(len(calls))
        return [OneByOne().add(left, right) for left, right in calls if left is not None]


def asking(number: float, version: int = 3) -> InferenceRequest:
    return InferenceRequest("adder", "add", version, (np.full(2, number), None))


def holding(worker: Role, version: int | None = 3) -> ServedWeights:
    served_weights = ServedWeights("group 'server'")
    served_weights.add("adder", Adder, worker)
    served_weights.set_version("adder", version)
    return served_weights


def test_a_stand_in_asks_what_the_contract_says() -> None:
    served = ServedRole("adder", Adder, holding(OneByOne()).answer)
    adder = served.at(3)
    assert isinstance(adder, Adder)
    assert adder.add(np.ones(2), right=np.ones(2)).total.tolist() == [2, 2]
    assert adder.add(np.ones(2)).rest is None
    with pytest.raises(NotImplementedError):
        adder.look()


def test_questions_are_answered_together_where_a_worker_can() -> None:
    worker = Together()
    answers = holding(worker).answer_all([asking(1), asking(2, version=4), asking(3)])
    assert worker.sizes == [2]
    assert [answers[0].total[0], answers[2].total[0]] == [1, 3]
    assert isinstance(answers[1], WorkerError)


def test_one_that_fails_leaves_the_others_alone() -> None:
    good, bad = holding(OneByOne()).answer_all([asking(1), asking(-1)])
    assert good.total.tolist() == [1, 1]
    assert isinstance(bad, ValueError)


class Miscounting(Adder):
    def answer_all(self, method: str, calls: Sequence[tuple[Array | None, ...]]) -> Sequence[Sums]:
        return []


def test_one_that_fails_among_several_leaves_the_others_alone() -> None:
    worker = Together()
    good, bad, more = holding(worker).answer_all([asking(1), asking(-1), asking(2)])
    assert (good.total[0], more.total[0]) == (1, 2)
    assert isinstance(bad, ValueError)
    assert worker.sizes == [3, 1, 1, 1]


def test_whoever_does_not_answer_every_question_is_told() -> None:
    for answer in holding(Miscounting()).answer_all([asking(1), asking(2)]):
        assert isinstance(answer, WorkerError)
        assert str(answer) == (
            "'adder' gave 0 answers to 2 requests for 'add'; Miscounting.answer_all must return "
            "one for each, in order"
        )


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (2, "version 3 of the weights, but group 'server' holds version 2;"),
        (
            None,
            "version 3 of the weights, but group 'server' holds weights that are being changed;",
        ),
    ],
)
def test_another_version_refuses(held: int | None, message: str) -> None:
    adder = ServedRole("adder", Adder, holding(OneByOne(), held).answer).at(3)
    assert isinstance(adder, Adder)
    with pytest.raises(WorkerError) as caught:
        adder.add(np.ones(2))
    assert message in str(caught.value)
    assert str(caught.value).startswith("'adder.add' was called for")


def test_weights_that_change_while_they_answer_are_noticed() -> None:
    class Fickle(OneByOne):
        def add(self, left: Array, right: Array | None = None) -> Sums:
            served_weights.set_version("adder", 4)
            return super().add(left, right)

    served_weights = holding(Fickle())
    (answer,) = served_weights.answer_all([asking(1)])
    assert "holds version 4" in str(answer)


def test_what_is_no_question_is_refused() -> None:
    served_weights = holding(OneByOne())
    for asked in (
        InferenceRequest("adder", "look", 3, ()),
        InferenceRequest("adder", "__init__", 3, ()),
        InferenceRequest("other", "add", 3, ()),
        InferenceRequest("adder", "__class__", 3, ()),
        InferenceRequest("adder", "missing", 3, ()),
    ):
        (answer,) = served_weights.answer_all([asked])
        assert isinstance(answer, WorkerError)
    (answer,) = served_weights.answer_all([InferenceRequest("other", "add", 3, ())])
    assert str(answer) == "group 'server' does not serve 'other'; it serves adder"


def test_a_contract_without_questions_cannot_be_served() -> None:
    class Silent(Role):
        @call("forward")
        def look(self) -> None: ...

    class Odd(Role):
        def guess(self) -> float: ...

    assert remote_methods("adder", Adder) == {"add": Sums}
    with pytest.raises(PlanError, match="role 'silent' cannot be served: its contract Silent has"):
        remote_methods("silent", Silent)
    with pytest.raises(PlanError, match="'Odd.guess' returns <class 'float'>"):
        remote_methods("odd", Odd)


def seen(steps: list[StepResult]) -> list[float]:
    return [step.metrics["model.train/seen"] for step in steps]


@pytest.mark.parametrize("server", [None, "server", "main"])
@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_who_answers_changes_nothing(server: str | None, max_lag: int) -> None:
    placement = watched.placed(server)
    look = Program(watched.LOOK, watched.on(placement, watched.LOOK))
    engine = Engine(
        watched.WATCH,
        placement,
        workers=watched.WORKERS,
        schedule=Schedule(max_lag=max_lag),
        also={"look": look},
    )
    with engine:
        steps = list(engine.run(watched.SOURCES, 4))
        assert seen(steps) == [100.0 * max(0, step - max_lag) + 1.5 for step in range(4)]
        (looked,) = engine.run(watched.SOURCES, 1, program="look")
        assert looked.metrics["watcher.watch/mean"] == 401.5  # versions count from 0 again
        (again,) = engine.run(watched.SOURCES, 1)
        assert seen([again]) == [401.5]


def test_what_is_read_is_the_serving_group_s_copy() -> None:
    placement = watched.placed("server")
    assert placement.hosted_roles(watched.WATCH, "watch") == ("watcher",)
    assert placement.hosted_roles(watched.WATCH, "server") == ("model",)
    assert placement.serving(watched.WATCH) == (("model", "server"),)
    watch = next(n for n in flow_of(watched.WATCH, placement).nodes if n.name == "watcher.watch")
    assert [(read.role, read.at) for read in watch.reads] == [("model", "server")]


def moved(**groups: DeviceGroup) -> Placement:
    placement = watched.placed("server")
    changed = tuple(groups.get(group.name, group) for group in placement.groups)
    return Placement(changed, placement.nodes, num_chunks=2)


SERVED = {"model": "server"}


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (
            moved(watch=DeviceGroup("watch", served={"model": "severs"})),
            "group 'watch' is served 'model' by group 'severs', which is not declared; did you "
            "mean 'server'?",
        ),
        (
            moved(watch=DeviceGroup("watch", served={"watcher": "server"})),
            "role 'watcher' cannot be served: its contract Watcher has no method beside those that "
            "steps call, so a worker that is given it has nothing to call",
        ),
        (
            moved(server=DeviceGroup("server", tensor_parallel=2)),
            "group 'server' cannot serve 'model' to group 'watch': a rank of it is 2 processes, "
            "and requests are answered by one; set tensor_parallel=1 and pipeline_parallel=1",
        ),
        (
            moved(server=DeviceGroup("server", served={"model": "main"})),
            "group 'server' cannot serve 'model' to group 'watch': it is itself served by 'main'",
        ),
        (
            moved(
                server=DeviceGroup("server", devices=(0,)), main=DeviceGroup("main", devices=(0,))
            ),
            "group 'server' cannot serve 'model' to group 'watch': it shares devices, so it "
            "sleeps; give it its own",
        ),
        (
            Placement(
                (DeviceGroup("all", served=SERVED), DeviceGroup("server")),
                {"watcher.watch": "all", "model.train": "all"},
            ),
            "group 'server' cannot serve 'model' to group 'all': 'model.train' needs a copy there; "
            "place that node on another group",
        ),
    ],
)
def test_a_group_that_cannot_serve_is_refused(placement: Placement, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        flow_of(watched.WATCH, placement)
    assert str(caught.value) == message
