"""`penstock scale`: what it writes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from penstock.launch.run_dir.run_folder import ElasticGroup, read_wish, write_groups, write_wish

from ..conftest import Penstock


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that goes on, on two groups."""
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    groups = {"rollout": ElasticGroup(4), "train": ElasticGroup(4, "it trains")}
    write_groups(folder, groups)
    return folder


def test_a_wish_is_beside_those_before(penstock: Penstock, run: Path) -> None:
    write_wish(run, {"judge": 2})
    said = penstock("scale", "run=runs/one", "rollout=3")
    assert said.code == 0, said.err
    assert said.out == "run 'one' is to have rollout=3; it says when it has\n"
    assert read_wish(run) == {"judge": 2, "rollout": 3}
    assert sorted(file.name for file in run.iterdir()) == ["groups.json", "run.json", "scale.json"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rollout=2"], "penstock scale: which run?\n    give run=FOLDER, such as runs/..."),
        (["run=runs/one"],
         "penstock scale: which group?\n    give GROUP=NUMBER, such as rollout=4"),
        (["run=runs/one", "4"], "penstock scale: expected KEY=VALUE, got '4'"),
        (["run=runs/one", "rolout=2"],
         "penstock scale: the run has no group 'rolout'; did you mean 'rollout'?\n    groups "
         "are: rollout, train"),
        (["run=runs/one", "train=2"],
         "penstock scale: group 'train' cannot have other ranks: it trains\n    groups that can: "
         "rollout"),
        (["run=runs/one", "rollout=0"],
         "'rollout': expected 1 to 4, one for each part of a step's rows, got 0\n    start a run "
         "with schedule.streaming=N for N parts"),
        (["run=runs/one", "rollout=5"],
         "'rollout': expected 1 to 4, one for each part of a step's rows, got 5\n    start a run "
         "with schedule.streaming=N for N parts"),
        (["run=runs/one", "rollout=-1"],
         "'rollout': expected a whole number of at least 0, got '-1'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said(penstock: Penstock, run: Path, words: list[str], said: str) -> None:
    found = penstock("scale", *words)
    assert (found.code, found.err) == (2, f"penstock: {said}\n")
    assert read_wish(run) == {}


def test_a_run_that_cannot_hear_of_it_is_said(penstock: Penstock, run: Path) -> None:
    (run / "groups.json").unlink()
    assert penstock("scale", "run=runs/one", "rollout=2").err == (
        "penstock: run 'one' has no groups.json: it has not come to its main stage yet, or an "
        "older version made it\n    try again once it takes steps\n"
    )
    (run / "summary.json").write_text("{}")
    assert penstock("scale", "run=runs/one", "rollout=2").err.startswith(
        "penstock: penstock scale: run 'one' has ended\n"
    )
