"""Executors on both backends, one for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from penstock.workers.executors.on_ray.executor import connect_ray, shutdown_ray

from .backends import Backend, OnRay, OnSpawned


@pytest.fixture(scope="module")
def spawned() -> Iterator[Backend]:
    """Plain processes, which show what the supervisor does."""
    one = OnSpawned()
    yield one
    one.backend.close()


@pytest.fixture(scope="module")
def on_ray() -> Iterator[Backend]:
    """Real Ray."""
    connect_ray()
    yield OnRay()
    shutdown_ray()


@pytest.fixture(scope="module", params=["spawned", "on_ray"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Both, one after the other."""
    return request.getfixturevalue(request.param)
