"""Devices of groups whose machine is gone are set aside anew, also for ranks that had joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from penstock.dataflow.errors import PlanError
from penstock.dataflow.runtime.placement import DeviceGroup
from penstock.workers.executors import rank_group
from penstock.workers.executors.process_backend import ProcessBackend
from penstock.workers.executors.rank_group import GroupProcesses, reserve_again


@dataclass
class Machine:
    """Where something was set aside, until it is lost."""

    names: set[str]
    is_lost: bool = False

    def is_there(self, group: str) -> bool:
        return not self.is_lost or group not in self.names

    def release(self, group: str) -> None:
        self.names.discard(group)


@dataclass
class Room:
    """A backend that has room for so many groups, and then for as many as somebody says."""

    left: int
    more_later: int = 0
    machines: list[Machine] = field(default_factory=list[Machine])

    def reserve(
        self, groups: Sequence[DeviceGroup], timeout_s: float, *options: Any, held: Any = ()
    ) -> Machine:
        if len(groups) > self.left:
            self.left, self.more_later = self.left + self.more_later, 0
            raise PlanError("no room")
        self.left -= len(groups)
        self.machines.append(Machine({group.name for group in groups}))
        return self.machines[-1]

    @property
    def reserved(self) -> list[str]:
        return sorted(name for machine in self.machines for name in machine.names)


def group_on(room: Room, num_joined: int = 0) -> GroupProcesses:
    backend = cast("ProcessBackend", room)
    group = GroupProcesses(backend, DeviceGroup("rollout", 2), 1, 60.0, b"", replicas=True)
    group.devices = backend.reserve([group.group], 60.0)
    group.reserve(range(2, 2 + num_joined), [])
    group.num_ranks = 2 + num_joined
    return group


def test_all_that_is_gone_is_set_aside_again_once_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_group, "_POLL_S", 0.01)
    room = Room(left=3)
    group = group_on(room, 2)
    assert room.reserved == ["rollout", "rollout[2]", "rollout[3]"]
    first, second, third = room.machines
    first.is_lost = second.is_lost = True
    assert not group.is_there()
    room.more_later = 2  # after the first try
    reserve_again(cast("ProcessBackend", room), [group], [], set(), 5.0)
    assert group.is_there()
    assert room.reserved == ["rollout", "rollout[2]", "rollout[3]"]
    assert group.devices is not first
    assert third.names == {"rollout[3]"}, "it was not lost"


def test_without_room_it_is_said_and_tried_anew_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_group, "_POLL_S", 0.01)
    room = Room(left=1)
    group = group_on(room)
    room.machines[0].is_lost = True
    backend = cast("ProcessBackend", room)
    with pytest.raises(PlanError, match="no room"):
        reserve_again(backend, [group], [], set(), 0.05)
    assert not group.is_there()
    room.left = 1
    reserve_again(backend, [group], [], set(), 0.05)
    assert group.is_there()


def test_ranks_that_join_get_devices_all_or_none() -> None:
    room = Room(left=2)
    group = group_on(room)
    with pytest.raises(PlanError, match="no room"):
        group.reserve(range(2, 5), [])
    assert room.reserved == ["rollout"]
