"""The backends on which the tests of executors run: plain processes, and Ray."""

from __future__ import annotations

import contextlib
import re
from typing import Protocol

import psutil
import pytest
from penstock.workers.executors.on_ray.executor import RayExecutor
from penstock.workers.executors.process_backend import ProcessBackend
from penstock.workers.executors.supervisor import Supervisor
from penstock.workers.weight_sync.channel import Transport

from .spawned import SpawnedBackend, SpawnedExecutor

ON_RAY_AT_NIGHT = pytest.mark.parametrize(
    "backend", ["spawned", pytest.param("on_ray", marks=pytest.mark.nightly)], indirect=True
)
"""Of a test that shows what the supervisor does, and needs long on Ray to show the same."""


class Backend(Protocol):
    """What tests need of a backend."""

    def executor(self, *, transport: Transport = "object_store") -> Supervisor:
        """One that uses it; a thread per process."""
        ...

    def connect(self) -> ProcessBackend:
        """The backend itself."""
        ...

    def pids(self) -> list[int]:
        """Processes of ranks that are alive."""
        ...


class OnSpawned:
    def __init__(self) -> None:
        self.backend = SpawnedBackend()

    def executor(self, *, transport: Transport = "object_store") -> Supervisor:
        return SpawnedExecutor(self.backend, 1, transport=transport)

    def connect(self) -> ProcessBackend:
        return self.backend

    def pids(self) -> list[int]:
        return self.backend.pids()


class OnRay:
    def executor(self, *, transport: Transport = "object_store") -> Supervisor:
        return RayExecutor(1, transport=transport)

    def connect(self) -> ProcessBackend:
        from penstock.workers.executors.on_ray.backend import RayBackend

        return RayBackend()

    def pids(self) -> list[int]:
        found: list[int] = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if re.match(r"ray::[^\[]+\[\d+\]", process.name()):
                    found.append(process.pid)
        return found
