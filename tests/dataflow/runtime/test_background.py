"""Functions in threads of their own."""

from __future__ import annotations

import threading

import pytest
from penstock.dataflow.runtime.background import Background


def test_its_end_is_waited_for_with_a_deadline() -> None:
    gate = threading.Event()
    one = Background(lambda: gate.wait(60.0), "gate")
    assert not one.wait(0.01)
    gate.set()
    assert one.wait(60.0)
    assert one.result() is True


def test_what_it_raises_is_raised_again() -> None:
    def fail() -> None:
        raise KeyError("x")

    one = Background(fail, "fail")
    assert one.wait(60.0)
    with pytest.raises(KeyError, match="x"):
        one.result()
