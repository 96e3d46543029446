"""The warm pool: processes of an executor that has stopped, kept for the next one.

Only those that are expensive to start are kept: whose workers all leave an engine behind for the
next of their kind, as vLLM's do. They end with their backend, or when an executor starts that has
no use for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...dataflow.runtime.worker_protocol import CLOSE_S
from .process_backend import BackendError, ProcessBackend, Ref
from .rank_group import RankGroup, end_groups

__all__ = ["forget_warm", "keep_warm", "take_warm"]

_WARM: list[RankGroup] = []


def keep_warm(groups: Sequence[RankGroup]) -> list[RankGroup]:
    """Keep the groups whose workers all leave an engine behind.

    Returns:
        The others, which are to be ended.
    """
    others: list[RankGroup] = []
    for group in groups:
        answers = _answers(group, group.call_all("keep_warm"))
        (_WARM if answers and all(answers) else others).append(group)
    return others


def take_warm(backend: ProcessBackend, groups: Sequence[RankGroup]) -> None:
    """Give new groups the processes of warm ones that are like them, and end all others."""
    warm = [group for group in _WARM if group.backend == backend]
    forget_warm(backend)
    for group in groups:
        found = next((other for other in warm if other.key == group.key), None)
        if found is not None and _answers(found, found.call_all("is_running")):
            group.processes, group.is_warm, group.num_starts = found.processes, True, 1
            warm.remove(found)
    end_groups(warm, closing=True)


def forget_warm(backend: ProcessBackend) -> None:
    """Once the backend has ended them."""
    _WARM[:] = [group for group in _WARM if group.backend != backend]


def _answers(group: RankGroup, calls: Sequence[Ref]) -> list[bool]:
    """What all of its processes answer; nothing if one does not."""
    try:
        return group.backend.get(calls, CLOSE_S)
    except BackendError:
        return []
