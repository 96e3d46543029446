"""A reference that follows the trained policy, from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from penstock.launch.run_dir.run_folder import RunFolder
from safetensors.torch import load_file

from ..conftest import Penstock

pytestmark = pytest.mark.slow

STEP = """
from dataclasses import dataclass
from penstock.algorithms.reference_grpo import ReferenceGRPO
from penstock.algorithms.ops.advantages import broadcast_over_tokens, group_advantage
from penstock.algorithms.roles import Policy, Prompts, ReferencePolicyBatch, Reward, TrainMetrics


@dataclass(frozen=True, kw_only=True)
class Average(ReferenceGRPO):
    share: float = 0.25


def average_step(
    prompts: Prompts, ref: Policy, actor: Policy, reward: Reward, cfg: Average
) -> tuple[TrainMetrics, TrainMetrics]:
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    advantage = broadcast_over_tokens(group_advantage(score, roll.prompt_id), roll.mask)
    batch = ReferencePolicyBatch(
        tokens=roll.tokens,
        mask=roll.mask,
        behavior_logprob=roll.behavior_logprob,
        advantage=advantage,
        ref_logprob=ref.logprob(roll.tokens, roll.mask),
    )
    return actor.train(cfg.kl_loss(), batch), ref.follow(actor, share=cfg.share)
"""
SMALL = (
    "run",
    "algorithm=own",
    "algorithm.step=average:average_step",
    "algorithm.roles.actor.start=model",
    "algorithm.roles.ref.start=model",
    "algorithm.cfg.sampling.num_samples=2",
    "algorithm.cfg.sampling.max_new_tokens=4",
    "algorithm.per_step.prompts=4",
    "evaluation.num_prompts=8",
    "executor.num_threads=1",
    "tracker=none",
)


def finished(penstock: Penstock, folder: Path, *words: str) -> tuple[Path, dict[str, Any]]:
    (folder.parent / "average.py").write_text(STEP)
    said = penstock(*SMALL, *words, f"runs={folder}")
    assert said.code == 0, said.err
    (run,) = folder.iterdir()
    return run, json.loads((run / "summary.json").read_text())


@pytest.mark.parametrize("word", ["algorithm.cfg.share=3.0", "algorithm.cfg.share=0"])
def test_a_share_out_of_range_is_refused_before_anything_is_built(
    penstock: Penstock, tmp_path: Path, word: str
) -> None:
    (tmp_path / "average.py").write_text(STEP)
    said = penstock(*SMALL, word)
    assert said.code == 2
    assert said.err == (
        "penstock: average.py:26\n    return actor.train(cfg.kl_loss(), batch), "
        "ref.follow(actor, share=cfg.share)\n"
        f"node 'ref.follow' follows with share={float(word.split('=')[1])}; expected above 0, at "
        "most 1\n"
    )


@pytest.mark.nightly
def test_a_resumed_run_goes_on_with_the_average(penstock: Penstock, tmp_path: Path) -> None:
    _, whole = finished(penstock, tmp_path / "whole", "algorithm.num_steps=4")
    run, half = finished(penstock, tmp_path / "half", "algorithm.num_steps=2")
    assert half["weights_sha256"] != whole["weights_sha256"]
    said = penstock("run", f"resume={run}", "algorithm.num_steps=4")
    assert said.code == 0, said.err
    resumed = json.loads(RunFolder(run).summary.read_text())
    assert resumed["weights_sha256"] == whole["weights_sha256"]


def test_one_step_moves_the_reference_its_share_of_the_way(
    penstock: Penstock, tmp_path: Path
) -> None:
    # Enough responses that some differ in what they earn: with the reference where the actor is,
    # nothing else moves the actor.
    words = ("algorithm.num_steps=1", "algorithm.cfg.sampling.num_samples=64")
    none, _ = finished(penstock, tmp_path / "none", *words, "algorithm.cfg.share=1")
    some, _ = finished(penstock, tmp_path / "some", *words)
    actor, copied = (load_file(none / "models" / r / "model.safetensors") for r in ("actor", "ref"))
    assert all(actor[name].equal(copied[name]) for name in actor)
    moved = load_file(some / "models" / "ref" / "model.safetensors")
    assert not all(moved[name].equal(actor[name]) for name in actor)
    assert not (some / "models" / "reward").exists()


@pytest.mark.parametrize(
    "word", ["algorithm.roles.ref.frozen=[lm_head.*]", "algorithm.roles.ref.optimizer.lr=0.1"]
)
def test_an_optimizer_for_it_is_refused(penstock: Penstock, tmp_path: Path, word: str) -> None:
    (tmp_path / "average.py").write_text(STEP)
    said = penstock(*SMALL, word)
    assert said.code == 2
    key = word.split("=")[0].removesuffix(".lr")
    assert said.err == (
        f"penstock: '{key}' is set, but average does not train 'ref' with a "
        "loss\n    leave it out; roles with a loss are: actor\n"
    )


@pytest.mark.parametrize("command", ["run", "plan"])
def test_an_average_of_16_bits_is_refused_before_anything_is_built(
    penstock: Penstock, tmp_path: Path, command: str
) -> None:
    (tmp_path / "average.py").write_text(STEP)
    said = penstock(command, *SMALL[1:], "model.dtype=bfloat16")
    assert said.code == 2
    assert said.err == (
        "penstock: average.py:26\n    return actor.train(cfg.kl_loss(), batch), "
        "ref.follow(actor, share=cfg.share)\n"
        "node 'ref.follow' averages weights (share=0.25), but 'model.dtype' is 'bfloat16', and 16 "
        "bits hold no change smaller than 1/256 of a weight\n"
        "    set model.dtype=float32, or let it copy now and then: share=1.0, every=N\n"
    )


def test_a_refusal_after_an_earlier_stage_does_not_say_how_to_go_on(
    penstock: Penstock, tmp_path: Path
) -> None:
    (tmp_path / "average.py").write_text(STEP)
    words = [word for word in SMALL if word != "algorithm.roles.actor.start=model"]
    words += ["algorithm.before.sft.num_steps=1", "algorithm.before.sft.per_step.demos=2"]
    said = penstock(*words, "algorithm.roles.actor.frozen=[no.such.name]")
    assert said.code == 1
    assert "no.such.name" in said.err
    assert "\n    what was trained before is in runs/" in said.err
    assert "to continue" not in said.err


@pytest.mark.nightly
def test_a_kl_that_is_added_and_a_reference_that_moves(penstock: Penstock, tmp_path: Path) -> None:
    """GRPO with the KL gives the bits of `reference_grpo`; a reference that moves gives others."""
    words = (*SMALL[3:], "algorithm.num_steps=3", "algorithm.cfg.sampling.num_samples=16")
    runs: dict[str, tuple[str, ...]] = {
        "own": ("algorithm=reference_grpo", "algorithm.cfg.kl_coef=0.5"),
        "added": ("algorithm=grpo", "algorithm.reference.kl_coef=0.5"),
    }
    runs["moved"] = (*runs["added"], "algorithm.reference.sync_every=1")
    found: dict[str, Any] = {}
    for name, given in runs.items():
        said = penstock("run", *given, *words, f"runs={tmp_path / name}")
        assert said.code == 0, said.err
        (run,) = (tmp_path / name).iterdir()
        found[name] = json.loads((run / "summary.json").read_text())["roles_sha256"]
    assert found["added"] == found["own"]
    assert found["moved"]["actor"] != found["added"]["actor"]
    assert found["moved"].keys() - found["added"].keys() == {"ref"}
