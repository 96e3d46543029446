"""What a run warned of stays in its folder, once, however often it is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.launch.run_dir.events import (
    EVENTS,
    EventLog,
    count_kinds,
    read_events,
    stage_events,
)


def test_a_resumed_run_forgets_what_comes_again(tmp_path: Path) -> None:
    path = tmp_path / EVENTS
    log = EventLog(path)
    assert read_events(path) == []
    assert not path.exists(), "a run without warnings has no file"
    for step in (3, 5, 8):
        log.write({"step": step, "kind": "cut_off", "seen": "all"})
    with path.open("a") as file:
        file.write('{"step": 9, "ki')  # as a kill leaves it
    EventLog(path, first_step=8).write({"step": 9, "kind": "mismatch"})
    assert [(one["step"], one["kind"]) for one in read_events(path)] == [
        (3, "cut_off"),
        (5, "cut_off"),
        (9, "mismatch"),
    ]
    assert read_events(path)[0]["at"].endswith("+00:00")


def test_stages_are_counted_together(tmp_path: Path) -> None:
    before = tmp_path / "stages" / "sft"
    before.mkdir(parents=True)
    for folder in (tmp_path, before, tmp_path):
        EventLog(folder / EVENTS, first_step=9).write({"step": 1, "kind": "cut_off"})
    assert count_kinds(tmp_path) == {"cut_off": 3}
    assert [event["stage"] for event in stage_events(tmp_path)] == ["sft", "", ""]


@pytest.mark.parametrize("line", ["3", "{", '{"step": 1}', '{"kind": "x", "step": "1"}'])
def test_what_no_log_wrote_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / EVENTS
    path.write_text(f"{line}\n")
    with pytest.raises(ConfigError) as caught:
        read_events(path)
    assert str(caught.value) == (
        f"{path}:1: expected a JSON object with a 'step' and a 'kind', got {line!r}; remove the "
        "line or the file"
    )
