"""One process of `test_vllm_parallel`: `python vllm_rank.py PROCESS TENSOR_PARALLEL FOLDER`.

Writes what it sampled to FOLDER; afterwards process 0 samples the same with its own engine.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from forked_ranks import join
from penstock.algorithms.roles import Sampling
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.vllm_engine.generator import VllmPolicy
from torch import Tensor
from torch_models import make_prompts
from vllm_models import (
    generate,
    hugging_face_logprob,
    model_spec,
    random_weights,
    set_weights,
    start,
)

SAMPLING = Sampling(num_samples=3, max_new_tokens=20)


def sample(policy: VllmPolicy, module: Any) -> dict[str, Tensor]:
    """Tokens after an update, and their largest difference to Hugging Face."""
    policy.load_weights(random_weights(module, 1))
    prompt, prompt_id = make_prompts(8)
    roll = generate(policy, prompt, prompt_id, SAMPLING)
    difference = (roll.behavior_logprob - hugging_face_logprob(module, roll)).abs().max()
    return {"tokens": roll.tokens, "difference": difference}


def main(process: int, tensor_parallel: int, folder: Path) -> None:
    join(process, tensor_parallel, folder / "store")
    module: Any = model_spec("qwen2-tied").causal_lm("cpu")
    set_weights(module, random_weights(module, 1))
    context = WorkerContext("actor", 7, tensor_parallel=tensor_parallel, tensor_rank=process)
    policy = start("qwen2-tied", context=context)
    found = {f"{process}/{name}": value for name, value in sample(policy, module).items()}
    found[f"{process}/layout"] = torch.tensor(sorted(policy.weights_layout().bytes_on))
    policy.close()
    if process == 0:
        policy = start("qwen2-tied")
        found |= {f"alone/{name}": value for name, value in sample(policy, module).items()}
        policy.close()
    safetensors.torch.save_file(found, folder / f"{process}.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
