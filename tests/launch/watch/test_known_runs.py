"""Which runs the page shows, and what it says of how they stand."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from penstock.launch.run_dir.run_folder import RunFolder, record_of, state_of
from penstock.launch.watch.log_files import Gone
from penstock.launch.watch.pages import KnownRuns, home_of

from .conftest import Ask
from .folders import add_steps, new_run

_HOLD = """
import sys
from pathlib import Path
from penstock.launch.run_dir.run_folder import RunFolder
with RunFolder(Path(sys.argv[1])).locked():
    print("held", flush=True)
    sys.stdin.read()
"""


def states(runs: Path) -> dict[str, str]:
    return {line["key"]: line["state"] for line in KnownRuns([], runs).listed()}


def test_a_run_goes_on_as_long_as_its_lock_is_held(runs: Path) -> None:
    run = new_run(runs)
    assert state_of(record_of(run)) == "not running"
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(run.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert [state_of(record_of(run)) for _ in range(3)] == ["running"] * 3
        process.kill()
    assert state_of(record_of(run)) == "not running"
    with run.locked():  # asking has left nothing that is in a run's way
        pass


def test_how_a_run_ended(runs: Path) -> None:
    done, ended, damaged = (new_run(runs, name) for name in ("done", "ended", "damaged"))
    done.write_summary({"num_steps": 3})
    ended.write_summary({"stopped": "accuracy did not improve"})
    damaged.about.write_text("{")
    assert states(runs) == {done.id: "finished", ended.id: "stopped", damaged.id: "damaged"}
    done.set_summary_aside()  # as a resumed run does
    assert states(runs)[done.id] == "not running"


def test_every_state_has_a_reason(runs: Path, ask: Ask) -> None:
    run = new_run(runs)
    (line,) = ask("runs")["runs"]
    assert (line["key"], line["name"], line["seed"], line["stages"]) == (run.id, "grpo", 3, [])
    assert line["why"].endswith("penstock run resume=FOLDER goes on with it")
    run.about.write_text("[]")
    (line,) = ask("runs")["runs"]
    assert line["why"].startswith("run.json cannot be read")


def test_given_runs_are_kept_when_they_are_gone_and_all_others_are_not_shown(runs: Path) -> None:
    run, _ = new_run(runs), new_run(runs, "other")
    known = KnownRuns([run.path], runs)
    assert [line["key"] for line in known.listed()] == [run.id]
    shutil.rmtree(run.path)
    assert [line["state"] for line in known.listed()] == ["gone"]
    with pytest.raises(Gone, match="no longer there"):
        known.folder(run.id)


def test_runs_that_come_and_go_are_seen(runs: Path) -> None:
    known = KnownRuns([], runs)
    assert known.listed() == []
    run = new_run(runs)
    assert list(known.found()) == [run.id]
    shutil.rmtree(runs)
    assert known.listed() == []


def test_two_runs_of_one_name_have_two_keys(tmp_path: Path) -> None:
    folders = [RunFolder(tmp_path / name / "one").path for name in ("a", "b")]
    assert list(KnownRuns(folders, tmp_path).found()) == ["one", "one (2)"]


def test_a_run_is_read_again_only_when_it_has_changed(runs: Path) -> None:
    run, known = new_run(runs), KnownRuns([], runs)
    assert known.record(run) is known.record(run)
    before = known.record(run)
    run.write_summary({"num_steps": 1})
    assert before.summary is None
    assert known.record(run).summary == {"num_steps": 1}


@pytest.mark.parametrize("stage", ["..", "../..", "sft/..", "/etc", ".", "other", "\0"])
def test_a_stage_is_one_of_the_runs_own(runs: Path, stage: str) -> None:
    run = new_run(runs)
    run.stage("sft").path.mkdir(parents=True)
    assert run.stage_names == ["sft"]
    assert home_of(run, "sft") == run.path / "stages" / "sft"
    with pytest.raises(Gone, match="no such stage"):
        home_of(run, stage)


@pytest.mark.parametrize("key", ["..", "../runs", ".", "", "/", "x" * 300, "a\0b", "%2e%2e"])
def test_a_key_is_never_a_path(runs: Path, ask: Ask, key: str) -> None:
    run = new_run(runs)
    add_steps(run.path, range(3))
    for view in ("curve", "metrics", "more", "steps", "samples", "overview", "timeline"):
        said = ask(view, run=key, metric="reward/mean")
        assert said["gone"]
        assert "no longer there" in said["error"]
