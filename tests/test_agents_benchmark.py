"""What `benchmarks/agents.py` compares conversations with, and the conversations themselves."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")


@pytest.fixture(scope="module")
def scripts() -> Iterator[tuple[Any, Any]]:
    sys.path.insert(0, BENCHMARKS)
    yield importlib.import_module("agents_ideal"), importlib.import_module("agents_task")
    sys.path.remove(BENCHMARKS)


@pytest.mark.parametrize(
    ("waits", "expected"),
    [
        ([0.0, 0.0], 4.0),  # all generating
        ([0.5, 1.0], 4.5),  # the longer one, which waits least
        ([0.5, 3.0], 5.0),  # the shorter one: half of the tokens, and a long wait
    ],
)
def test_the_ideal_is_the_longest_chain(
    scripts: tuple[Any, Any], waits: list[float], expected: float
) -> None:
    held = scripts[0].Held(9.0, [10, 5], waits, 0, 0, 0.0)
    assert scripts[0].ideal_s(held, 4.0) == pytest.approx(expected)


def test_waits_change_no_conversation(scripts: tuple[Any, Any], tmp_path: Path) -> None:
    scripts[1].chain_folder(tmp_path, hidden=64, layers=1)
    with scripts[0].talk_of("torch", tmp_path, 3, 3, 0.02) as talk:
        together, held = talk.hold(waits=False), talk.hold(waits=True)
    assert held.own_tokens == together.own_tokens
    assert min(held.own_tokens) >= 3 * 10  # a word of each group, a call and the end
    assert sum(together.wait_s) == 0 < min(held.wait_s) < max(held.wait_s) < 2 * 0.02
    # Of the tokens before a later turn all are held but the last.
    assert held.reused == held.known - 3 * 2
