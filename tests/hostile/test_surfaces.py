"""One case of each kind of `benchmarks/fuzz_surfaces.py`: run folders, adapters, archives, the API.

A case is of a seed, as in the benchmark, which tries a thousand. Nothing may be wrong with how it
ends: no traceback, no error without a message, no silent acceptance, nothing outside its folder.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
NUM_KINDS = 52


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, list[Any]]]:
    sys.path.insert(0, BENCHMARKS)
    commands = importlib.import_module("fuzz_case").Commands()
    made = importlib.import_module("fuzz_ground").ground(
        tmp_path_factory.mktemp("ground"), commands
    )
    cases = importlib.import_module("fuzz_surfaces").surface_cases(made, seed=0)
    yield commands, sorted(islice(cases, NUM_KINDS), key=lambda case: case[0])
    commands.close()
    sys.path.remove(BENCHMARKS)


def test_the_seed_tries_every_kind(tried: tuple[Any, list[Any]]) -> None:
    assert len({kind for kind, _ in tried[1]}) == NUM_KINDS
    assert len(importlib.import_module("fuzz_ground").KINDS) == NUM_KINDS


@pytest.mark.parametrize("number", range(NUM_KINDS))
def test_one_case_of_each_kind(number: int, tried: tuple[Any, list[Any]]) -> None:
    commands, cases = tried
    kind, case = cases[number]
    outcome = commands.run(case, limit_s=60.0)
    assert outcome.faults == (), f"{kind}: {case.command}\n{case.what}\n{outcome.said}"
