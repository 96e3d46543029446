"""A run that Megatron trains and vLLM generates for, in real processes, and what is made of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Generator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.launch.main import main
from penstock.launch.run_dir.step_logs import read_metrics
from penstock.planner.inputs.layout import Layout
from penstock.planner.plan.plan import GroupPlan, Plan
from penstock.workers.engines.roles import PolicyWorker
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.executors.on_ray.executor import shutdown_ray
from penstock.workers.models.spec import ModelSpec
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORDS = (
    "algorithm=grpo",
    "engine=megatron",
    "rollout=vllm",
    "executor=ray_split",
    "executor.tensor_parallel.train=2",
    "executor.num_threads=1",
    "schedule.deadline_s=120",
    "mismatch.stop_above=1e-6",
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
    "algorithm.roles.reward.worker=lengths:Lengths",
    # A larger eps than usual: Adam blows up the rounding of gradients that are zero.
    "algorithm.optimizer.lr=1e-3",
    "algorithm.optimizer.eps=1e-5",
    "algorithm.per_step.prompts=8",
    "algorithm.cfg.sampling.num_samples=4",
    "algorithm.num_steps=2",
    "checkpoint_every=1",
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
def made(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    """The folder of a run of two steps; Ray stays up for those that resume it."""
    folder = tmp_path_factory.mktemp("engines")
    (folder / "lengths.py").write_text(LENGTHS)
    before = Path.cwd(), os.environ.get("PYTHONPATH")
    os.chdir(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [before[1]])])
    try:
        assert main(["run", *WORDS, "executor.transport=object_store"]) == 0
        (run,) = (folder / "runs").iterdir()
        yield run
    finally:
        shutdown_ray()
        os.chdir(before[0])
        os.environ.pop("PYTHONPATH")
        if before[1] is not None:
            os.environ["PYTHONPATH"] = before[1]


def summary_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "models" / "actor" / "model.safetensors")


def checkpoint(run: Path, step: int) -> Path:
    (folder,) = (run / "checkpoints").glob(f"*{step}")
    return folder


def test_both_engines_agree_and_weights_go_past_the_controller(made: Path) -> None:
    steps = list(read_metrics(made / "metrics.jsonl"))
    assert [row["step"] for row in steps] == [0, 1]
    for row in steps:
        assert 0 < row["actor.train/rollout_logprob_max_diff"] < 1e-4
        assert row["actor.train/rollout_k3"] < 1e-8
        assert row["run/controller_bytes"] < 60_000  # the weights are 340 kB


def spans(run: Path) -> list[tuple[str, float, float]]:
    """Group, start and end of every call."""
    trace: Any = json.loads((run / "trace.json").read_text())
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    groups = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    calls = [e for e in events if e["ph"] == "X"]
    return [(groups[e["pid"]], e["ts"], e["ts"] + e["dur"]) for e in calls]


@pytest.mark.nightly
def test_on_the_same_devices_the_same_is_learnt_in_turns(made: Path) -> None:
    folder = made.parent.parent
    (folder / "plan.json").write_text(SHARED.model_dump_json(exclude_defaults=True))
    words = [word for word in WORDS if not word.startswith(("executor=", "executor.tensor"))]
    words += ["executor=ray", f"placement={folder / 'plan.json'}", f"runs={folder / 'shared'}"]
    assert main(["run", *words]) == 0
    (shared,) = (folder / "shared").iterdir()
    found = spans(shared)
    assert {group for group, _, _ in found} == {"all", "all-rollout"}
    for (one, began, ended), (other, then_began, then_ended) in combinations(found, 2):
        assert one == other or ended <= then_began or then_ended <= began
    for row in read_metrics(shared / "metrics.jsonl"):
        assert row["actor.generate/slept_bytes"] > 1 << 20  # of two replicas
        assert 0 < row["actor.train/rollout_logprob_max_diff"] < 1e-4
    for row in read_metrics(made / "metrics.jsonl"):
        assert "actor.generate/slept_bytes" not in row
    assert summary_of(shared)["roles_sha256"] == summary_of(made)["roles_sha256"]


def resumed(made: Path, name: str, *words: str) -> Path:
    """A copy of the run, gone on with from its first step's checkpoint."""
    run = made.parent / name
    shutil.copytree(made, run)
    (run / "summary.json").unlink()
    shutil.rmtree(checkpoint(run, 2))
    assert main(["run", f"resume={run}", *words]) == 0
    assert summary_of(run)["first_step"] == 1
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [0, 1]
    return run


def test_it_resumes_in_other_layouts_and_in_another_engine(made: Path) -> None:
    elsewhere = resumed(
        made,
        "elsewhere",
        "rollout=torch",
        "executor.tensor_parallel.train=1",
        "executor.pipeline_parallel.train=2",
    )
    here = resumed(made, "here", "engine=torch", "rollout=same", "executor=in_process")
    before, learnt = weights(made), weights(here)
    assert before.keys() == learnt.keys()
    # The torch engine samples other responses than vLLM, but the same wherever it is.
    torch.testing.assert_close(weights(elsewhere), learnt, atol=1e-5, rtol=0)
    name = "model.layers.1.mlp.up_proj.weight"
    assert float((before[name] - learnt[name]).abs().mean()) > 1e-4


def test_the_exported_folder_is_hugging_faces(made: Path) -> None:
    auto: Any = transformers.AutoModelForCausalLM
    exported = auto.from_pretrained(made / "models" / "actor", local_files_only=True)
    folder = ModelSpec(folder=str(made / "models" / "actor"))
    architecture = {**folder.config.to_dict()}
    spec = TorchPolicySpec(model=ModelSpec(architecture=architecture), end_ids=(2,))
    policy: PolicyWorker = spec.build(WorkerContext("actor"))
    policy.load_state(checkpoint(made, 2) / "actor")  # as two Megatron processes saved it
    tokens = torch.randint(3, 15, (4, 12), generator=torch.Generator().manual_seed(0))
    module: Any = policy.network.whole_module(torch.nn.Module)
    with torch.no_grad():
        found, expected = exported(tokens).logits, module(tokens).logits
    assert torch.equal(found, expected)
    assert summary_of(made)["roles_sha256"]["actor"] == policy.weights_sha256()
