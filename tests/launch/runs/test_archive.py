"""Archives come back as exported, tampered ones are refused, and curves of others are runs."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.launch.run_dir.provenance import Origins
from penstock.launch.run_dir.run_folder import RunFolder, RunRecord, create_run, record_of
from penstock.launch.run_dir.step_logs import read_metrics
from penstock.launch.runs.archive import export_run, import_curves, import_run


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    """A finished run with a checkpoint, and a module of the user's that it imported."""
    own = tmp_path / "mine.py"
    own.write_text("x = 1\n")
    origins = Origins({str(own): hashlib.sha256(own.read_bytes()).hexdigest()})
    folder = create_run(
        tmp_path / "runs", name="it", seed=0, config="a: 1\n", data="", origins=origins
    )
    (folder.path / "models" / "actor").mkdir(parents=True)
    (folder.path / "models" / "actor" / "weights").write_bytes(bytes(range(256)) * 9000)
    folder.checkpoints.mkdir()
    (folder.checkpoints / "step").write_text("large")
    folder.write_summary({"num_steps": 3})
    return record_of(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def test_what_was_exported_comes_back_without_checkpoints(run: RunRecord, tmp_path: Path) -> None:
    size_bytes = export_run(run, tmp_path / "it.run")
    assert size_bytes == (tmp_path / "it.run").stat().st_size
    back = import_run(tmp_path / "it.run", tmp_path / "there" / "runs")
    assert back.path == tmp_path / "there" / "runs" / run.folder.id
    found, before = contents(back.path), contents(run.folder.path)
    (own,) = (name for name in found if name.startswith("own-files/"))
    assert found.pop(own) == b"x = 1\n"
    assert before.pop("checkpoints/step") == b"large"
    assert found == before
    assert [path.name for path in back.path.parent.iterdir()] == [run.folder.id]


def test_the_same_run_has_the_same_archive(run: RunRecord, tmp_path: Path) -> None:
    export_run(run, tmp_path / "one")
    os.utime(run.folder.config, (0, 0))
    export_run(run, tmp_path / "other")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    back = record_of(import_run(tmp_path / "one", tmp_path / "there"))
    (tmp_path / "mine.py").unlink()  # what was imported with it goes on with it
    export_run(back, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "one").read_bytes()


def test_with_checkpoints_it_can_be_resumed(run: RunRecord, tmp_path: Path) -> None:
    export_run(run, tmp_path / "it.run", checkpoints=True)
    assert (import_run(tmp_path / "it.run", tmp_path / "r").checkpoints / "step").is_file()


def test_a_file_of_the_users_that_has_changed_is_left_out(run: RunRecord, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("x = 2\n")
    export_run(run, tmp_path / "it.run")
    back = import_run(tmp_path / "it.run", tmp_path / "there")
    assert not (back.path / "own-files").exists()


def test_nothing_is_overwritten(run: RunRecord, tmp_path: Path) -> None:
    export_run(run, tmp_path / "it.run")
    with pytest.raises(ConfigError, match="is there\n    give another name"):
        export_run(run, tmp_path / "it.run")
    with pytest.raises(ConfigError, match="is there\n    remove it, or give runs=FOLDER"):
        import_run(tmp_path / "it.run", tmp_path / "runs")


def test_a_run_that_goes_on_is_not_exported(run: RunRecord, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from penstock.launch.run_dir.run_folder import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).locked():\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(run.folder.path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"is being run by process {holder.pid}"):
            export_run(run, tmp_path / "it.run")
        holder.communicate(timeout=60)
    assert not [*tmp_path.glob("*it.run*")]


@pytest.mark.parametrize("at", [0, 400, 600, 5_000, 100_000, 2_000_000])
def test_a_changed_byte_is_noticed(run: RunRecord, tmp_path: Path, at: int) -> None:
    path = tmp_path / "it.run"
    export_run(run, path)
    content = bytearray(path.read_bytes())
    content[at] ^= 0x21
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="damaged|no archive|cannot be read"):
        import_run(path, tmp_path / "there")
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("kept", [0, 1, 511, 4_000, 1_000_000])
def test_an_archive_that_was_cut_off_is_noticed(run: RunRecord, tmp_path: Path, kept: int) -> None:
    path = tmp_path / "it.run"
    export_run(run, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ConfigError):
        import_run(path, tmp_path / "there")
    assert not (tmp_path / "there").exists()


def written(path: Path, about: Any, files: Mapping[str, bytes], **header: Any) -> Path:
    """An archive that somebody else made."""
    with tarfile.open(path, "w") as tar:
        for name, content in {"penstock-run.json": json.dumps(about).encode(), **files}.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            if name in files:
                for field, value in header.items():
                    setattr(info, field, value)
            tar.addfile(info, io.BytesIO(content))
    return path


def listed(run: str, files: Mapping[str, bytes]) -> dict[str, Any]:
    members = [
        {"name": name, "size_bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()}
        for name, c in files.items()
    ]
    return {"format": 1, "run": run, "files": members}


@pytest.mark.parametrize(
    ("run_name", "name"),
    [
        ("it", "it/../../evil"),
        ("it", "/etc/evil"),
        ("it", "it//evil"),
        ("it", "it/./evil"),
        ("it", "other/evil"),
        ("it", "it"),
        ("..", "../evil"),
        (".hidden", ".hidden/evil"),
        ("a/b", "a/b/evil"),
        ("", "/evil"),
        ("it", "it/a\\b"),
        ("it", "it/a\0b"),
    ],
)
def test_no_name_leads_out_of_the_folder(tmp_path: Path, run_name: str, name: str) -> None:
    about = listed(run_name, {name: b"", f"{run_name}/run.json": b"{}"})
    path = written(tmp_path / "it.run", about, {})
    with pytest.raises(ConfigError, match="its list of files cannot be read: .* is no name of a"):
        import_run(path, tmp_path / "there")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["it.run"]


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE]
)
def test_only_regular_files_are_unpacked(tmp_path: Path, kind: bytes) -> None:
    files = {"it/run.json": b""}
    header = {"type": kind, "linkname": "/etc/passwd"}
    path = written(tmp_path / "it.run", listed("it", files), files, **header)
    with pytest.raises(ConfigError, match="'it/run.json' is no plain file"):
        import_run(path, tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_what_is_not_listed_is_not_unpacked(tmp_path: Path) -> None:
    files = {"it/run.json": b"{}", "it/more": b"1"}
    about = listed("it", {"it/run.json": b"{}"})
    with pytest.raises(ConfigError, match="holds more than it lists"):
        import_run(written(tmp_path / "it.run", about, files), tmp_path / "there")
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    "about", [None, [], {}, {"format": 2}, {"format": 1, "run": "it", "files": [{"name": "x"}]}]
)
def test_another_list_is_refused(tmp_path: Path, about: Any) -> None:
    with pytest.raises(ConfigError, match="its list of files cannot be read"):
        import_run(written(tmp_path / "it.run", about, {}), tmp_path / "there")


def test_an_import_that_was_killed_is_begun_anew(run: RunRecord, tmp_path: Path) -> None:
    export_run(run, tmp_path / "it.run")
    draft = tmp_path / "there" / f".{run.folder.id}.importing"
    draft.mkdir(parents=True)
    (draft / "rest").write_text("of before")
    folder: RunFolder = import_run(tmp_path / "it.run", tmp_path / "there")
    assert [path for path in folder.path.parent.iterdir()] == [folder.path]
    assert not (folder.path / "rest").exists()


def test_a_sparse_file_is_refused_before_it_is_written(tmp_path: Path) -> None:
    """A sparse member of GNU tar takes 512 bytes and becomes as large as it says."""
    holed = tmp_path / "it" / "run.json"
    holed.parent.mkdir()
    holed.touch()
    os.truncate(holed, 1 << 20)
    files = {"it/run.json": bytes(1 << 20), "it/rest": bytes(range(256)) * 8192}
    (tmp_path / "it" / "rest").write_bytes(files["it/rest"])
    (tmp_path / "penstock-run.json").write_text(json.dumps(listed("it", files)))
    for form in ("gnu", "posix"):
        command = ["tar", "--sparse", f"--format={form}", "-cf", "it.run", "penstock-run.json"]
        subprocess.run([*command, *files], cwd=tmp_path, check=True)
        for fault in ("lists 3145728 bytes and holds 2", "is no plain file"):
            with pytest.raises(ConfigError, match=fault):
                import_run(tmp_path / "it.run", tmp_path / "there")
            assert not (tmp_path / "there").exists()
            with (tmp_path / "it.run").open("ab") as file:
                file.write(bytes(2 << 20))  # so that the sizes are possible


def test_more_than_the_archive_holds_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    files = {"it/run.json": b"{}", "it/more": b"1"}
    about = listed("it", files)
    about["files"][1]["size_bytes"] = 800 << 20
    with pytest.raises(ConfigError, match="lists 838860802 bytes and holds "):
        import_run(written(tmp_path / "it.run", about, files), tmp_path / "there")
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    "headers",
    [
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "x"},
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "it/run.json"},
        {"GNU.sparse.map": "a,b", "GNU.sparse.size": "5"},
        {"GNU.sparse.map": "0,1,2", "GNU.sparse.size": "5"},
        {"GNU.sparse.size": "99999999999999999999"},
        {"size": "x"},
        {"size": "-5"},
    ],
)
def test_damaged_headers_are_said(tmp_path: Path, headers: dict[str, str]) -> None:
    files = {"it/run.json": b"{}"}
    path = written(tmp_path / "it.run", listed("it", files), files, pax_headers=headers)
    with pytest.raises(ConfigError):
        import_run(path, tmp_path / "there")
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run", "\ud800"),
        ("run", 5),
        ("run", None),
        ("name", 5),
        ("name", "it/\udcff"),
        ("name", ["it/run.json"]),
        ("size_bytes", "2"),
        ("size_bytes", -1),
        ("size_bytes", True),
        ("sha256", 5),
    ],
)
def test_a_list_with_wrong_values_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    about = listed("it", {"it/run.json": b"{}"})
    (about if field == "run" else about["files"][0])[field] = value
    with pytest.raises(ConfigError, match="its list of files cannot be read"):
        import_run(written(tmp_path / "it.run", about, {"it/run.json": b"{}"}), tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_links_in_the_way_of_an_export_are_not_followed(run: RunRecord, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("the only copy")
    (tmp_path / ".a.tar.new").symlink_to(precious)
    export_run(run, tmp_path / "a.tar")
    assert import_run(tmp_path / "a.tar", tmp_path / "there").about.is_file()
    run.folder.lock.unlink()
    run.folder.lock.symlink_to(precious)
    with pytest.raises(ConfigError, match="it is a link where a file belongs"):
        export_run(run, tmp_path / "b.tar")
    assert precious.read_text() == "the only copy"
    assert not [*tmp_path.glob("*b.tar*")]


def imported(tmp_path: Path, text: str) -> dict[tuple[str, int], list[dict[str, float]]]:
    """(name, seed) -> its lines, without times."""
    path = tmp_path / "table.csv"
    path.write_text(text)
    found = {}
    for folder in import_curves(path, tmp_path / "runs"):
        record = record_of(folder)
        assert record.fault is None
        lines = read_metrics(folder.metrics)
        found[(record.name, record.seed)] = [
            {key: value for key, value in line.items() if key != "wall_time_s"} for line in lines
        ]
    return found


def test_a_row_for_each_point_of_a_run(tmp_path: Path) -> None:
    text = (
        "run_id,seed,global_step,_timestamp,charts/episodic_return,comment\n"
        "a1,3,512,1700000000,1.5,good\n"
        "b2,4,512,1700000001,0.5,\n"
        "a1,3,256,1699999999,1.25,\n"
        "a1,3,1024,1700000002,NaN,\n"
    )
    assert imported(tmp_path, text) == {
        ("a1", 3): [
            {"step": 256, "charts/episodic_return": 1.25},
            {"step": 512, "charts/episodic_return": 1.5},
        ],
        ("b2", 4): [{"step": 512, "charts/episodic_return": 0.5}],
    }


def test_a_column_for_each_run(tmp_path: Path) -> None:
    text = (
        '"Step","one - reward","one - reward__MIN","one - reward__MAX","the other - reward"\n'
        '"0","0.125","0.1","0.2",""\n'
        '"1","0.25","0.2","0.3","0.0625"\n'
    )
    assert imported(tmp_path, text) == {
        ("one", 0): [{"step": 0, "reward": 0.125}, {"step": 1, "reward": 0.25}],
        ("the other", 0): [{"step": 1, "reward": 0.0625}],
    }


def test_a_table_of_one_run_is_called_like_its_file(tmp_path: Path) -> None:
    assert imported(tmp_path, "\ufeffstep,loss\n0,2\n") == {
        ("table", 0): [{"step": 0, "loss": 2.0}]
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a column of steps, called one of global_step, _step, step, Step"),
        ("loss\n1\n", "its columns are: loss"),
        ("step,loss\n1\n", "table.csv:2: expected 2 cells, got 1"),
        ("step,loss\n1.5,2\n", "table.csv:2: expected a step, a whole number, got '1.5'"),
        ("step,loss\n-1,2\n", "table.csv:2: expected a step, a whole number, got '-1'"),
        ("step,loss\n1e300,2\n", "table.csv:2: expected a step, a whole number, got '1e300'"),
        ("step,note\n1,good\n", "has no column of numbers beside its steps"),
        ('step,loss\n"1,2\n', "is no CSV file"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_made(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        imported(tmp_path, text)
    assert message in str(raised.value)
    assert not (tmp_path / "runs").exists()


def test_what_is_no_text_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_bytes(b"step\n\xff\n")
    with pytest.raises(ConfigError, match="is no CSV file"):
        import_curves(tmp_path / "table.csv", tmp_path / "runs")
