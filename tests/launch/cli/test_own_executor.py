"""An executor of somebody's own is chosen and run without a line of ours changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.launch.inputs.run import executor_kind
from penstock.launch.main import main

from ...workers.executors import spawned

RUN = (
    "algorithm=grpo",
    "algorithm.roles.actor.start=model",
    "algorithm.per_step.prompts=4",
    "algorithm.cfg.sampling.num_samples=2",
    "algorithm.num_steps=2",
    "model=tiny",
    "task.num_train=32",
    "task.num_held_out=8",
    "evaluation.num_prompts=0",
    "tracker=none",
)
OWN = (
    f"executor.kind={spawned.__name__}:EXECUTOR",
    "executor.groups={train: 1, rollout: 1}",
    "executor.nodes={actor.generate: rollout}",
)


def trained(*words: str) -> str:
    assert main(["run", *RUN, *words]) == 0
    folder = max(Path("runs").iterdir(), key=lambda path: path.stat().st_mtime)
    return json.loads((folder / "summary.json").read_text())["weights_sha256"]


@pytest.fixture(scope="module", autouse=True)
def _helpers() -> None:
    spawned.start_helpers()


@pytest.mark.slow
def test_a_run_on_it_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        assert trained(*OWN) == trained()
    finally:
        spawned.EXECUTOR.end()


def test_what_is_no_executor_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        executor_kind("json:dumps")
    assert str(caught.value) == (
        "'executor.kind': 'json:dumps' is a function\n"
        "    give an ExecutorKind (penstock.workers.executors.registry)"
    )
