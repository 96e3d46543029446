"""A tracker of one's own in real runs: what it is told, and that its failures end nothing."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from penstock.configs.schema import TrackerConfig
from penstock.dataflow.errors import ConfigError
from penstock.launch.run_dir.step_logs import read_metrics
from penstock.launch.run_dir.trackers import TRACKERS, RunInfo, Tracker, Trackers

from ....copies import copies_end, fork
from ...conftest import Penstock

WORDS = (
    *("model.architecture.hidden_size=16", "model.architecture.intermediate_size=32"),
    *("model.architecture.num_hidden_layers=1", "model.architecture.num_attention_heads=2"),
    *("model.architecture.num_key_value_heads=1", "task.num_train=64", "task.num_held_out=8"),
    *("evaluation.num_prompts=8", "algorithm.num_steps=2", "checkpoint_every=2"),
    *("algorithm.per_step.prompts=4", "algorithm.cfg.sampling.num_samples=4"),
    *("algorithm.before.sft.num_steps=1", "algorithm.before.sft.per_step.demos=8"),
    "tracker.kind=notebook:Notebook",
)


@pytest.fixture(autouse=True)
def _notebook(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("notebook.py"), tmp_path)


@pytest.mark.slow
def test_it_is_told_of_every_stage_and_step(penstock: Penstock) -> None:
    said = penstock("run", *WORDS, "tracker.options.file=told.txt")
    assert said.code == 0, said.err
    assert Path("told.txt").read_text().splitlines() == [
        "start sft, grpo seed 0 False",
        "rewind sft 0",
        "log sft 0 metrics",
        "rewind grpo 0",
        "log grpo 0 evaluation",
        "log grpo 0 metrics",
        "log grpo 1 metrics",
        "log grpo 2 evaluation",
        "finish 2",
    ]
    (run,) = Path("runs").iterdir()
    assert f"tracker: told.txt of {run.name}\n" in said.err
    assert not (run / "tensorboard").exists()


@pytest.mark.slow
def test_several_trackers_hear_of_one_run(penstock: Penstock) -> None:
    """While it goes on: what the address for Prometheus shows, and the samples that are written."""
    Path("token").write_text("0123456789abcdef")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = penstock(
        *("run", *WORDS, "tracker.kind=notebook:Scraper", "algorithm.num_steps=3"),
        f"tracker.options.url=http://127.0.0.1:{port}/0123456789abcdef/metrics",
        *(f"tracker.also.prometheus.port={port}", "tracker.also.prometheus.token_file=token"),
        "samples.track_every=2",
    )
    assert said.code == 0, said.err
    assert said.err.count("metrics for Prometheus: ") == 1
    told = Path("notebook.txt").read_text().splitlines()
    sampled = [line for line in told if line.startswith("samples")]
    assert sampled == ["samples grpo 1: 16 of 4"]
    assert [line for line in told if line not in sampled] == [
        "start sft, grpo seed 0 False",
        "rewind sft 0",
        "scraped",
        "rewind grpo 0",
        'scraped "sft"} 0',
        *['scraped "sft"} 0, "grpo"} 0'] * 2,
        'scraped "sft"} 0, "grpo"} 1',
        'scraped "sft"} 0, "grpo"} 2',
        "finish 3",
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_its_failure_is_said_once_and_ends_nothing(penstock: Penstock, tmp_path: Path) -> None:
    said = penstock("run", *WORDS, "tracker.options.fails_at=1")
    assert said.code == 0, said.err
    line = next(
        number
        for number, text in enumerate((tmp_path / "notebook.py").read_text().splitlines(), 1)
        if "is full" in text
    )
    assert said.err.count("tracker 'notebook:Notebook' failed") == 1
    assert (
        "penstock: warning: tracker 'notebook:Notebook' failed at log of step 1 of stage 'grpo':\n"
        f'    {tmp_path}/notebook.py:{line}: raise OSError("the notebook is full")\n'
        "    OSError: the notebook is full\n"
        "    it is not called again; the run goes on, and metrics.jsonl has every step\n"
    ) in said.err
    assert Path("notebook.txt").read_text().splitlines()[-2:] == [
        "log grpo 0 metrics",
        "finish None",
    ]
    (run,) = Path("runs").iterdir()
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [0, 1]


def refusal(config: TrackerConfig) -> str:
    with pytest.raises(ConfigError) as error:
        Trackers(config)
    return str(error.value)


def test_what_makes_no_tracker_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal(TrackerConfig(kind="tensorbord")) == (
        "'tracker.kind': there is no tracker 'tensorbord'; did you mean 'tensorboard'?\n"
        "    trackers are: tensorboard, wandb, mlflow, trackio, prometheus, "
        "or module:name for your own"
    )
    assert refusal(TrackerConfig(also={"tensorbord": {}})).startswith(
        "'tracker.also': there is no tracker 'tensorbord'"
    )
    assert refusal(TrackerConfig(also={"prometheus": {"prt": 1}})).endswith(
        "\n    tracker.also.prometheus are the keyword arguments of what makes it"
    )
    with pytest.raises(ConfigError) as error:
        Trackers(TrackerConfig(also={"prometheus": {}}), tables=True)
    assert str(error.value) == (
        "'samples.track_every': none of the trackers (tensorboard, prometheus) has tables\n"
        "    those that have: wandb, mlflow, trackio"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert refusal(TrackerConfig(kind="notebook:no_tracker")) == (
        "'tracker.kind': 'notebook:no_tracker' made a int, which is no tracker\n"
        "    it must have the methods start, rewind, log and finish"
    )
    said = refusal(TrackerConfig(kind="notebook:Notebook", options={"colour": "red"}))
    first, *_, error, fix = said.splitlines()
    assert first == "'tracker.kind': tracker 'notebook:Notebook' cannot be made"
    assert error.endswith("got an unexpected keyword argument 'colour'")
    assert fix == "    tracker.options are the keyword arguments of what makes it"


class Hostile:
    """Forks in every call and empties what it is given; `exits_at` is where it calls sys.exit."""

    def __init__(self, exits_at: str = "", forks: bool = True) -> None:
        self._exits_at, self._forks = exits_at, forks
        self._called("init")

    def start(self, run: RunInfo) -> None:
        self._called("start")

    def rewind(self, step: int, stage: str) -> None:
        self._called("rewind")

    def log(self, step: int, stage: str, metrics: dict[str, float]) -> None:
        metrics.clear()
        self._called("log")

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        self._called("finish")

    def _called(self, what: str) -> None:
        if self._forks:
            fork()
        if what == self._exits_at:
            sys.exit("enough")


def _tracked(folder: Path, **options: Any) -> dict[str, float]:
    """What is left of a step's metrics after a run of one step."""
    metrics = {"loss": 1.0}
    trackers = Trackers(TrackerConfig(kind=f"{__name__}:Hostile", options=options))
    trackers.start(RunInfo("run", {"grpo": folder}, {}, resumed=False))
    trackers.rewind(0, "grpo")
    trackers.log(0, "grpo", metrics)
    trackers.finish({"num_steps": 1})
    return metrics


@pytest.mark.slow
def test_a_tracker_neither_doubles_the_run_nor_changes_its_metrics(tmp_path: Path) -> None:
    with copies_end():
        assert _tracked(tmp_path) == {"loss": 1.0}
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0]


@pytest.mark.parametrize("where", ["start", "log"])
def test_a_tracker_that_exits_has_failed_and_ends_nothing(tmp_path: Path, where: str) -> None:
    with pytest.warns(UserWarning, match=rf"failed at {where}.*\n.*\n    SystemExit: enough\n"):
        _tracked(tmp_path, exits_at=where, forks=False)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0]
    options = {"exits_at": "init", "forks": False}
    said = refusal(TrackerConfig(kind=f"{__name__}:Hostile", options=options))
    assert "cannot be made\n" in said
    assert "    SystemExit: enough\n" in said


@pytest.mark.parametrize("kind", TRACKERS)
def test_every_kind_is_a_tracker(kind: str) -> None:
    assert isinstance(TRACKERS[kind](), Tracker)
