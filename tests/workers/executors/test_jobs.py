"""A rank that has died is started beside the others: when, and what is said of it meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from penstock.dataflow.errors import WorkerError
from penstock.dataflow.runtime.host import Host
from penstock.dataflow.runtime.messages import work
from penstock.dataflow.runtime.placement import DeviceGroup
from penstock.workers.executors import jobs
from penstock.workers.executors.jobs import RankJob, Returning
from penstock.workers.executors.process_backend import NotInTime
from penstock.workers.executors.rank_group import GroupProcesses, Started


class Group:
    """A group of replicas on machines that are there, whose processes build when they are told."""

    def __init__(self) -> None:
        self.group = DeviceGroup("rollout", 2)
        self.backend = self
        self.did: list[str] = []
        self.built: set[str] = set()
        self.is_gone = False

    def is_there(self) -> bool:
        return not self.is_gone

    def kill(self, rank: int) -> None:
        self.did.append(f"kill {rank}")

    def spawn(self, start_s: float, ranks: Sequence[int]) -> list[list[int]]:
        self.did.append(f"spawn {list(ranks)}")
        return []

    def join(self, together: Sequence[Sequence[int]]) -> list[str]:
        assert not together
        return []

    def call(self, process: int, method: str, *arguments: Any) -> str:
        return f"{method} {process}"

    def watch(self, refs: Sequence[str], timeout_s: float) -> list[str]:
        assert timeout_s == 0.0, "nobody waits for it"
        return [ref for ref in refs if ref in self.built]

    def get(self, refs: Sequence[str], timeout_s: float) -> list[None]:
        if not self.built.issuperset(refs):
            raise NotInTime
        return [None for _ in refs]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds that the test sets."""
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(jobs, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


@pytest.fixture
def group() -> Group:
    return Group()


def back(group: Group, pause_s: float = 0.0) -> Returning:
    job = RankJob(7, "main", "rollout", 1, work(Host.layout, "actor"), {1})
    here = Started(cast("Any", group), "hosted", seed=0, start_s=60.0)
    return Returning(cast("GroupProcesses", group), job, "it died", [job], pause_s, here)


def test_its_process_is_started_after_the_pause(clock: SimpleNamespace, group: Group) -> None:
    one = back(group, pause_s=4.0)
    clock.s += 3.9
    assert not one.is_ready()
    assert one.calls == []
    clock.s += 0.2
    assert not one.is_ready()
    assert group.did == ["kill 1", "spawn [1]"]
    assert one.calls == ["build 1"]
    group.built.add("build 1")
    assert one.is_ready()
    assert group.did == ["kill 1", "spawn [1]"], "once"


def test_what_it_owes_is_not_late(clock: SimpleNamespace, group: Group) -> None:
    one = back(group)
    signs = []
    for _ in range(5):
        signs.append(one.sign())
        clock.s += 0.5
    told = [sign for sign in signs if sign is not None]
    assert [(sign.took_s, sign.held_up_s) for sign in told] == [(0.0, 0.0), (1.0, 0.0), (2.0, 0.0)]
    assert not any(sign.is_over for sign in told)
    clock.s += 10.0
    over = one.is_back(since_s=clock.s - 2.0)
    assert (over.group, over.ranks, over.is_over) == ("rollout", (1,), True)
    assert (over.took_s, over.held_up_s) == (12.5, 2.0)


def test_it_must_start_in_time(clock: SimpleNamespace, group: Group) -> None:
    one = back(group)
    assert not one.is_ready()
    clock.s += 61.0
    with pytest.raises(WorkerError, match="a rank was still starting after 60 s"):
        one.is_ready()


def test_and_where_it_was(clock: SimpleNamespace, group: Group) -> None:
    del clock
    one, group.is_gone = back(group), True
    with pytest.raises(WorkerError, match="a machine that it was on is gone"):
        one.is_ready()
    assert "spawn [1]" not in group.did
