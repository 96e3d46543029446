"""Processes of an executor that has stopped, put by for the next one.

Only those that are dear to start: whose workers all leave something behind for the next of their
kind, as vLLM's engine is. They end with Ray, or when an executor starts that has no use for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from ....dataflow.runtime.worker_protocol import CLOSE_S
from .actor_group import ActorGroup, end_actors

__all__ = ["Parkable", "forget_parked", "park_groups", "take_parked"]

_PARKED: list[ActorGroup] = []


@runtime_checkable
class Parkable(Protocol):
    """A worker that leaves something dear behind for the next of its kind in the process."""

    def park(self) -> None:
        """In place of `close`; nothing is asked of the worker afterwards."""
        ...


def park_groups(groups: Sequence[ActorGroup]) -> Sequence[ActorGroup]:
    """Put groups by whose workers can be parked.

    Returns:
        The others, which are to be ended.
    """
    others: list[ActorGroup] = []
    for group in groups:
        answers = _answers([actor.park.remote() for actor in group.actors])
        (_PARKED if answers and all(answers) else others).append(group)
    return others


def take_parked(groups: Sequence[ActorGroup]) -> None:
    """Give new groups the processes of parked ones that are like them, and end all others."""
    parked = list(_PARKED)
    _PARKED.clear()
    for group in groups:
        found = next((other for other in parked if other.key == group.key), None)
        if found is not None and _answers([a.__ray_ready__.remote() for a in found.actors]):
            group.actors, group.is_parked, group.num_starts = found.actors, True, 1
            parked.remove(found)
    end_actors([actor for group in parked for actor in group.actors], closing=True)


def forget_parked() -> None:
    """Once Ray has ended them."""
    _PARKED.clear()


def _answers(asked: list[Any]) -> list[Any]:
    """What all of them answer; nothing if one does not."""
    import ray
    from ray.exceptions import RayError

    try:
        return ray.get(asked, timeout=CLOSE_S)
    except RayError:
        return []
