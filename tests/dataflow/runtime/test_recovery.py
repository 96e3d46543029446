"""What becomes of wishes for replicas, whoever carries them out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from penstock.dataflow.errors import PlanError
from penstock.dataflow.runtime import recovery
from penstock.dataflow.runtime.executor import Program
from penstock.dataflow.runtime.placement import flow_of
from penstock.dataflow.runtime.recovery import Resizing, Scale
from penstock.dataflow.scheduler.events import Resize, ResizeGroup

from ..counter import COUNT, apart


@dataclass
class Elastic:
    """An executor with as many devices as somebody says."""

    room: int = 1
    ready: bool = True
    prepared: list[int] = field(default_factory=list[int])
    elastic: bool = True

    def prepare(self, group: str, num_ranks: int) -> bool:
        self.prepared.append(num_ranks)
        if num_ranks > self.room:
            raise PlanError("no device is free")
        return self.ready

    def resize(self, group: str, num_ranks: int) -> int:
        return num_ranks


@dataclass
class Wishes:
    size: int = 1
    version: int = 0
    told: list[str] = field(default_factory=list[str])

    def ask(self, size: int) -> None:
        self.size, self.version = size, self.version + 1


@pytest.fixture
def wishes() -> Wishes:
    return Wishes()


@pytest.fixture
def made(wishes: Wishes, monkeypatch: pytest.MonkeyPatch) -> tuple[Resizing, Elastic]:
    monkeypatch.setattr(recovery, "_LOOK_S", 0.0)
    placement = apart(COUNT, num_chunks=4, model__sample="rollout")
    elastic: Any = Elastic()
    scale = Scale(lambda: {"rollout": wishes.size}, wishes.told.append, lambda: wishes.version)
    program = Program(COUNT, placement)
    return Resizing(scale, elastic, {"main": program}, flow_of(COUNT, placement), {}), elastic


def test_what_was_refused_is_tried_again_when_it_is_wished_again(
    wishes: Wishes, made: tuple[Resizing, Elastic]
) -> None:
    resize, elastic = made
    wishes.ask(3)
    assert [resize.look(0.0) for _ in range(3)] == [[], [], []]
    refused = "group 'rollout' cannot have 3 ranks: no device is free; it still has 1"
    assert (wishes.told, elastic.prepared) == ([refused], [3])
    elastic.room = 3
    assert resize.look(0.0) == []
    wishes.ask(3)
    assert resize.look(0.0) == [Resize("rollout", 3, 0.0)]
    resize.carry_out(ResizeGroup("rollout", 3), 0.0)
    assert wishes.told == [refused, "group 'rollout' has 3 ranks, and had 1"]


def test_those_on_their_way_are_given_up_if_they_are_not_wanted(
    wishes: Wishes, made: tuple[Resizing, Elastic]
) -> None:
    resize, elastic = made
    elastic.room, elastic.ready = 4, False
    wishes.ask(4)
    assert resize.look(0.0) == []
    elastic.ready = True
    wishes.ask(1)
    assert [resize.look(0.0) for _ in range(2)] == [[], []]
    assert elastic.prepared == [4, 1]
