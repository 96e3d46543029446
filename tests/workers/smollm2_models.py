"""SmolLM2 in tests: a batch of conversations, and one optimizer step on it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.algorithms.roles import PolicyBatch
from penstock.dataflow.runtime.call_context import call_scope
from penstock.workers.engines.roles import PolicyWorker
from penstock.workers.models.hub import packaged_folder
from penstock.workers.models.spec import ModelSpec
from penstock.workers.training.optimizer import OptimizerSpec
from torch import Tensor

NAME = "smollm2-135m"
EOS = 2
LEARNING_RATE = 1e-4


def recipe(folder: Path) -> dict[str, Any]:
    """Of a policy in float32 that `folder` names."""
    return {
        "model": ModelSpec(folder=(folder / "model").read_text(), dtype="float32"),
        "end_ids": (EOS,),
        # A larger eps than usual: Adam blows up the rounding of gradients that are next to zero.
        "optimizer": OptimizerSpec(lr=LEARNING_RATE, eps=1e-5),
    }


def write_case(folder: Path) -> None:
    """Where the model lies, and six ragged rows of its own vocabulary in two groups."""
    (folder / "model").write_text(str(packaged_folder(NAME, print)))
    random = torch.Generator().manual_seed(0)
    place = torch.arange(24).expand(6, -1)
    before = torch.tensor([5, 5, 5, 9, 9, 9])[:, None]
    after = before + torch.randint(6, 15, (6, 1), generator=random)
    tokens = torch.randint(3, 40000, (6, 24), generator=random)
    tokens[place >= after] = -1
    mask = (place >= before) & (place < after)
    numbers = torch.randn(2, 6, 24, generator=random)
    safetensors.torch.save_file(
        {
            "tokens": tokens,
            "mask": mask,
            "behavior_logprob": (numbers[0] * 0.1 - 9) * mask,
            "advantage": numbers[1],
        },
        folder / "batch.safetensors",
    )


def take_step(policy: PolicyWorker, folder: Path) -> None:
    """One step of GRPO's loss."""
    batch = PolicyBatch(**safetensors.torch.load_file(folder / "batch.safetensors"))
    with call_scope(0, 0):
        policy.train(ClippedPolicyLoss(), batch)


def differences(folder: Path, weights: Mapping[str, Tensor]) -> dict[str, float]:
    """Parameter -> how far its change is from the torch engine's, over the latter's norm."""
    before = safetensors.torch.load_file(folder / "before.safetensors")
    after = safetensors.torch.load_file(folder / "after.safetensors")
    assert weights.keys() == before.keys()
    found: dict[str, float] = {}
    for name, weight in weights.items():
        expected = after[name].double() - before[name]
        got = weight.double() - before[name]
        assert expected.norm() > 0, name
        found[name] = float((got - expected).norm() / expected.norm())
    return found
