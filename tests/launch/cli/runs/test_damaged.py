"""`penstock runs` beside a damaged run: the others are listed, compared and plotted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from penstock.launch.run_dir.run_folder import RunFolder

from ...conftest import Penstock
from .conftest import Make

DONE = {"num_steps": 2, "accuracy_after_rl": 0.5}


@pytest.fixture
def good(make: Make) -> list[RunFolder]:
    return [make(seed, "1e-5", DONE, [2.0, 1.0]) for seed in (1, 2)]


@pytest.fixture
def bad(make: Make) -> RunFolder:
    return make(0, "1e-5", DONE, [2.0, 1.0])


def about(**changed: object) -> str:
    known = {"name": "grpo", "seed": 0, "created": "2026-11-21T03:14:54+00:00", "code": {}}
    return json.dumps({**known, "code": {"package": "0.1.0"}, **changed})


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.json", about(created="2026-11-21T03:14:54")),
        ("run.json", about(seed=float("inf"))),
        ("run.json", about(code={"package": "1", "commit": 5})),
        ("run.json", "["),
        ("summary.json", "[1]"),
        ("summary.json", '"a"'),
        ("summary.json", "5"),
        ("summary.json", None),  # a FIFO
    ],
)
@pytest.mark.timeout(60)
def test_one_damaged_run_is_shown_with_its_fault_and_the_others_go_on(
    penstock: Penstock, good: list[RunFolder], bad: RunFolder, name: str, content: str | None
) -> None:
    path = bad.path / name
    path.unlink()
    if content is None:
        os.mkfifo(path)
    else:
        path.write_text(content)
    said = penstock("runs", "list")
    assert (said.code, said.err) == (0, "")
    assert all(run.id in said.out for run in good)
    assert f"{bad.id}: " in said.out
    assert name in said.out.splitlines()[-1]
    said = penstock("runs", "plot", "*", "metric=a.train/loss")
    assert said.code == 0, said.err
    assert said.err.startswith(f"penstock: run '{bad.id}' is left out: ")
    assert said.out.splitlines()[1].split()[3] == "2"
    said = penstock("runs", "compare", "*seed1", "*seed[02]")
    assert said.code == 0, said.err
    assert f"run '{bad.id}' is left out: " in said.err
    for action in ("show", "reproduce"):
        said = penstock("runs", action, bad.id)
        assert said.code == 2
        assert said.err.startswith(f"penstock: run '{bad.id}': ")


def test_a_metric_that_is_a_text_is_named_and_the_others_are_drawn(
    penstock: Penstock, good: list[RunFolder], bad: RunFolder
) -> None:
    bad.metrics.write_text('{"step": 0, "wall_time_s": 0.0, "a.train/loss": "low"}\n')
    said = penstock("runs", "show", bad.id)
    assert said.code == 2
    assert "metrics.jsonl:1: expected a JSON object" in said.err
    said = penstock("runs", "plot", "*", "metric=a.train/loss")
    assert said.code == 0, said.err
    assert f"run '{bad.id}' is left out: " in said.err
    assert said.out.splitlines()[1].split()[3] == "2"


@pytest.mark.timeout(20)
def test_what_is_imported_must_be_a_file(penstock: Penstock) -> None:
    os.mkfifo("it.run")
    assert penstock("runs", "import", "it.run").code == 2
    Path("curves.csv").symlink_to("/dev/zero")
    assert penstock("runs", "import", "curves.csv", "as=csv").code == 2
