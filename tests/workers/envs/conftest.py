"""Environments that the tests of this folder use, and processes in which they run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..executors.spawned import SpawnedBackend
from .toys import register_all


@pytest.fixture(autouse=True)
def _toys() -> None:  # pyright: ignore[reportUnusedFunction]
    register_all()


@pytest.fixture(scope="module")
def apart() -> Iterator[SpawnedBackend]:
    backend = SpawnedBackend()
    yield backend
    backend.close()
