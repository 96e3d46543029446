"""Runs on conversations, from the command line."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from penstock.workers.executors.on_ray.executor import shutdown_ray

from ..conftest import Penstock

pytestmark = pytest.mark.slow

WORDS = (
    "algorithm=agent_grpo",
    "task=calculator",
    "task.num_train=64",
    "task.num_held_out=8",
    "evaluation.num_prompts=8",
    "model.architecture.hidden_size=32",
    "model.architecture.intermediate_size=64",
    "model.architecture.num_hidden_layers=2",
    "model.architecture.num_attention_heads=2",
    "model.architecture.num_key_value_heads=2",
    "algorithm.before.sft.num_steps=30",
    "algorithm.before.sft.per_step.demos=32",
    "algorithm.num_steps=3",
    "algorithm.per_step.prompts=8",
    "algorithm.cfg.sampling.num_samples=4",
    "executor.num_threads=1",
    "tracker=none",
)


@pytest.fixture(autouse=True)
def without_ray() -> Generator[None]:
    yield
    shutdown_ray()


def run(penstock: Penstock, name: str, *words: str) -> tuple[Path, dict[str, Any]]:
    said = penstock("run", *WORDS, f"runs={name}", *words)
    assert said.code == 0, said.err
    (folder,) = Path(name).iterdir()
    return folder, json.loads((folder / "summary.json").read_text())


def test_one_hash_in_process_on_ray_and_after_a_stop(penstock: Penstock) -> None:
    folder, plain = run(penstock, "plain")
    _, apart = run(penstock, "apart", "executor=ray_split")
    assert apart["weights_sha256"] == plain["weights_sha256"]
    stopped, _ = run(penstock, "stopped", "algorithm.num_steps=2", "checkpoint_every=1")
    said = penstock("run", f"resume={stopped}", "algorithm.num_steps=3")
    assert said.code == 0, said.err
    again = json.loads((stopped / "summary.json").read_text())
    assert again["weights_sha256"] == plain["weights_sha256"]
    shown = penstock("samples", f"run={folder}", "limit=0").out
    assert "-- turn 0" in shown
    measured = penstock("eval", f"run={folder}")
    assert measured.code == 0, measured.err
    assert "8 held-out problems" in measured.out or "accuracy" in measured.out


def test_a_lag_is_kept_and_measured(penstock: Penstock) -> None:
    words = ("executor=ray_split", "schedule.max_lag=1")
    folder, one = run(penstock, "lag", *words)
    _, two = run(penstock, "again", *words)
    assert one["weights_sha256"] == two["weights_sha256"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["actor.converse/token_lag"] for line in lines] == [0, 1, 1]


@pytest.mark.parametrize("word", ["schedule.streaming=4", "schedule.segment_tokens=4"])
def test_what_conversations_cannot_is_refused(penstock: Penstock, word: str) -> None:
    said = penstock("run", *WORDS, word)
    assert said.code == 2
    assert "actor.converse" in said.err
