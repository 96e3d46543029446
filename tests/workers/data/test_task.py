"""What importing tasks brings with it, the report's text, and when it stops a run."""

from __future__ import annotations

import subprocess
import sys

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.workers.data.task import DataReport


@pytest.mark.slow
def test_importing_is_free() -> None:
    code = (
        "import sys, penstock.workers.data.task, penstock.workers.data.reasoning_task, "
        "penstock.workers.verifiers.verifiers, penstock.workers.data.row_sources\n"
        "print([m for m in ('torch', 'reasoning_gym', 'datasets', 'math_verify', 'transformers') "
        "if m in sys.modules])\n"
        "import penstock.workers.data.sources, penstock.workers.rewards.rule_reward\n"
        "print([m for m in ('reasoning_gym', 'datasets', 'math_verify', 'transformers') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n[]\n", done.stderr


def _report(num_kept: int, num_bad: int) -> DataReport:
    report = DataReport("a.jsonl", num_examples=2)
    report.keep(num_kept)
    for line in range(num_bad):
        report.reject(f"a.jsonl:{line + 1}", "empty prompt" if line % 2 else "equal pair", "why")
    return report


def test_text() -> None:
    assert str(_report(3, 0)) == "a.jsonl: 3 of 3 rows kept"
    assert str(_report(7, 3)) == (
        "a.jsonl: 7 of 10 rows kept, 3 left out\n"
        "    2 x equal pair\n"
        "    1 x empty prompt\n"
        "    a.jsonl:1: equal pair: why\n"
        "    a.jsonl:2: empty prompt: why\n"
        "    ... and 1 more"
    )


def test_check_at_and_above_the_limit() -> None:
    _report(9, 1).check(0.1)
    _report(0, 0).keep()
    with pytest.raises(ConfigError) as caught:
        _report(8, 1).check(0.1)
    assert str(caught.value) == (
        "a.jsonl: 8 of 9 rows kept, 1 left out\n"
        "    1 x equal pair\n"
        "    a.jsonl:1: equal pair: why\n"
        "    that is more than max_bad_fraction=0.1 of all rows; fix them, or raise "
        "max_bad_fraction to go on without them"
    )


def test_check_with_nothing_left() -> None:
    with pytest.raises(ConfigError, match="no row is left to use"):
        _report(0, 2).check(1.0)
    with pytest.raises(ConfigError) as caught:
        _report(0, 0).check(1.0)
    assert str(caught.value) == "a.jsonl has no rows\n    give a file with at least one row"


def test_joined_and_dropped() -> None:
    report = _report(5, 1).joined(_report(4, 2))
    report.drop("a.jsonl:9", "prompt is held out")
    assert (report.num_kept, report.num_bad, report.num_rows) == (8, 4, 12)
    assert report.source == "a.jsonl and a.jsonl"
    assert dict(report.reasons) == {"equal pair": 2, "empty prompt": 1, "prompt is held out": 1}


def test_how_long_the_rows_are_stands_in_one_line() -> None:
    report = DataReport("prompts of task 'sums'")
    report.keep(10)
    report.reject("a.jsonl:3", "over-long prompt")
    assert report.with_lengths({"prompt": [*range(1, 10), 30], "response": [2]}, 4) == (
        "prompts of task 'sums': 10 rows (4 held out), 9.1% left out; prompt tokens mean 7.5, p50 "
        "5, p90 9, max 30; response tokens mean 2.0, p50 2, p90 2, max 2"
    )
