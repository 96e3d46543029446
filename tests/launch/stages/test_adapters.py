"""`model.lora`: which specs of a run's workers say something of adapters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.launch.inputs.data import load_data
from penstock.launch.placement.models import with_models
from penstock.launch.stages.prepare import build_stages
from penstock.launch.stages.worker_specs import check_options, worker_specs
from penstock.workers.engines.fsdp_engine.specs import FsdpPolicySpec
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec

from ..placement.test_place import config_of

WORDS = (
    "algorithm=reference_grpo",
    "task.num_train=64",
    "task.num_held_out=8",
    "evaluation.num_prompts=8",
    "model.lora.rank=4",
    "~algorithm.before",
)


def specs(*words: str) -> dict[str, Any]:
    run = config_of(*WORDS, *words)
    stage = build_stages(run).stages[-1]
    check_options(stage, run)
    run = replace(run, data=load_data(run.config.task, run.model))
    return dict(worker_specs(stage, run, {}))


def test_a_reference_stands_on_the_weights_below_the_adapters() -> None:
    made = specs()
    actor, reference = made["actor"], made["ref"]
    assert isinstance(actor, TorchPolicySpec)
    assert (actor.lora.rank, actor.shares_weights) == (4, False)
    assert (reference.lora.rank, reference.shares_weights) == (0, True)


def test_a_reference_that_waits_in_host_memory_has_weights_of_its_own() -> None:
    """What it gives up between its calls is what the actor computes with."""
    reference = specs("algorithm.roles.ref.options.offload=true")["ref"]
    assert (reference.offload, reference.shares_weights) == (True, False)


def test_the_folders_adapter_is_not_added_to_what_an_earlier_stage_trained(tmp_path: Path) -> None:
    """It is merged into the earlier stage's model already; only the first stage goes on from it."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    words = [word for word in WORDS if not word.startswith(("~", "model.lora"))]
    run = with_models(config_of(*words, f"model.lora.folder={folder}"))
    first, main = build_stages(run).stages
    data = load_data(run.config.task, run.model)
    of_first: Any = worker_specs(first, replace(run, data=data), {})
    results = {first.name: (first, tmp_path)}
    of_main: Any = worker_specs(main, replace(run, data=data), results)
    begun = of_first["actor"].lora
    assert (begun.folder, begun.rank, begun.alpha) == (str(folder), 4, 8)
    later = of_main["actor"].lora
    assert (later.folder, later.rank, later.alpha, later.target_modules) == (
        None,
        4,
        8,
        ("q_proj",),
    )
    assert (of_main["ref"].lora.rank, of_main["ref"].shares_weights) == (0, True)


@pytest.mark.parametrize("rollout", ["torch", "vllm"])
def test_other_engines_get_adapters_where_they_are_trained_and_sampled_with(rollout: str) -> None:
    made = specs("engine=fsdp", f"rollout={rollout}", "executor=ray_split")
    actor, reference = made["actor"], made["ref"].train
    assert isinstance(actor.train, FsdpPolicySpec)
    assert (actor.train.lora.rank, actor.rollout.lora.rank, reference.lora.rank) == (4, 4, 0)


def test_megatron_has_none() -> None:
    with pytest.raises(ConfigError) as refused:
        specs("engine=megatron", "rollout=torch", "executor=ray_split")
    assert str(refused.value) == (
        "'model.lora.rank' is 4, but 'ref.logprob' runs on the engine 'megatron', which has no "
        "adapters\n    train the weights themselves (model.lora.rank=0), or take engine=torch or "
        "engine=fsdp"
    )
