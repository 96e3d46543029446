"""Helpers for tests of recording."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from inspect import cleandoc

import pytest
from penstock.dataflow.errors import FlowError
from penstock.dataflow.graph.check import FlowWarning
from penstock.dataflow.graph.tracer import build


@pytest.fixture
def refuses() -> Callable[[Callable[..., object], str], None]:
    """Checks the whole text of the error that recording a step raises.

    `{n}` in the expected text stands for the number of the step's n-th line after its `def`.
    """

    def check(step: Callable[..., object], expected: str) -> None:
        first = step.__code__.co_firstlineno
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FlowWarning)
            with pytest.raises(FlowError) as caught:
                build(step)
        assert str(caught.value) == cleandoc(expected).format(*range(first, first + 40))

    return check
