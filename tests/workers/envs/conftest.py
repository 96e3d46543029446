"""Environments that the tests of this folder use."""

from __future__ import annotations

import pytest

from .toys import register


@pytest.fixture(autouse=True)
def _toys() -> None:  # pyright: ignore[reportUnusedFunction]
    register()
