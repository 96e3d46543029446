"""What the tests of tools ask about processes."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import pytest

Children = Callable[[], list[psutil.Process]]


@pytest.fixture
def children() -> Children:
    """Lists the children that this process has got since the test began."""
    before = set(psutil.Process().children())
    return lambda: [one for one in psutil.Process().children() if one not in before]
