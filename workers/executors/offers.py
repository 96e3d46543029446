"""Snapshots of weights in slices that processes have ready for others."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

from ..weight_sync.channel import Offer
from .process_backend import Process, ProcessBackend

__all__ = ["Offers"]

_Key = tuple[str, int, int]
"""Group, process and number of an `Offer`."""


class Offers:
    """Has each process forget an offer once nothing here can ask for its weights any more."""

    def __init__(self) -> None:
        self._ready: dict[_Key, weakref.finalize[..., Any]] = {}

    def __len__(self) -> int:
        return len(self._ready)

    def watch(self, offer: Offer, backend: ProcessBackend, process: Process) -> None:
        """Note an offer, and the process that has it ready."""
        key = offer.group, offer.process, offer.number
        forget = weakref.finalize(offer, _forget, self._ready, key, backend, process)
        forget.atexit = False
        self._ready[key] = forget

    def drop(self, groups: Collection[str] | None = None) -> None:
        """The processes of some groups, or of all, have ended, and with them what was ready."""
        for key in [key for key in self._ready if groups is None or key[0] in groups]:
            self._ready.pop(key).detach()


def _forget(ready: dict[_Key, Any], key: _Key, backend: ProcessBackend, process: Process) -> None:
    del ready[key]
    backend.call(process, "forget", key[-1:])
