"""What a process writes of its workers' states while they go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from penstock.dataflow.errors import StateError
from penstock.dataflow.files import WrittenFile, write_hashed
from penstock.dataflow.graph.role import WriteState
from penstock.dataflow.runtime import host
from penstock.dataflow.runtime.host import Saves
from penstock.dataflow.runtime.messages import SaveReport

from ..counter import Counter


class Later(Counter):
    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def take_state(self) -> WriteState:
        def write(folder: Path, is_unwanted: Callable[[], bool]) -> Mapping[str, WrittenFile]:
            while not (self.gate.is_set() or is_unwanted()):
                self.gate.wait(0.01)
            return {} if is_unwanted() else {"w": write_hashed(folder / "w", [b"later"])}

        return write


class Own(Later):
    """Somebody's worker that writes more than the one it derives from."""

    def save_state(self, folder: Path) -> None:
        (folder / "own").write_text("own")


def folder(tmp_path: Path, role: str, step: int = 1) -> Path:
    found = tmp_path / f"step-{step}" / role
    found.mkdir(parents=True)
    return found


def test_a_report_names_files_in_the_checkpoint_and_says_the_same_again(tmp_path: Path) -> None:
    one, worker = Saves(), Later()
    assert one.begin(worker, folder(tmp_path, "a")) == ""
    assert one.report(0.0, unwanted=False) == SaveReport(writing=True)
    worker.gate.set()
    report = one.report(60.0, unwanted=False)
    assert not report.writing
    assert report.files == {"a/w": WrittenFile(5, report.files["a/w"].sha256)}
    assert one.report(0.0, unwanted=False) == report


def test_a_worker_s_own_save_state_counts(tmp_path: Path) -> None:
    one, worker = Saves(), Own()
    own = folder(tmp_path, "a")
    one.begin(worker, own)
    assert [path.name for path in own.iterdir()] == ["own"]
    assert one.report(0.0, unwanted=False) == SaveReport(writing=False)


def test_the_next_checkpoint_ends_the_one_before(tmp_path: Path) -> None:
    one, worker = Saves(), Later()
    before = folder(tmp_path, "a")
    one.begin(worker, before)
    one.begin(worker, folder(tmp_path, "a", 2))
    assert not list(before.iterdir())
    worker.gate.set()
    assert one.report(60.0, unwanted=False).files.keys() == {"a/w"}


def test_a_disk_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "CLOSE_S", 0.05)
    gate = threading.Event()

    class Hangs(Counter):
        def take_state(self) -> WriteState:
            return lambda folder, is_unwanted: {} if gate.wait(60.0) else {}

    one, worker, where = Saves(), Hangs(), folder(tmp_path, "a")
    one.begin(worker, where)
    with pytest.raises(StateError) as raised:
        one.close()
    assert str(raised.value) == (
        f"'{where}' is still being written and does not end; its disk hangs\n"
        "    see to the disk, or choose another folder"
    )
    gate.set()
    one.close()
