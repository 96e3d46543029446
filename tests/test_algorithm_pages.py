"""docs/algorithms says what the code says."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.placement import one_group

from .algorithms.configured import configured

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "algorithms"
NAMES = sorted(p.stem for p in (ROOT / "configs" / "algorithm").glob("*.yaml") if p.stem != "own")
AGAIN = "run: python benchmarks/algorithm_pages.py"


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("algorithm_pages")
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.slow
def test_what_is_generated_is_up_to_date(scripts: Any) -> None:
    made: dict[Path, str] = scripts.files()
    assert len(made) > 2 * len(NAMES)
    stale = [path.name for path, text in made.items() if path.read_text() != text]
    assert stale == [], AGAIN


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_has_a_page_with_all_its_parts(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text()
    for part in ("Formula", "Paper", "Graph", "Run it", "Flags", "Metrics"):
        assert page.count(f"\n## {part}\n") == 1, part
    assert "To be written" not in page


def test_a_picture_of_no_algorithm_is_left() -> None:
    assert sorted(p.stem for p in (PAGES / "graphs").glob("*.svg")) == NAMES


def test_from_ppo_to_remax_it_is_16_lines(scripts: Any) -> None:
    """One of them empties the masks of rows without a score, for PPO's critic."""
    step, _ = scripts.difference(scripts.loaded("ppo"), scripts.loaded("remax"))
    assert step.added + step.removed <= 16


def test_every_public_function_is_listed(scripts: Any) -> None:
    index = (PAGES / "index.md").read_text()
    for module in ("ops.advantages", "ops.returns", "losses", "ops.rewards"):
        made = importlib.import_module(f"penstock.algorithms.{module}")
        own = [n for n, x in vars(made).items() if getattr(x, "__module__", "") == made.__name__]
        functions = [n for n in getattr(made, "__all__", own) if n[0].islower()]
        assert functions
        assert [n for n in functions if f"(functions.md#{n})" not in index] == [], AGAIN


def test_modules_used_one_by_one_have_entries_with_their_imports() -> None:
    page = (PAGES / "functions.md").read_text()
    named = {"ops.distributions": "masked_logits", "ops.value_transforms": "symlog"}
    named |= {"ops.final_state": "with_final_state", "ops.rollout_correction": "RolloutCorrection"}
    lines = [f"`from penstock.algorithms.{m} import {name}`" for m, name in named.items()]
    assert [line for line in lines if line not in page] == [], AGAIN


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dqn", "population"])
def test_the_metrics_of_a_page_are_those_that_its_calls_log(name: str) -> None:
    small = configured(name)
    with Engine(small.graph, one_group(small.graph), workers=small.workers) as engine:
        *_, last = engine.run(small.sources, 4)
    page = (PAGES / f"{name}.md").read_text()
    listed = set(re.findall(r"^\| `([\w.]+/\w+)` \|", page, re.MULTILINE))
    calls = {metric.split("/")[0] for metric in listed}
    index = (PAGES / "index.md").read_text()
    always = set(re.findall(r"^\| `\w+\.train/(\w+)` \|", index, re.MULTILINE))
    logged = {metric for metric in last.metrics if metric.split("/")[0] in calls}
    assert listed == {metric for metric in logged if metric.split("/")[-1] not in always}


@pytest.mark.parametrize("name", ["codpo", "crraft", "kimi", "online_dpo", "p3o", "rebel"])
def test_a_page_lists_no_correction_where_none_is_taken(name: str) -> None:
    assert "| `correction`" not in (PAGES / f"{name}.md").read_text(), AGAIN


def test_a_page_says_that_a_correction_is_refused() -> None:
    line = (
        "| `correction` | `null` |  | This algorithm takes none: any value but `null` is refused. |"
    )
    assert line in (PAGES / "vtrace_ppo.md").read_text(), AGAIN
