"""TensorBoard events: what is logged is what TensorBoard shows, resumed or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from penstock.launch.run_dir.shipped_trackers import TensorBoardTracker
from penstock.launch.run_dir.trackers import RunInfo
from tensorboard.summary.writer import event_file_writer


def _started(folder: Path) -> TensorBoardTracker:
    tracker = TensorBoardTracker()
    folders = {"sft": folder / "stages" / "sft", "grpo": folder}
    place = tracker.start(RunInfo("run", folders, {}, resumed=False))
    assert place == f"tensorboard --logdir {folder}"
    return tracker


def _scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself would show."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_every_scalar_is_shown_at_once_in_its_stages_folder(tmp_path: Path) -> None:
    tracker = _started(tmp_path)
    tracker.rewind(0, "sft")
    tracker.log(0, "sft", {"loss": 3.0})
    tracker.rewind(0, "grpo")
    tracker.log(0, "grpo", {"reward": 0.5, "loss": 2.0})
    tracker.log(1, "grpo", {"reward": 0.75})
    shown = _scalars(tmp_path / "tensorboard")
    assert shown == {"reward": [(0, 0.5), (1, 0.75)], "loss": [(0, 2.0)]}
    assert _scalars(tmp_path / "stages" / "sft" / "tensorboard") == {"loss": [(0, 3.0)]}
    tracker.finish(None)


def test_what_a_resumed_run_does_again_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Files of one second are told apart by a counter, and "10" sorts before "9".
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(9))
    for first, last in ((0, 4), (2, 3)):
        tracker = _started(tmp_path)
        tracker.rewind(first, "grpo")
        for step in range(first, last):
            tracker.log(step, "grpo", {"reward": 10.0 * first + step})
        tracker.finish({})
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    assert _scalars(tmp_path / "tensorboard") == {"reward": [(0, 0.0), (1, 1.0), (2, 22.0)]}


def test_a_run_that_cannot_be_repeated_says_so_among_the_texts(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker()
    tracker.start(RunInfo("run", {"grpo": tmp_path}, {}, False, "in_flight: by timing"))
    tracker.rewind(0, "grpo")
    tracker.log(0, "grpo", {"reward": 0.5})
    tracker.finish(None)
    events: Any = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (said,) = events.Tensors("not reproducible")
    assert said.tensor_proto.string_val == [b"in_flight: by timing"]
    assert _scalars(tmp_path / "tensorboard") == {"reward": [(0, 0.5)]}
