"""Checkpoints: complete or absent, verified before use, the last good one always kept."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from penstock.dataflow.files import WrittenFile
from penstock.launch.run_dir.checkpoint import (
    CheckpointStore,
    CheckpointWarning,
    checkpoints_in,
    fault_of,
)

from .drafts import written


def _write(store: CheckpointStore, step: int, text: str | None = None) -> None:
    with written(store, step) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "weights.bin").write_text(text or f"weights of {step}")
        (folder / "run.json").write_text(json.dumps({"step": step}))


def _names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def test_an_empty_store_has_no_latest(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "never-made").latest() is None


def test_latest_is_what_was_written_last(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _write(store, 3)
    _write(store, 12)
    latest = CheckpointStore(tmp_path).latest()
    assert latest is not None
    assert latest == tmp_path / "step-00000012"
    assert (latest / "actor" / "weights.bin").read_text() == "weights of 12"


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in range(5):
        _write(store, step)
    assert _names(store) == ["step-00000003", "step-00000004"]


def test_the_steps_order_counts_not_the_names(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    _write(store, 99_999_999)
    _write(store, 100_000_000)
    assert store.latest() == tmp_path / "step-100000000"


def test_a_failed_write_leaves_the_previous_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _write(store, 1)
    with pytest.raises(FileNotFoundError), written(store, 2) as folder:
        (folder / "missing" / "file").write_text("half")
    assert _names(store) == ["step-00000001"]
    assert store.latest() == tmp_path / "step-00000001"


def test_the_same_step_can_be_written_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _write(store, 1, "first")
    _write(store, 1, "second")
    latest = store.latest()
    assert latest is not None
    assert (latest / "actor" / "weights.bin").read_text() == "second"
    assert _names(store) == ["step-00000001"]


def _truncate(folder: Path) -> None:
    (folder / "actor" / "weights.bin").write_text("w")


def _flip_a_bit(folder: Path) -> None:
    path = folder / "actor" / "weights.bin"
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)


def _remove(folder: Path) -> None:
    (folder / "run.json").unlink()


def _add(folder: Path) -> None:
    (folder / "more.bin").write_text("more")


def _forget_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def _cut_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:20])


def _manifest_of_another_kind(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"format": 1, "step": 2, "files": {"run.json": {}}}')


def _manifest_of_the_future(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"format": 7, "step": 2, "files": {}}')


def _manifest_of_another_step(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 5'))


def _link(folder: Path) -> None:
    path = folder / "run.json"
    path.rename(folder.parent / "elsewhere.json")
    path.symlink_to(folder.parent / "elsewhere.json")


DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (_truncate, "file 'actor/weights.bin' has 1 bytes, expected 12"),
    (_flip_a_bit, "file 'actor/weights.bin' has another SHA-256 than when it was written"),
    (_remove, "file 'run.json' is missing"),
    (_add, "file 'more.bin' is not in manifest.json"),
    (_forget_manifest, "manifest.json is missing, so the write never finished"),
    (_cut_manifest, "manifest.json is damaged (JSONDecodeError: "),
    (_manifest_of_another_kind, "manifest.json is damaged (KeyError: 'size_bytes')"),
    (_manifest_of_the_future, "manifest.json has format 7, this version reads 1"),
    (_manifest_of_another_step, "manifest.json is that of step 5"),
    (_link, "'run.json' is neither a plain file nor a folder"),
]


@pytest.mark.parametrize(("damage", "fault"), DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_aloud(
    tmp_path: Path, damage: Callable[[Path], None], fault: str
) -> None:
    store = CheckpointStore(tmp_path)
    _write(store, 1)
    _write(store, 2)
    bad = tmp_path / "step-00000002"
    damage(bad)
    assert (fault_of(bad) or "").startswith(fault)
    with pytest.warns(CheckpointWarning) as caught:
        assert CheckpointStore(tmp_path).latest() == tmp_path / "step-00000001"
    message = str(caught[0].message)
    assert message.startswith(f"checkpoint {bad} cannot be used: {fault}")
    assert message.endswith("looking for an older one. Delete the folder to silence this.")


def test_pruning_never_counts_a_damaged_checkpoint(tmp_path: Path) -> None:
    """With keep=1 and every newer one damaged, the last good one stays, until a good one comes."""
    writer = CheckpointStore(tmp_path, keep=2)
    _write(writer, 1)
    _write(writer, 2)
    _flip_a_bit(tmp_path / "step-00000002")
    later = CheckpointStore(tmp_path, keep=2)
    _write(later, 3)
    assert _names(later) == ["step-00000001", "step-00000002", "step-00000003"]
    _write(later, 4)
    assert _names(later) == ["step-00000003", "step-00000004"]


def test_leftovers_are_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _write(store, 1)
    (tmp_path / "step-00000002.writing").mkdir()
    (tmp_path / "step-00000002.writing" / "half").write_text("half")
    (tmp_path / "notes.txt").write_text("not ours")
    assert store.latest() == tmp_path / "step-00000001"
    assert _names(store) == ["notes.txt", "step-00000001"]


def test_a_replacement_stopped_half_way_leaves_the_old_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _write(store, 1)
    (tmp_path / "step-00000001").rename(tmp_path / "step-00000001.retired")
    assert CheckpointStore(tmp_path).latest() == tmp_path / "step-00000001"


def test_what_cannot_be_a_checkpoint_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with (
        pytest.raises(ValueError, match="'a' is neither a plain file"),
        written(store, 1) as folder,
    ):
        (folder / "a").symlink_to("/dev/null")
    with (
        pytest.raises(ValueError, match=r"may not be called manifest\.json"),
        written(store, 1) as f,
    ):
        (f / "manifest.json").write_text("{}")
    assert _names(store) == []


# Writes checkpoints without end, each of them dependent on its step throughout, and says so.
WRITER = """
import sys
from pathlib import Path
from penstock.launch.run_dir.checkpoint import CheckpointStore

store = CheckpointStore(Path(sys.argv[1]), keep=2)
latest = store.latest()
step = 0 if latest is None else int(latest.name[5:]) + 1
print("go", flush=True)
while True:
    for _ in range(1 if step % 3 else 2):
        folder = store.begin(step)
        for part in range(4):
            (folder / f"part-{part}").write_bytes(bytes([step % 251]) * (1 << 16))
        store.seal(step, {})
    print(step, flush=True)
    step += 1
"""


def _killed_writer(folder: Path, after_s: float) -> int:
    """Run the writer, kill it `after_s` after its first checkpoint; the last step it announced."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "go\n"
        time.sleep(after_s)
        os.kill(writer.pid, signal.SIGKILL)
        announced = writer.stdout.read().split("\n")[:-1]
    assert writer.returncode == -signal.SIGKILL
    return int(announced[-1]) if announced else -1


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_usable_checkpoint(tmp_path: Path) -> None:
    moments = random.Random(0)
    announced = -1
    for _ in range(25):
        announced = max(announced, _killed_writer(tmp_path, moments.uniform(0.0, 0.2)))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Not even a damaged one under a checkpoint's name.
            latest = CheckpointStore(tmp_path).latest()
        if latest is None:
            assert announced == -1
            continue
        step = int(latest.name[5:])
        assert step >= announced, "a checkpoint announced as written is gone"
        expected = bytes([step % 251]) * (1 << 16)
        assert all((latest / f"part-{part}").read_bytes() == expected for part in range(4))
    assert announced > 20, "too few checkpoints were written for the kills to mean anything"


def test_what_is_kept_besides_is_not_among_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.kept = frozenset({1})
    for step in (1, 2, 3):
        with written(store, step) as folder:
            (folder / "a").write_text(str(step))
    assert list(checkpoints_in(tmp_path)) == [1, 3]
    store.kept = frozenset({3})
    with written(store, 4) as folder:
        (folder / "a").write_text("4")
    assert list(checkpoints_in(tmp_path)) == [3, 4]
    assert checkpoints_in(tmp_path / "nowhere") == {}


def test_what_was_hashed_as_it_was_written_is_not_read_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    draft = store.begin(3)
    (draft / "read").write_text("read")
    (draft / "known").write_text("known")
    store.seal(3, {"known": WrittenFile(5, "0" * 64)})
    with pytest.warns(CheckpointWarning, match="'known' has another SHA-256 than when it was"):
        assert store.latest() is None, "what is said of a file is held against it"
    draft = store.begin(4)
    (draft / "known").write_text("known")
    with pytest.raises(ValueError, match=r"known' has 5 bytes, 6 were written"):
        store.seal(4, {"known": WrittenFile(6, "0" * 64)})
    assert not draft.exists()


def test_old_checkpoints_that_stay_keep_no_new_one_from_counting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    _write(store, 1)

    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    (store.begin(2) / "a").write_text("2")
    said = store.seal(2, {})
    assert said.startswith(f"'{tmp_path}/step-00000001.retired': Read-only file system")
    assert store.latest() is not None
