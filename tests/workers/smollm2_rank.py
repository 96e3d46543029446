"""The processes of `test_smollm2_steps`: `python smollm2_rank.py FOLDER SIZE LAYOUT...`.

A LAYOUT is "ENGINE,TENSOR,STAGES:CASE": "megatron,1,2:step", or "fsdp,2,1:stale". Of each, one
process writes how far every parameter's change is from the torch engine's, to
"ENGINE-TENSOR-STAGES-CASE.json".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked_ranks import fork_groups, join
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.fsdp_engine.specs import FsdpPolicySpec
from penstock.workers.engines.megatron_engine.specs import MegatronPolicySpec
from penstock.workers.engines.roles import PolicyWorker
from smollm2_models import LEARNING_RATE, differences, recipe, take_step

SPECS: dict[str, Any] = {"megatron": MegatronPolicySpec, "fsdp": FsdpPolicySpec}


def main(process: int, size: int, folder: Path, layouts: list[str]) -> None:
    join(process, size, folder / f"store-{size}-{layouts[0]}", limit_s=300)
    for layout in layouts:
        where, case = layout.split(":")
        engine, tensor, stages = where.split(",")
        context = WorkerContext(
            "actor",
            seed=7,
            tensor_parallel=int(tensor),
            tensor_rank=process % int(tensor),
            pipeline_parallel=int(stages),
            stage=process // int(tensor),
        )
        policy: PolicyWorker = SPECS[engine](**recipe(folder)).build(context)
        if case == "stale" and process == 1:
            go_stale(policy)
        take_step(policy, folder)
        weights = policy.export_weights()
        if weights:  # of the process that answers calls
            name = f"{engine}-{tensor}-{stages}-{case}.json"
            (folder / name).write_text(json.dumps(differences(folder, weights)))
        del policy, weights
        dist.barrier()
    dist.destroy_process_group()


def go_stale(policy: PolicyWorker) -> None:
    """One slice of this process is as far from where it should be as a step moves it."""
    matrices = [tensor for tensor in policy.local_tensors().values() if tensor.dim() == 2]
    stale = matrices[len(matrices) // 2]
    random = torch.Generator().manual_seed(1)
    stale.add_(torch.randn(stale.shape, generator=random), alpha=LEARNING_RATE)
    policy.weights_changed()


if __name__ == "__main__":
    fork_groups(main)
