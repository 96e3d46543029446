"""A file that may grow no further: what is written is whole or not there, and the file is named."""

from __future__ import annotations

import json
import resource
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from penstock.dataflow.files import file_error, writing
from penstock.dataflow.runtime.messages import TaskSpan
from penstock.launch.run_dir.checkpoint import CheckpointStore
from penstock.launch.run_dir.run_folder import create_run
from penstock.launch.run_dir.shipped_trackers import TensorBoardTracker
from penstock.launch.run_dir.step_logs import MetricsLog, TraceLog, read_metrics, read_trace
from penstock.launch.run_dir.trackers import RunInfo
from penstock.workers.training.flat_parameters import write_tensors

from .drafts import written


@contextmanager
def at_most(size_bytes: int) -> Generator[None]:
    """No file may be longer; the kernel cuts a write short there, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _refused(write: Callable[[], Any], path: Path, size_bytes: int = 100) -> None:
    """The write is refused in the name of the file."""
    with at_most(size_bytes), pytest.raises(OSError, match="File too large") as caught:
        write()
    assert caught.value.filename == str(path)


def _span(step: int) -> TaskSpan:
    return TaskSpan("actor.train", step, None, "actor", 0, float(step), step + 0.5)


def test_a_line_of_metrics_is_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write(0, {"loss": 0.5}, 1.0)
        _refused(lambda: log.write(1, {"loss" * 20: 0.5}, 2.0), path)
        log.write(1, {"loss": 0.25}, 2.0)
    assert [row["loss"] for row in read_metrics(path)] == [0.5, 0.25]


def test_an_event_of_the_trace_is_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with TraceLog(path) as trace:
        trace.write([_span(0)])
        size_bytes = path.stat().st_size
        _refused(lambda: trace.write([_span(1)]), path, size_bytes + 10)
        trace.write([_span(2)])
    assert [event["step"] for event in read_trace(path) if "step" in event] == [0, 2]
    json.loads(path.read_text())


def test_what_ends_a_run_is_not_hidden_by_a_trace_that_finds_no_room(tmp_path: Path) -> None:
    with (
        at_most(2),
        pytest.raises(ValueError, match="what ended the run"),
        TraceLog(tmp_path / "trace.json"),
    ):
        raise ValueError("what ended the run")


def test_a_new_run_that_finds_no_room_leaves_no_folder(tmp_path: Path) -> None:
    def create() -> None:
        create_run(tmp_path, name="grpo", seed=0, config="a: 1\n" * 50, data="")

    with at_most(100), pytest.raises(OSError, match=r"File too large: '.*/config\.yaml'"):
        create()
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_names_what_found_no_room(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    with written(store, 1) as folder:
        (folder / "state").write_text("short")

    def write() -> None:
        with written(store, 2) as folder:
            (folder / "state").write_text("long" * 100)

    _refused(write, tmp_path / "checkpoints" / "step-00000002.writing", 300)
    assert store.latest() == tmp_path / "checkpoints" / "step-00000001"


def test_a_run_folder_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "removed" / "checkpoints")
    with pytest.raises(FileNotFoundError), written(store, 1):
        pass
    assert not list(tmp_path.iterdir())


def test_an_error_of_safetensors_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"

    # A line of this file would be the user's own, whose errors are left as they are.
    body = "with writing(path):\n    write_tensors(path, {'weights': zeros})"
    names = {"writing": writing, "write_tensors": write_tensors, "path": path}
    _refused(lambda: exec(body, {**names, "zeros": torch.zeros(1000)}), path)


def test_tensorboard_fails_where_it_is_called(tmp_path: Path) -> None:
    threads = threading.active_count()
    tracker = TensorBoardTracker()
    tracker.start(RunInfo("run", {"grpo": tmp_path}, {}, resumed=False))
    tracker.rewind(0, "grpo")
    (path,) = (tmp_path / "tensorboard").iterdir()
    _refused(lambda: tracker.log(0, "grpo", {"loss" * 50: 0.5}), path)
    assert threading.active_count() == threads
    tracker.finish(None)


def test_what_is_said_of_a_file() -> None:
    assert file_error(OSError(28, "No space left on device", "runs/a")) == (
        "'runs/a': No space left on device\n    free some space, or choose another folder"
    )
    assert file_error(OSError("no number")) is None
    with pytest.raises(OSError, match="reset") as caught, writing(Path("runs")):
        raise ConnectionResetError(104, "Connection reset by peer")
    assert caught.value.filename is None
