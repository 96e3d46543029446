"""What of a resumed run's configuration may change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from penstock.dataflow.errors import ConfigError
from penstock.launch.cli.hydra_app import compose
from penstock.launch.run_dir.resume import resumed_config

STORED: dict[str, Any] = {
    "seed": 3,
    "executor": {"kind": "ray", "groups": {"train": 1}, "tensor_parallel": {"train": 2}},
    "engine": {"kind": "megatron", "options": {"sequence_parallel": True}},
    "placement": "auto",
}


def resumed(folder: Path, *words: str) -> tuple[dict[str, Any], bool]:
    (folder / "run.json").touch()
    (folder / "config.yaml").write_text(yaml.safe_dump(STORED))
    return resumed_config(folder, compose("run", list(words)), ["resume=it", *words])


def test_a_resumed_run_goes_on_as_it_was(tmp_path: Path) -> None:
    assert resumed(tmp_path) == (STORED, False)


def test_a_key_changes_that_key_alone(tmp_path: Path) -> None:
    words = ("executor.tensor_parallel.train=1", "executor.pipeline_parallel.train=2")
    found, moved = resumed(tmp_path, *words)
    assert moved
    assert found["executor"] == {
        "kind": "ray",
        "groups": {"train": 1},
        "tensor_parallel": {"train": 1},
        "pipeline_parallel": {"train": 2},
    }
    assert {**found, "executor": None} == {**STORED, "executor": None}


def test_a_section_chosen_anew_replaces_the_runs(tmp_path: Path) -> None:
    found, moved = resumed(
        tmp_path, "executor.num_threads=1", "executor=in_process", "engine=torch"
    )
    assert moved
    assert found["executor"] == {"kind": "in_process", "device": "cpu", "num_threads": 1}
    assert found["engine"] == {"kind": "torch"}


def test_everything_else_stays(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        resumed(tmp_path, "executor=ray", "seed=4", "algorithm=ppo")
    assert str(error.value) == (
        f"resume={tmp_path} comes with seed=4, algorithm=ppo\n    a resumed run keeps its "
        "configuration but for engine, rollout, executor, placement, task.max_restarts, "
        "task.step_limit_s; leave the rest out, or start a new run"
    )


def test_a_key_is_not_taken_away(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        resumed(tmp_path, "executor=ray", "~executor.device")
    assert str(error.value) == (
        f"resume={tmp_path} comes with ~executor.device\n    keys of a run are not taken away; "
        "name the section anew, such as executor=ray, with all of its keys that are to differ from "
        "that option's own"
    )
