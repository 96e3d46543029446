"""Groups whose processes have died: who they are, and starting them again.

What they had and owed is the business of whoever asks for it; see `Executor.revive`.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from ...dataflow.errors import PlanError
from .process_backend import BackendError, ProcessBackend, ProcessDied, Ref
from .rank_group import RankGroup

_NOTICE_S = 5.0
"""How long an answer is waited for: who gives none is busy, or its death is not known yet."""

_OTHERS_S = 0.5
"""The same once one is known to be dead: what ends a machine ends several."""

_POLL_S = 2.0
"""How often is looked whether there are devices again."""


def dead_processes(
    backend: ProcessBackend, groups: Iterable[RankGroup], returning: Collection[tuple[str, int]]
) -> dict[tuple[str, int], str]:
    """Group and rank of which a process has died -> one line that says how.

    Of ranks that have not joined their group yet nothing is said: nobody depends on them. Nor is
    anything of those that are `returning`: they are being started again.
    """
    left: dict[Ref, tuple[str, int]] = {}
    for group in groups:
        ranks = [r for r in range(group.num_ranks) if (group.group.name, r) not in returning]
        for rank in ranks:
            for process in group.group.processes(rank):
                left[group.call(process, "is_running")] = group.group.name, rank
    dead: dict[tuple[str, int], str] = {}
    end_s = time.monotonic() + _NOTICE_S
    while left and (left_s := end_s - time.monotonic()) > 0:
        for ref in backend.watch(list(left), left_s):
            place = left.pop(ref)
            if said := _death(backend, ref):
                dead[place] = said
                end_s = min(end_s, time.monotonic() + _OTHERS_S)
    return dead


def _death(backend: ProcessBackend, answered: Ref) -> str:
    """How the process died that was called; "" if it lives."""
    try:
        backend.get([answered], _NOTICE_S)
    except ProcessDied as error:
        return str(error)
    except BackendError:  # it cannot say so, but it has answered
        return ""
    return ""


def reserve_again(
    backend: ProcessBackend,
    groups: Sequence[RankGroup],
    others: Sequence[RankGroup],
    training: Collection[str],
    timeout_s: float,
) -> None:
    """Set devices aside anew for groups of which some are gone with their machine.

    Waits for them to come back, or for others in their place.

    Args:
        backend: What has them.
        groups: Those that are about to be started again.
        others: All others.
        training: Names of those that cannot do without each other.
        timeout_s: How long to wait.

    Raises:
        PlanError: If there are none in time; says which and where.
    """
    for one in groups:
        one.give_back_lost()
    end_s = time.monotonic() + timeout_s
    while True:
        left_s = end_s - time.monotonic()
        try:
            _reserve(backend, groups, others, training, max(left_s, _POLL_S))
        except PlanError:
            if left_s < _POLL_S:
                raise
            time.sleep(_POLL_S)
        else:
            return


def _reserve(
    backend: ProcessBackend,
    groups: Sequence[RankGroup],
    others: Sequence[RankGroup],
    training: Collection[str],
    timeout_s: float,
) -> None:
    """Once, for those that have none; ranks that have joined have theirs each."""
    held: list[Any] = [held for one in (*groups, *others) for held in one.reservations]
    without = [one for one in groups if one.devices is None]
    if without:
        wanted = [one.group for one in without]
        devices = backend.reserve(wanted, timeout_s, set(training), held)
        held.append(devices)
        for one in without:
            one.devices = devices
    for one in groups:
        one.reserve(range(one.num_ranks), held)
