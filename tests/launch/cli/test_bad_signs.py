"""Runs that go wrong in the usual ways say so once, with what to do; good ones are silent."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from penstock.launch.run_dir.step_logs import EVENTS, read_events

from ..conftest import Penstock, Said
from .test_run import only_run, summary_of

SMALL = (
    "model.architecture.hidden_size=16",
    "model.architecture.intermediate_size=32",
    "model.architecture.num_hidden_layers=1",
    "model.architecture.num_attention_heads=2",
    "model.architecture.num_key_value_heads=1",
    "task.num_train=64",
    "task.num_held_out=8",
    "evaluation.num_prompts=0",
    "algorithm.per_step.prompts=8",
    "algorithm.cfg.sampling.num_samples=16",
    "algorithm.before.sft.num_steps=30",
    "algorithm.before.sft.per_step.demos=32",
    "algorithm.before.sft.optimizer.lr=0.01",
    "tracker=none",
    "samples.max_rows=0",
)

SIGNS: dict[str, tuple[list[str], str]] = {
    "reward_constant": (
        ["algorithm.num_steps=4", "algorithm.roles.reward.options.scale=0"],
        "steps 0 to 2, reward.score: every response has the same score, 0\n",
    ),
    "groups_equal": (
        ["algorithm.num_steps=6", "algorithm.cfg.sampling.temperature=0.002"],
        "steps 0 to 4, reward.score: in 100% of the groups all scores are equal (mean of all ",
    ),
    "cut_off": (
        ["algorithm.num_steps=4", "algorithm.cfg.sampling.max_new_tokens=1"],
        "of the responses were cut off, after 1 tokens on average\n",
    ),
    "entropy_collapse": (
        [
            "algorithm.num_steps=8",
            "algorithm.optimizer.lr=0.05",
            "algorithm.cfg.loss.entropy_coef=-10",
        ],
        "remedy: lower algorithm.optimizer.lr; set algorithm.cfg.loss.entropy_coef above 0",
    ),
    "kl_blow_up": (
        [
            "algorithm=reference_grpo",
            "algorithm.num_steps=4",
            "algorithm.optimizer.lr=0.05",
            "algorithm.cfg.epochs=4",
        ],
        "nats per token from the reference\n",
    ),
    "clip_fraction_high": (
        [
            "algorithm.num_steps=4",
            "algorithm.optimizer.lr=0.001",
            "algorithm.cfg.epochs=16",
            "algorithm.cfg.loss.eps_low=0",
            "algorithm.cfg.loss.eps_high=0",
        ],
        "remedy: lower algorithm.optimizer.lr; lower algorithm.cfg.epochs\n",
    ),
    "mismatch": (
        ["algorithm.num_steps=14", "algorithm.roles.actor.worker=bad_signs:DriftingSpec"],
        "in the first steps\n",
    ),
}


def warned(said: Said) -> list[str]:
    """What stands behind `penstock: warning: `, each with its lines."""
    return said.err.split("penstock: warning: ")[1:]


def summary() -> dict[str, Any]:
    return summary_of(only_run())


@pytest.mark.slow
@pytest.mark.parametrize("kind", SIGNS)
def test_a_run_with_the_sign_says_so_once(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    words, text = SIGNS[kind]
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parent)])
    said = penstock("run", *SMALL, *words)
    assert said.code == 0, said.err
    events = [event for event in read_events(only_run() / EVENTS) if event["kind"] == kind]
    assert len(events) == 1
    assert summary()["warnings"][kind] == 1
    assert kind in said.err.splitlines()[-1]
    (shown,) = [one for one in warned(said) if text in one]
    assert events[0]["seen"] in shown
    assert events[0]["remedy"] in shown
    assert f"    remedy: {events[0]['remedy']}" in penstock("runs", "show", str(only_run())).out


@pytest.mark.slow
def test_a_run_without_signs_is_silent(penstock: Penstock) -> None:
    said = penstock("run", *SMALL, "algorithm.num_steps=8")
    assert said.code == 0, said.err
    assert warned(said) == []
    assert not (only_run() / EVENTS).exists()
    assert summary()["warnings"] == {}
    assert set(summary()["stage_times_s"]) == {"sft", "grpo"}


@pytest.mark.slow
def test_a_resumed_run_does_not_say_it_again(penstock: Penstock) -> None:
    words, _ = SIGNS["reward_constant"]
    assert penstock("run", *SMALL, *words, "checkpoint_every=2").code == 0
    said = penstock("run", f"resume={only_run()}", "algorithm.num_steps=8", "progress=quiet")
    assert said.code == 0, said.err
    assert warned(said) == []
    assert said.err.count("\n") == 1
    assert summary()["warnings"] == {"reward_constant": 1}


@pytest.mark.slow
def test_a_program_reads_a_run_line_by_line(penstock: Penstock) -> None:
    words, _ = SIGNS["cut_off"]
    said = penstock("run", *SMALL, *words, "progress=json")
    assert (said.code, said.err) == (0, "")
    found: list[dict[str, Any]] = [json.loads(line) for line in said.out.splitlines()]
    kinds = [one["event"] for one in found if one["event"] != "note"]
    steps = ["step"] * 3
    assert kinds == ["stage", *["step"] * 30, "stage", *steps, "warning", "step", "end"]
    (warning,) = (one for one in found if one["event"] == "warning")
    assert (warning["kind"], warning["stage"], warning["step"]) == ("cut_off", "grpo", 2)
    assert found[-1]["summary"]["weights_sha256"] == summary()["weights_sha256"]
    assert found[-1]["text"].startswith(f"{only_run().name}: 4 steps, ")
