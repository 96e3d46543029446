"""One process of `test_megatron_*`: `python megatron_rank.py PROCESS TP DP PP FOLDER PART...`.

FOLDER holds models and batches; what a part finds is written to it, named by the process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from megatron_models import (
    FAMILIES,
    OPTIMIZER,
    load_batch,
    train_pairs,
    train_policy,
    train_value,
)
from penstock.dataflow.worker import WorkerContext
from penstock.workers.megatron_policy import MegatronPolicy, MegatronPolicySpec
from penstock.workers.megatron_reward import MegatronRewardSpec
from penstock.workers.megatron_value import MegatronValueSpec
from penstock.workers.model import ModelSpec
from torch import Tensor


class Part:
    """What a process was started with, and what it found."""

    def __init__(self, process: int, tp: int, dp: int, pp: int, folder: Path) -> None:
        self.folder = folder
        self.sizes: dict[str, Any] = {
            "rank": process // tp % dp,
            "num_ranks": dp,
            "tensor_parallel": tp,
            "tensor_rank": process % tp,
            "pipeline_parallel": pp,
            "stage": process // tp // dp,
        }
        self.name = f"tp{tp}dp{dp}pp{pp}-{process}"
        self.found: dict[str, Tensor] = {}

    def context(self, role: str) -> WorkerContext:
        return WorkerContext(role, seed=7, **self.sizes)

    def policy(self, family: str, **options: Any) -> MegatronPolicy:
        model = ModelSpec(folder=str(self.folder / family))
        spec = MegatronPolicySpec(model=model, eos_token_id=2, **options)
        return spec.build(self.context("actor"))

    def rows(self, batch: Any) -> Any:
        """This rank's rows: uneven shares, whole groups of four."""
        if self.sizes["num_ranks"] == 1:
            return batch
        rank = self.sizes["rank"]
        return {key: value[:8] if rank == 0 else value[8:] for key, value in batch.items()}

    def keep(self, prefix: str, tensors: Any) -> None:
        self.found |= {f"{prefix}/{name}": value for name, value in tensors.items()}


def logits(part: Part) -> None:
    batch = load_batch(part.folder)
    for family in FAMILIES:
        policy = part.policy(family, micro_batch_tokens=150)
        part.found[f"{family}/logprob"] = policy.logprob(batch["tokens"], batch["mask"])
        part.found[f"{family}/cold"] = policy.logprob(
            batch["tokens"], batch["mask"], temperature=0.7
        )
        rows = batch["tokens"][:3]

        def step(tokens: Tensor, policy: Any = policy, family: str = family) -> Tensor:
            if not policy.network.is_last:
                return policy.network.states(tokens)
            part.found[f"{family}/logits"] = policy.network.outputs(tokens, tokens >= 0)[0]
            return torch.zeros(())

        with torch.no_grad():
            policy.network.run(step, [rows], backward=False)
        part.keep(f"{family}/export", policy.export_weights())
        stored = sum(tensor.numel() for tensor in policy.local_tensors().values())
        part.found[f"{family}/stored"] = torch.tensor([stored, policy.num_elements])


def train(part: Part) -> None:
    batch = part.rows(load_batch(part.folder))
    for family, options in (
        ("qwen2-tied", {"micro_batch_tokens": 60}),
        ("llama", {"share_optimizer": False}),
        ("qwen3", {"sequence_parallel": True, "micro_batch_tokens": 200}),
    ):
        policy = part.policy(family, optimizer=OPTIMIZER, **options)
        part.keep(f"{family}/metric", train_policy(policy, batch))
        part.keep(family, policy.export_weights())
        if family == "qwen2-tied":
            policy.save_state(part.folder / f"state-{part.name.split('-')[0]}")
    model = ModelSpec(folder=str(part.folder / "qwen2-tied"))
    options: dict[str, Any] = {"model": model, "optimizer": OPTIMIZER, "micro_batch_tokens": 90}
    critic = MegatronValueSpec(zero_init_head=False, **options).build(part.context("critic"))
    part.found["value/before"] = critic.value(batch["tokens"], batch["mask"])
    part.keep("value/metric", train_value(critic, batch))
    part.keep("value", critic.export_weights())
    reward = MegatronRewardSpec(**options).build(part.context("reward"))
    rows = torch.arange(len(batch["tokens"]))
    part.found["reward/before"] = reward.score(batch["tokens"], batch["mask"], rows)
    part.keep("reward/metric", train_pairs(reward, batch))
    part.keep("reward", reward.export_weights())


PARTS: dict[str, Callable[[Part], None]] = {"logits": logits, "train": train}


def main(process: int, tp: int, dp: int, pp: int, folder: Path, parts: list[str]) -> None:
    part = Part(process, tp, dp, pp, folder)
    size = tp * dp * pp
    if size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / f'store-{tp}-{dp}-{pp}-{parts[0]}'}",
            rank=process,
            world_size=size,
            timeout=timedelta(seconds=60),
        )
    for name in parts:
        part.found = {}
        PARTS[name](part)
        contiguous = {key: value.detach().contiguous() for key, value in part.found.items()}
        safetensors.torch.save_file(contiguous, folder / f"{name}-{part.name}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    numbers = [int(word) for word in sys.argv[1:5]]
    main(*numbers, Path(sys.argv[5]), sys.argv[6:])  # type: ignore[call-arg]
