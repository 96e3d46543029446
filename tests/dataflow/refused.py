"""Steps that recording refuses."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from penstock.dataflow.errors import FlowError
from penstock.dataflow.graph.check import FlowWarning
from penstock.dataflow.graph.tracer import build


def refused(
    expected: str, *, line: int | None = None
) -> Callable[[Callable[..., object]], Callable[[], None]]:
    """Make a step into a test: recording it fails at a line, and says `expected` behind that line.

    Lines are those of the step's body, from 1 on; by default it is the last one. `{n}` in the text
    stands for the place of the n-th. Line 0 is where the function begins: at its decorator.
    """

    def test_of(step: Callable[..., object]) -> Callable[[], None]:
        def check() -> None:
            lines, first = inspect.getsourcelines(step)
            begins = next(n for n, text in enumerate(lines) if text.lstrip().startswith("def "))
            start = next(n for n in range(begins, len(lines)) if lines[n].endswith(":\n"))
            numbers = [first, *range(first + start + 1, first + len(lines))]
            places = [f"{Path(step.__code__.co_filename).name}:{number}" for number in numbers]
            at = len(places) - 1 if line is None else line
            source = lines[start + at].strip() if at else f"def {step.__name__}(...)"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FlowWarning)
                with pytest.raises(FlowError) as caught:
                    build(step)
            said = [line.strip() for line in expected.format(*places).splitlines()]
            assert str(caught.value).splitlines() == [
                places[at],
                f"    {source}",
                said[0],
                *(f"    {line}" for line in said[1:]),
            ]

        return check

    return test_of
