"""Runs that go on from an adapter, and what is made of them afterwards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.launch.run_dir.step_logs import read_metrics
from penstock.launch.stages.export import kept_run
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.models.lora import LoraSpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.tokenizer import TokenizerSpec
from torch import Tensor

from ..conftest import Penstock
from .test_eval import only_run

ARCHITECTURE = {
    "model_type": "qwen2",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
WORDS = (
    "algorithm=reference_grpo",
    "~algorithm.before",
    "algorithm.roles.actor.start=model",
    "algorithm.num_steps=2",
    "algorithm.per_step.prompts=4",
    "algorithm.optimizer.lr=0.01",
    "evaluation.num_prompts=0",
    "model=base",
    "model.dtype=float32",
    "task.num_train=64",
    "task.num_held_out=8",
    "tracker=none",
)
TOKENS = torch.arange(3, 11).expand(2, 8)
MASK = torch.arange(8).expand(2, 8) > 0


def said_by(spec: Any) -> Tensor:
    worker = spec.build(WorkerContext("actor"))
    with call_scope(0, 0):
        return worker.logprob(TOKENS, MASK)


def folder_policy(folder: Path, lora: LoraSpec = LoraSpec()) -> Any:
    return TorchPolicySpec(model=ModelSpec(folder=str(folder)), end_ids=(2,), lora=lora)


@pytest.mark.slow
def test_a_run_goes_on_from_the_adapter_of_another(penstock: Penstock) -> None:
    tokenizer = TokenizerSpec(kind="char").build()
    model = ModelSpec(architecture={**ARCHITECTURE, "vocab_size": tokenizer.vocab_size})
    TorchPolicySpec(model=model, end_ids=(2,)).build(WorkerContext("a")).save_pretrained(
        Path("base")
    )
    tokenizer.save(Path("base"))
    said = penstock("run", *WORDS, "model.lora.rank=2", "model.lora.alpha=64", "runs=first")
    assert said.code == 0, said.err
    first = only_run("first") / "models" / "actor"
    settings = json.loads((first / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "base"
    assert (settings["r"], settings["lora_alpha"], settings["use_rslora"]) == (2, 64, False)
    said = penstock("export", f"run={only_run('first')}", "output=merged")
    assert said.code == 0, said.err
    card = Path("merged/README.md").read_text()
    assert "| began as | base |\n| LoRA rank | 2 |\n" in card

    lora = f"model.lora.folder={first / 'adapter'}"
    said = penstock("run", *WORDS, lora, "model.lora.alpha=32", "runs=refused")
    assert said.code == 2
    assert f"'model.lora.alpha' is 32.0, but the adapter in '{first}/adapter'" in said.err
    said = penstock("eval", "model=base", lora, "model.lora.rank=3", "task.num_held_out=8")
    assert "'model.lora.rank' is 3, but the adapter in" in said.err, said.err
    assert said.code == 2

    said = penstock("run", *WORDS, lora, "runs=second")
    assert said.code == 0, said.err
    second = only_run("second")
    assert read_metrics(second / "metrics.jsonl")[0]["actor.train/ref_kl_k3_per_token"] == 0
    started = LoraSpec(folder=str(first / "adapter"))
    torch.testing.assert_close(
        said_by(folder_policy(Path("base"), started)), said_by(folder_policy(first))
    )

    exported = said_by(folder_policy(second / "models" / "actor"))
    said = penstock("export", f"run={second}", "adapter=true", "output=alone")
    assert said.code == 0, said.err
    alone = folder_policy(Path("base"), LoraSpec(folder="alone"))
    torch.testing.assert_close(said_by(alone), exported)
    assert {file.name for file in Path("alone").iterdir()} >= {"README.md", "tokenizer.json"}
    assert not list(Path("alone").glob("model*"))

    shutil.rmtree(second / "checkpoints")
    _, spec = kept_run(str(second)).policy(None)
    assert torch.equal(said_by(spec), exported), "its adapter is not added a second time"
