"""A slower checkout is found by running it in turns with this one, and an equal one is not."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest
from penstock.launch.run_dir.run_folder import RunFolder

from ...conftest import Penstock
from ..test_run import TINY, only_run
from .conftest import Make

BENCHMARKS = str(Path(__file__).parents[4] / "benchmarks")


@pytest.mark.nightly
def test_the_slower_of_two_checkouts(
    penstock: Penstock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    slow_checkout = importlib.import_module("slow_checkout").slow_checkout
    assert penstock("run", "algorithm=sft", *TINY, "algorithm.per_step.demos=8").code == 0
    # Three times as long and a tolerance that lets every noise pass: no timing decides this.
    slow = slow_checkout(tmp_path / "slow", 2.0)
    words = ("runs", "regress", only_run().name, "pairs=2")
    said = penstock(*words, f"checkout={slow}", "slower=1000%")
    assert said.code == 0, said.err
    assert "different weights" not in said.out
    assert "not slower: 0." in said.out
    assert said.out.endswith(" times the other checkout's run/step_time_s, 2 pairs\n")
    assert [*(tmp_path / "runs").iterdir()] == [tmp_path / only_run()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["checkout=nowhere"],
            "'checkout': 'nowhere' has no .venv/bin/python\n    set it up: make -C nowhere setup",
        ),
        (["checkout=it", "pairs=1"], "'pairs': expected at least 2, got 1"),
        (["checkout=it", "slower=x"], "'slower': expected a tolerance such as 0.02 or 5%, got 'x'"),
        (
            ["checkout=it", "without=num_steps"],
            "penstock runs regress: 'without' says nothing with 'checkout'",
        ),
        (["write=it", "pairs=3"], "penstock runs regress: 'pairs' says nothing with 'write'"),
        (
            ["checkout=it", "seed=0"],
            "penstock runs regress: checkout=FOLDER takes one run, which is run again and again, "
            "got 1 and 1 keys",
        ),
        (
            ["checkout=it", "write=it"],
            "penstock runs regress: give reference=FILE to hold runs against, write=FILE to make "
            "one of them, or checkout=FOLDER to run one in turns with another source tree",
        ),
    ],
)
def test_what_cannot_be(penstock: Penstock, make: Make, words: list[str], message: str) -> None:
    folder: RunFolder = make(0, "1.0e-05", {"num_steps": 2})
    said = penstock("runs", "regress", folder.id, *words)
    assert (said.code, said.out) == (2, "")
    assert said.err == f"penstock: {message}\n"


def test_a_checkout_that_fails(penstock: Penstock, make: Make, tmp_path: Path) -> None:
    python = tmp_path / "it" / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho it cannot >&2\nexit 3\n")
    os.chmod(python, 0o755)
    said = penstock("runs", "regress", make(0, "1.0e-05", {"num_steps": 2}).id, "checkout=it")
    assert said.code == 1
    assert "failed when" in said.err
    assert said.err.endswith("ran it again\n    it cannot\n")
