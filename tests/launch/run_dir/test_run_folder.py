"""Run folders: never shared by accident, listed without a service, with the code that ran."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
import yaml
from penstock import __version__
from penstock.dataflow.errors import ConfigError
from penstock.launch.cli.hydra_app import compose
from penstock.launch.run_dir.provenance import CodeVersion, code_version
from penstock.launch.run_dir.run_folder import (
    RunFolder,
    change_config,
    create_run,
    list_runs,
    open_run,
    record_of,
)

from ..conftest import Penstock

NOW = datetime(2026, 11, 21, 3, 14, 54, tzinfo=UTC)


def _create(runs: Path, seed: int = 0, now: datetime = NOW) -> RunFolder:
    return create_run(
        runs, name="grpo", seed=seed, config="seed: 0\n", data="0123456789abcdef", now=now
    )


def test_a_run_starts_with_its_config_and_code_version(tmp_path: Path) -> None:
    folder = _create(tmp_path / "runs", seed=7)
    assert folder.id == "20261121-031454-grpo-seed7"
    assert folder.config.read_text() == "seed: 0\n"
    about = json.loads(folder.about.read_text())
    assert about["code"]["package"] == __version__
    assert about["data"] == "0123456789abcdef"
    assert (about["name"], about["seed"], about["created"]) == (
        "grpo",
        7,
        "2026-11-21T03:14:54+00:00",
    )


def test_names_sort_by_time_whatever_the_time_zone(tmp_path: Path) -> None:
    east = timezone(timedelta(hours=9))
    assert _create(tmp_path, now=NOW.astimezone(east)).id == "20261121-031454-grpo-seed0"


def test_a_name_stays_one_folder(tmp_path: Path) -> None:
    folder = create_run(tmp_path, name="../my run/a b", seed=0, config="", data="", now=NOW)
    assert folder.path.parent == tmp_path
    assert folder.id == "20261121-031454-my-run-a-b-seed0"


def test_runs_started_at_the_same_moment_do_not_meet(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(_create, [tmp_path] * 16))
    assert len({folder.path for folder in folders}) == 16
    assert {folder.id for folder in folders} >= {
        "20261121-031454-grpo-seed0",
        "20261121-031454-grpo-seed0-2",
    }


def test_a_summary_is_plain_json(tmp_path: Path) -> None:
    folder = _create(tmp_path)
    folder.write_summary({"a": math.nan, "b": {"c": [1, math.inf]}, "d": "x", "e": None, "f": 2})
    assert json.loads(folder.summary.read_text()) == {
        "a": None,
        "b": {"c": [1, None]},
        "d": "x",
        "e": None,
        "f": 2,
    }


def test_a_summary_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    folder = _create(tmp_path)
    folder.write_summary({"accuracy": 0.5})
    with pytest.raises(TypeError, match="not JSON serializable"):
        folder.write_summary({"accuracy": object()})
    assert json.loads(folder.summary.read_text()) == {"accuracy": 0.5}
    assert {path.name for path in folder.path.iterdir()} == {
        "config.yaml",
        "run.json",
        "summary.json",
    }


def test_runs_are_listed_oldest_first_with_what_came_out(tmp_path: Path) -> None:
    later = _create(tmp_path, now=NOW + timedelta(days=1))
    sooner = _create(tmp_path, seed=3)
    sooner.write_summary({"accuracy_after_rl": 0.75})
    (tmp_path / "notes").mkdir()
    first, second = list_runs(tmp_path)
    assert (first.folder, first.seed, first.created, first.summary) == (
        sooner,
        3,
        NOW,
        {"accuracy_after_rl": 0.75},
    )
    assert (second.folder, second.summary, second.fault) == (later, None, None)
    assert list_runs(tmp_path / "none") == []


def test_a_damaged_run_is_listed_with_its_fault(tmp_path: Path) -> None:
    _create(tmp_path).summary.write_text("{")
    _create(tmp_path, seed=1).about.write_text('{"name": "grpo"}')
    faults = [record.fault or "" for record in list_runs(tmp_path)]
    assert faults[0] == "run.json cannot be read (ValueError: it has no 'created')"
    assert faults[1].startswith("summary.json cannot be read (JSONDecodeError: ")


def test_a_run_name_without_its_folder_gets_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _create(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"no run.json; did you mean 'runs/{folder.id}'"):
        open_run(Path(folder.id))


def test_opening_what_is_no_run_says_so(tmp_path: Path) -> None:
    folder = _create(tmp_path)
    assert open_run(folder.path) == folder
    with pytest.raises(ConfigError) as caught:
        open_run(tmp_path)
    assert str(caught.value) == (
        f"'{tmp_path}' is not the folder of a run: it has no run.json\n"
        "    give a folder that `penstock run` made, such as runs/20261121-031454-grpo-seed0"
    )


HOLDER = """
import sys
from pathlib import Path
from penstock.launch.run_dir.run_folder import RunFolder

with RunFolder(Path(sys.argv[1])).locked():
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def _held(folder: RunFolder) -> Generator[subprocess.Popen[str]]:
    """Another process that holds the run until it is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            yield holder
        finally:
            holder.kill()


def test_a_run_belongs_to_one_process_and_a_kill_frees_it(tmp_path: Path) -> None:
    folder = _create(tmp_path)
    with _held(folder) as holder:
        with pytest.raises(ConfigError) as caught, folder.locked():
            pass
        assert str(caught.value) == (
            f"run '{folder.id}' is being run by process {holder.pid}; "
            "wait until it ends, stop it, or start a run of its own"
        )
    with folder.locked():
        pass


@pytest.mark.slow
def test_a_running_run_is_refused_before_its_data_are_read(
    penstock: Penstock, tmp_path: Path
) -> None:
    config = compose("run", ["task=file", "task.path=gone.jsonl"])
    del config["resume"]
    folder = create_run(tmp_path, name="it", seed=0, config=yaml.safe_dump(config), data="")
    with _held(folder) as holder:
        said = penstock("run", f"resume={folder.path}")
        assert (said.code, said.err.partition(";")[0]) == (
            2,
            f"penstock: run '{folder.id}' is being run by process {holder.pid}",
        )
    assert "there is no file 'gone.jsonl'" in penstock("run", f"resume={folder.path}").err


def _git(root: Path, *arguments: str) -> str:
    ran = subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.strip()


def test_the_code_version_is_the_commit_of_exactly_that_tree(tmp_path: Path) -> None:
    assert code_version(tmp_path) == CodeVersion(__version__)
    _git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("a = 1\n")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-q", "-m", "a")
    commit = _git(tmp_path, "rev-parse", "HEAD")
    assert code_version(tmp_path) == CodeVersion(__version__, commit, dirty=False)
    (tmp_path / "b.py").write_text("b = 2\n")
    assert code_version(tmp_path) == CodeVersion(__version__, commit, dirty=True)
    assert str(code_version(tmp_path)) == f"{__version__} ({commit[:12]}, changed)"
    (tmp_path / "installed").mkdir()
    assert code_version(tmp_path / "installed") == CodeVersion(__version__)


def test_a_run_that_cannot_be_repeated_stays_one(tmp_path: Path) -> None:
    assert record_of(_create(tmp_path)).not_reproducible == ""
    marked = create_run(
        tmp_path,
        name="grpo",
        seed=0,
        config="seed: 0\n",
        data="abc",
        not_reproducible="in_flight: by timing",
    )
    assert record_of(marked).not_reproducible == "in_flight: by timing"
    change_config(marked, "seed: 0\nnum_steps: 3\n", step=1)
    assert record_of(marked).not_reproducible == "in_flight: by timing"
    later = _create(tmp_path)
    change_config(later, "seed: 0\nnum_steps: 3\n", step=1, not_reproducible="order: by timing")
    assert record_of(later).not_reproducible == "order: by timing"
