"""Groups on which a stage's models could not be built are refused before any stage trains."""

from __future__ import annotations

from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError, PlanError
from penstock.launch.cli.hydra_app import compose
from penstock.launch.inputs.run import Run, resolved
from penstock.launch.stages.prepare import prepare
from penstock.launch.stages.report import first_notes
from penstock.launch.stages.worker_specs import worker_spec

SMALL = ("task.num_train=256", "task.num_held_out=4", "evaluation.num_prompts=0", "executor=ray")
FSDP = "engine=fsdp rollout=torch executor.groups.train=1 executor.groups.rollout=1 "
OWN = "executor.nodes.actor.generate=rollout "
TALK = (
    "algorithm=agent_grpo task=calculator executor.groups.train=1 executor.groups.rollout=1 "
    "executor.nodes.actor.converse=rollout executor.tensor_parallel.rollout=2 "
)

REFUSED = {
    "algorithm=ppo engine=megatron rollout=torch executor.groups.all=1 "
    "executor.pipeline_parallel.all=2": "the torch engine computes all layers of a model whole",
    "executor.groups.all=1 executor.tensor_parallel.all=2": (
        "'executor.tensor_parallel.all' is 2, but the torch engine runs data-parallel only"
    ),
    FSDP + OWN + "executor.tensor_parallel.rollout=3": "tensor_parallel=3 does not divide the",
    FSDP + OWN + "executor.tensor_parallel.train=2 engine.options.shards=3": (
        "has shards=3, which does not divide the 2 processes"
    ),
    FSDP + OWN + "executor.pipeline_parallel.train=2": "FSDP has no pipeline stages",
    FSDP + OWN + "executor.tensor_parallel.train=3 engine.options.shards=1": (
        "tensor parallelism 3 does not divide"
    ),
    FSDP + OWN + "executor.tensor_parallel.train=2 engine.options.shards=1 model.lora.rank=2": (
        "does not divide the matrix products of adapters"
    ),
    FSDP.replace("fsdp", "megatron")
    + OWN
    + "executor.tensor_parallel.train=3 engine.options.expert_parallel=2": (
        "has expert_parallel=2, which does not divide"
    ),
    FSDP.replace("fsdp", "megatron") + OWN + "executor.pipeline_parallel.train=7": "layers",
    TALK + "rollout=vllm": (
        "hold conversations on 2 processes that share its model, which vLLM does in one"
    ),
}


def run_of(words: str) -> Run:
    composed = compose("run", [*SMALL, *words.split()])
    del composed["resume"]
    return resolved(composed)


@pytest.mark.slow
@pytest.mark.parametrize("words", REFUSED)
def test_a_group_that_cannot_have_the_model_is_refused(words: str) -> None:
    if "megatron" in words:
        pytest.importorskip("megatron", reason="megatron-core is not installed")
    if "vllm" in words:
        pytest.importorskip("vllm", reason="vLLM is not installed")
    run = run_of(words)
    with pytest.raises((ConfigError, PlanError)) as raised:
        prepare(run, dry=True)
    assert REFUSED[words] in str(raised.value)


@pytest.mark.parametrize(
    "words",
    [
        FSDP + OWN + "algorithm=ppo executor.tensor_parallel.train=2 engine.options.shards=1",
        FSDP + OWN + "executor.tensor_parallel.rollout=2",
        TALK + "rollout=torch",
        "algorithm=ppo engine=megatron rollout=torch executor.groups.all=1 "
        "executor.tensor_parallel.all=2",
    ],
)
def test_a_group_that_can_have_the_model_is_accepted(words: str) -> None:
    if "megatron" in words:
        pytest.importorskip("megatron", reason="megatron-core is not installed")
    prepare(run_of(words), dry=True)


TURNS = (
    "engine=fsdp rollout=vllm executor.groups.train=1 executor.groups.rollout=1 "
    "executor.device=cuda executor.tensor_parallel.train=2 executor.tensor_parallel.rollout=2 "
    "executor.nodes.actor.generate=rollout "
)
ALONE = (
    "rollout=vllm executor.groups.train=1 executor.groups.rollout=1 executor.device=cuda "
    "executor.nodes.actor.generate=rollout executor.devices.train=[0] executor.devices.rollout=[0]"
)
ON_THE_SAME = "executor.devices.train=[0,1] executor.devices.rollout=[0,1] "


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (TURNS, (0, 0)),
        (TURNS + ON_THE_SAME, (1, 0)),
        (TURNS + ON_THE_SAME + "executor.transport=cuda_ipc", (1, 2)),
    ],
)
def test_vllm_is_told_what_keeps_memory_of_its_devices(words: str, found: tuple[int, int]) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    run = prepare(run_of(words), dry=True)
    spec: Any = worker_spec(run.main, "actor", run, {})
    assert (spec.rollout.sleeping_beside, spec.rollout.sent_from) == found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("executor.groups.all=1", None),
        ("executor.groups.all=1 executor.device=cuda", None),
        (
            "executor.groups.all=2 executor.device=cuda",
            "several GPUs (NCCL)",
        ),
        (TURNS + ON_THE_SAME, "vllm, several GPUs (NCCL)"),
        (ALONE, "vllm"),
    ],
)
def test_a_run_says_which_of_its_paths_never_ran_on_a_gpu(words: str, said: str | None) -> None:
    if "vllm" in words:
        pytest.importorskip("vllm", reason="vLLM is not installed")
    notes = [line for line in first_notes(prepare(run_of(words), dry=True)) if "never run" in line]
    expected = f"never run on GPUs so far: {said}; docs/gpu.md says what has"
    assert notes == ([] if said is None else [expected])
