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


def test_a_resumed_run_goes_on_with_the_average_and_only_the_actor_counts_as_trained(
    penstock: Penstock, tmp_path: Path
) -> None:
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
    none, _ = finished(
        penstock, tmp_path / "none", "algorithm.num_steps=1", "algorithm.cfg.share=1"
    )
    some, _ = finished(penstock, tmp_path / "some", "algorithm.num_steps=1")
    actor, copied = (load_file(none / "models" / r / "model.safetensors") for r in ("actor", "ref"))
    assert all(actor[name].equal(copied[name]) for name in actor)
    moved = load_file(some / "models" / "ref" / "model.safetensors")
    assert not all(moved[name].equal(actor[name]) for name in actor)
    assert not (some / "models" / "reward").exists()


def test_an_optimizer_for_it_is_refused(penstock: Penstock, tmp_path: Path) -> None:
    (tmp_path / "average.py").write_text(STEP)
    said = penstock(*SMALL, "algorithm.roles.ref.frozen=[model.embed_tokens.weight]")
    assert said.code == 2
    assert said.err == (
        "penstock: 'algorithm.roles.ref.frozen' is set, but average does not train 'ref' with a "
        "loss\n    leave it out; roles with a loss are: actor\n"
    )
