"""Damaged files of a run's folder: each is named with its fault, and other runs go on."""

from __future__ import annotations

import ast
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import penstock
import pytest
from penstock.dataflow.errors import ConfigError, WorkerError
from penstock.launch.run_dir.evaluations import Evaluations
from penstock.launch.run_dir.resume import stored_config
from penstock.launch.run_dir.run_folder import (
    RunFolder,
    create_run,
    list_runs,
    read_groups,
    read_wish,
    record_of,
    state_of,
)
from penstock.launch.run_dir.samples import read_samples
from penstock.launch.run_dir.step_logs import read_events, read_ledger, read_metrics, read_trace

DEEP = "[" * 100_000


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return create_run(tmp_path / "runs", name="it", seed=0, config="a: 1\n", data="0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("created", "2026-11-21T03:14:54"),  # without a time zone
        ("created", 5),
        ("created", "soon"),
        ("seed", "0"),
        ("seed", 0.5),
        ("seed", True),
        ("seed", None),
        ("code", "0.1.0"),
        ("code", {"package": "0.1.0", "commit": 5}),
        ("code", {"commit": None}),
        ("name", ["it"]),
        ("data", 5),
        ("config", [1]),
        ("config", 5),
        ("changes", {"a": 1}),
        ("changes", [5]),
        ("changes", [{}]),
        ("changes", [{"step": 5, "at": "soon", "keys": ["seed"]}]),
        ("files", [1]),
        ("models", "m"),
        ("versions", 5),
        ("hardware", [1]),
        ("not_reproducible", [1]),
    ],
)
def test_a_wrong_field_of_run_json_is_its_fault(folder: RunFolder, field: str, value: Any) -> None:
    folder.about.write_text(json.dumps({**json.loads(folder.about.read_text()), field: value}))
    other = create_run(folder.path.parent, name="other", seed=1, config="a: 1\n", data="0")
    by_id = {record.folder.id: record for record in list_runs(folder.path.parent)}
    assert by_id[other.id].fault is None
    assert (by_id[folder.id].fault or "").startswith("run.json cannot be read (ValueError: ")
    assert state_of(by_id[folder.id]) == "damaged"


@pytest.mark.parametrize("text", ["", "[]", '"it"', "5", DEEP, '{"seed": Infinity}', "\ud800"])
def test_a_run_json_that_cannot_be_read_is_the_fault_of_its_run(
    folder: RunFolder, text: str
) -> None:
    folder.about.write_bytes(text.encode(errors="surrogatepass"))
    (record,) = list_runs(folder.path.parent)
    assert (record.fault or "").startswith("run.json cannot be read (")


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def text(content: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(content)

    return write


DAMAGE = {
    "a FIFO": fifo,
    "a device": link_to_device,
    "a folder": Path.mkdir,
    "a list": text("[1]\n"),
    "a text": text('"a"\n'),
    "a number": text("5\n"),
    "nested": text(DEEP + "\n"),
    "no JSON": text("{\n"),
}
READERS: dict[str, Callable[[RunFolder], object]] = {
    "groups.json": lambda run: read_groups(run.path),
    "scale.json": lambda run: read_wish(run.path),
    "metrics.jsonl": lambda run: read_metrics(run.metrics),
    "events.jsonl": lambda run: read_events(run.path / "events.jsonl"),
    "ledger.jsonl": lambda run: read_ledger(run.path / "ledger.jsonl"),
    "trace.json": lambda run: read_trace(run.trace),
    "config.yaml": stored_config,
    "evaluations/step-00000020.json": lambda run: Evaluations(run.path).read(20),
    "samples/step-000000.jsonl.gz": lambda run: read_samples(run.path),
}


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", READERS)
def test_each_file_is_named_with_its_fault(folder: RunFolder, name: str, damage: str) -> None:
    path = folder.path / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    DAMAGE[damage](path)
    with pytest.raises(ConfigError) as caught:
        READERS[name](folder)
    assert path.name in str(caught.value)


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_summary_is_the_fault_of_its_run(folder: RunFolder, damage: str) -> None:
    DAMAGE[damage](folder.summary)
    record = record_of(folder)
    assert "summary.json" in (record.fault or "")
    assert record.seed == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "wish",
    ['{"rollout": "x"}', '{"all": [1]}', "null", '{"all": 0}', '{"all": true}', '{"all": 1.5}'],
)
def test_a_scale_json_that_is_no_wish_is_said(folder: RunFolder, wish: str) -> None:
    (folder.path / "scale.json").write_text(wish)
    with pytest.raises(ConfigError, match="scale.json cannot be read"):
        read_wish(folder.path)


@pytest.mark.parametrize(
    "groups", ['{"a": 5}', '{"a": {}}', '{"a": {"most": "4", "why_not": ""}}', '{"a": {"most": 4}}']
)
def test_a_groups_json_that_has_no_groups_is_said(folder: RunFolder, groups: str) -> None:
    (folder.path / "groups.json").write_text(groups)
    with pytest.raises(ConfigError, match="groups.json cannot be read"):
        read_groups(folder.path)


def test_a_lock_that_is_a_link_leaves_its_target_alone(folder: RunFolder, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("the only copy of this text")
    folder.lock.symlink_to(precious)
    with pytest.raises(ConfigError, match=r"\.lock': it is a link where a file"), folder.locked():
        pass
    folder.lock.unlink()
    os.link(precious, folder.lock)  # nothing is written to it, whatever else its names are
    with folder.locked():
        pass
    assert precious.read_text() == "the only copy of this text"


@pytest.mark.timeout(20)
def test_a_lock_that_is_a_fifo_is_refused(folder: RunFolder) -> None:
    os.mkfifo(folder.lock)
    assert state_of(record_of(folder)) == "not running"
    with pytest.raises(ConfigError, match="it is a FIFO"), folder.locked():
        pass


def removed(path: Path) -> None:
    shutil.rmtree(path)


def renamed(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def removed_in_part(path: Path) -> None:
    (path / "run.json").unlink()


def made_again(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


@pytest.mark.parametrize("change", [removed, removed_in_part, renamed, made_again])
def test_a_folder_that_is_gone_ends_its_run(
    folder: RunFolder, change: Callable[[Path], None]
) -> None:
    with folder.watched() as check_there:
        check_there()
        change(folder.path)
        with pytest.raises(WorkerError, match=r"is no longer there: the run's folder was removed"):
            check_there()


def test_a_summary_without_steps_is_set_aside_all_the_same(folder: RunFolder) -> None:
    folder.summary.write_text("{}")
    folder.set_summary_aside()
    assert (folder.path / "summary-unknown-steps.json").read_text() == "{}"


OWN_PLACE = {
    # Not files of a run's folder.
    "main.py": {"os.open"},  # /dev/null
    "placement/machine.py": {"read_text"},  # /proc/cpuinfo
    "profile/profile.py": {"read_text"},  # in a folder of its own for its own children
    "watch/pages.py": {"read_bytes", "opened"},  # the page's own files, and a run's picture
    # Parts of files that are too long to be read as a whole.
    "watch/log_files.py": {"open_regular", "json.loads", "opened"},
    "cli/doctor.py": {"json.loads"},  # what a child printed
    "runs/archive.py": {"opened", "created"},  # archives, and CSV files of the user's
    "cli/sweep.py": {"json.loads"},  # its own text, to compare
    "stages/export.py": {"opened"},  # hashes models
    "placement/plan_request.py": {"json.loads"},  # of YAML that `load_yaml` has read
    "placement/models.py": {"read_json"},  # a model folder's config.json
}
OPENERS = {
    *("open", "read_bytes", "read_text", "opened", "open_regular", "read_json", "parse_json"),
    *("created", "opened_to_append", "json.load", "json.loads", "os.open", "gzip.open"),
    *("yaml.safe_load", "io.open"),
}
MODULES = ("json", "os", "gzip", "yaml", "io", "tarfile")


def test_files_of_runs_are_opened_in_run_dir_alone() -> None:
    """Functions elsewhere in `launch` that open or parse files are listed; none reads a run's."""
    launch = Path(str(penstock.__file__)).parent / "launch"
    found: dict[str, set[str]] = {}
    for path in sorted(launch.rglob("*.py")):
        name = path.relative_to(launch).as_posix()
        if name.startswith("run_dir/"):
            continue
        calls = {
            called
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and (called := called_name(node.func)) in OPENERS
        }
        if calls:
            found[name] = calls
    assert found == OWN_PLACE


def called_name(function: ast.expr) -> str:
    """Return `json.loads` for a module's function, `read_text` for a method or a plain name."""
    if isinstance(function, ast.Attribute):
        owner = function.value
        if isinstance(owner, ast.Name) and owner.id in MODULES:
            return f"{owner.id}.{function.attr}"
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
