"""`penstock runs export` and `import`, as typed."""

from __future__ import annotations

from pathlib import Path

import pytest
from penstock.launch.run_dir.run_folder import RunFolder

from ...conftest import Penstock
from .conftest import Make

DONE = {"num_steps": 2, "accuracy_after_rl": 0.5, "weights_sha256": "a" * 64}


@pytest.fixture
def run(make: Make) -> RunFolder:
    return make(0, "1e-5", DONE, [2.0, 1.0])


def test_an_exported_run_is_imported_unchanged(penstock: Penstock, run: RunFolder) -> None:
    said = penstock("runs", "export", run.id, "it.run")
    assert (said.code, said.out) == (0, "written to it.run: 0.0 MiB\n")
    said = penstock("runs", "import", "it.run", "runs=others")
    assert (said.code, said.out) == (0, f"imported as others/{run.id}\n")
    same = penstock("runs", "diff", f"runs/{run.id}", f"others/{run.id}")
    assert "are the same in code" in same.out


def test_curves_of_another_program_are_runs(penstock: Penstock) -> None:
    Path("table.csv").write_text("Step,one - reward\n0,0.5\n1,0.75\n")
    said = penstock("runs", "import", "table.csv", "as=csv")
    assert said.code == 0, said.err
    assert "-one-seed0" in said.out
    said = penstock("runs", "plot", "*-one-*", "metric=reward")
    assert said.out.splitlines()[1].split()[-3:] == ["0.5", "0.75", "▁█"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "RUN"], "penstock runs export: expected a run and a file, got 1 words"),
        (["export", "RUN", "a", "whole=1"], "penstock runs export: there is no key 'whole'\n"),
        (["export", "RUN", "a", "checkpoints=1"], "'checkpoints': expected one of true, false,"),
        (["import", "none.run"], "'none.run' is no file\n"),
        (["import", "runs/RUN/run.json"], "'runs/RUN/run.json' is no archive of a run"),
        (["delete", "RUN"], "penstock runs: expected one of list, show, diff, plot, compare, "),
        (["reproduce"], "penstock runs reproduce: expected one run, got 0\n"),
    ],
)
def test_what_is_wrong_is_said(
    penstock: Penstock, run: RunFolder, words: list[str], message: str
) -> None:
    said = penstock("runs", *(word.replace("RUN", run.id) for word in words))
    assert said.code == 2
    assert said.err.startswith(f"penstock: {message.replace('RUN', run.id)}"), said.err
    assert not Path("r").exists()


def test_what_cannot_be_reproduced_is_said(penstock: Penstock, make: Make) -> None:
    going = make(1, "1e-5", None)
    said = penstock("runs", "reproduce", going.id)
    assert said.code == 2
    assert said.err == (
        f"penstock: run '{going.id}' has not finished, so nothing can be compared with it\n"
        f"    go on with it: penstock run resume=runs/{going.id}\n"
    )
