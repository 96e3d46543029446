"""Megatron trains and vLLM generates on the same devices, in other layouts, from a plan's file."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from penstock.launch.main import main
from penstock.launch.metrics import read_metrics
from penstock.planner.layout import Layout
from penstock.planner.plan import GroupPlan, Plan
from penstock.workers.ray_executor import connect_ray, shutdown_ray

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORDS = (
    "algorithm=grpo",
    "engine=megatron",
    "rollout=vllm",
    "executor=ray",
    "executor.num_threads=1",
    "schedule.deadline_s=120",
    "agreement.stop_above=1e-6",
    # vLLM's attention on CPUs has heads of 32 dimensions and more.
    "model.architecture.hidden_size=64",
    "model.architecture.intermediate_size=96",
    "model.architecture.num_hidden_layers=2",
    "model.architecture.num_attention_heads=2",
    "model.architecture.num_key_value_heads=2",
    "task.num_train=64",
    "task.num_held_out=16",
    "evaluation.num_prompts=16",
    "algorithm.roles.actor.start=model",
    "algorithm.roles.reward.worker=colocated_lengths:Lengths",
    "algorithm.optimizer.lr=1e-2",
    "algorithm.per_step.prompts=8",
    "algorithm.cfg.sampling.num_samples=4",
    "algorithm.num_steps=3",
    "rollout.options={max_decode_rows: 32}",
)
LENGTHS = '''\
"""A reward that tells the responses of an untrained model apart."""

from penstock.algorithms.roles import Reward


class Lengths(Reward):
    def build(self, context):
        return self

    def score(self, tokens, mask, prompt_id):
        return -mask.sum(1).float() - (tokens.clamp(min=0) % 7).sum(1) / 10
'''
SHARED = Plan(
    groups=(GroupPlan(name="all", devices=(0, 1)),),
    layouts={"actor.train": Layout(tp=2), "actor.generate": Layout(dp=2)},
)
"""One group in two layouts."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    """Where runs are made; Ray stays up between them."""
    made = tmp_path_factory.mktemp("colocated")
    (made / "colocated_lengths.py").write_text(LENGTHS)
    (made / "plan.json").write_text(SHARED.model_dump_json(exclude_defaults=True))
    before = Path.cwd(), os.environ.get("PYTHONPATH")
    os.chdir(made)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(made), *filter(None, [before[1]])])
    try:
        connect_ray()
        yield made
    finally:
        shutdown_ray()
        os.chdir(before[0])
        os.environ.pop("PYTHONPATH")
        if before[1] is not None:
            os.environ["PYTHONPATH"] = before[1]


def ran(folder: Path, name: str, *words: str) -> tuple[Path, str]:
    """The run's folder, and a hash of what it learnt."""
    assert main(["run", *WORDS, *words, f"runs={folder / name}"]) == 0
    (run,) = (folder / name).iterdir()
    return run, json.loads((run / "summary.json").read_text())["roles_sha256"]["actor"]


def spans(run: Path) -> list[tuple[str, float, float]]:
    """Group, start and end of every call."""
    trace: Any = json.loads((run / "trace.json").read_text())
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    groups = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    calls = [e for e in events if e["ph"] == "X"]
    return [(groups[e["pid"]], e["ts"], e["ts"] + e["dur"]) for e in calls]


def test_on_the_same_devices_the_same_is_learnt_in_turns(folder: Path) -> None:
    shared, learnt = ran(folder, "shared", f"placement={folder / 'plan.json'}")
    found = spans(shared)
    assert {group for group, _, _ in found} == {"all", "all-rollout"}
    for (one, began, ended), (other, then_began, then_ended) in combinations(found, 2):
        assert one == other or ended <= then_began or then_ended <= began

    for row in read_metrics(shared / "metrics.jsonl"):
        assert row["actor.generate/slept_bytes"] > 1 << 20  # of two replicas
        assert 0 < row["actor.train/rollout_logprob_max_diff"] < 1e-4

    apart, learnt_apart = ran(
        folder,
        "apart",
        "executor.groups={train: 1, rollout: 2}",
        "executor.tensor_parallel.train=2",
        "executor.nodes={actor.generate: rollout}",
    )
    assert learnt == learnt_apart
    for row in read_metrics(apart / "metrics.jsonl"):
        assert "actor.generate/slept_bytes" not in row
