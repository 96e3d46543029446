"""`executor.memory_limit`: what is predicted to need more is refused, with what makes it fit."""

from __future__ import annotations

import re

import pytest
from penstock.dataflow.errors import ConfigError, PlanError
from penstock.launch.stages.memory_limit import check_memory
from penstock.launch.stages.prepare import build_stages, prepare

from ..placement.test_place import config_of

SMALL = (
    "task.num_train=64",
    "task.num_held_out=8",
    "evaluation.num_prompts=8",
    "algorithm.per_step.prompts=8",
    "~algorithm.before",
)

SMOLLM2 = (
    *SMALL,
    "model.dtype=bfloat16",
    "model.architecture={model_type:llama,vocab_size:49152,hidden_size:576,intermediate_size:1536,"
    "num_hidden_layers:30,num_attention_heads:9,num_key_value_heads:3,"
    "max_position_embeddings:8192,tie_word_embeddings:true}",
    "task.max_response_tokens=512",
    "algorithm.per_step.prompts=12",
    "algorithm.cfg.sampling.num_samples=8",
)
"""SmolLM2-135M's shape, on 12 prompts x 8 samples x 512 tokens."""

PREDICTED = (
    "'executor.memory_limit' is {limit}, but the planner predicts a peak of 4.87 GiB\n"
    "    in 'actor.train': optimizer 1.50 GiB, activations 1.35 GiB, gradients 675 MiB; and "
    "620 MiB of each process without models\n"
)
"""What is said of it before it says what to set."""


def refusal(*words: str) -> str:
    """What is said of a run that does not fit."""
    with pytest.raises(PlanError) as caught:
        prepare(config_of(*words))
    return str(caught.value)


def test_without_a_limit_nothing_is_predicted() -> None:
    prepare(config_of(*SMALL, "engine=torch"))


def test_a_run_that_fits_starts() -> None:
    prepare(config_of(*SMALL, "executor.memory_limit=1GiB"))
    prepare(config_of(*SMOLLM2, "executor.memory_limit=6GiB"))


@pytest.mark.slow
def test_a_limit_that_the_plain_path_cannot_hold() -> None:
    said = refusal(*SMOLLM2, "executor.memory_limit=4.5GiB")
    assert said == PREDICTED.format(limit="4.50 GiB") + (
        "    set engine.options.activation_checkpointing=true "
        "algorithm.roles.actor.options.max_decode_rows=64, for 4.16 GiB"
    )
    # It is held with what the message says.
    keys = re.findall(r"(\S+=[^ ,]+)", said.splitlines()[2])
    prepare(config_of(*SMOLLM2, "executor.memory_limit=4.5GiB", *keys))


@pytest.mark.slow
def test_adapters_need_less_and_a_reference_no_weights_of_its_own() -> None:
    adapters = (*SMOLLM2, "model.lora.rank=16", "executor.memory_limit=1GiB")
    for algorithm in ("grpo", "reference_grpo"):
        said = refusal(f"algorithm={algorithm}", *adapters)
        assert "predicts a peak of 3.37 GiB\n" in said, algorithm


@pytest.mark.slow
def test_generation_is_bounded_by_rows() -> None:
    said = refusal(*SMOLLM2, "executor.memory_limit=3.8GiB")
    assert said == PREDICTED.format(limit="3.80 GiB") + (
        "    set engine.options.activation_checkpointing=true "
        "algorithm.roles.actor.options.max_decode_rows=32, for 3.76 GiB"
    )
    keys = re.findall(r"(\S+=[^ ,]+)", said.splitlines()[2])
    prepare(config_of(*SMOLLM2, "executor.memory_limit=3.8GiB", *keys))


@pytest.mark.slow
def test_evaluation_counts() -> None:
    words = (*SMOLLM2, "task.num_held_out=512", "evaluation.num_prompts=512")
    assert "in 'evaluation': kv cache" in refusal(*words, "executor.memory_limit=6GiB")


@pytest.mark.slow
def test_nothing_makes_it_fit() -> None:
    said = refusal(*SMOLLM2, "executor.memory_limit=2GiB")
    assert said == PREDICTED.format(limit="2.00 GiB") + (
        "    raise the limit, or choose shorter responses or a smaller model: with "
        "engine.options.activation_checkpointing=true engine.options.micro_batch_tokens=256 "
        "algorithm.roles.actor.options.max_decode_rows=8 it is still 3.57 GiB"
    )


@pytest.mark.slow
def test_processes_add_up() -> None:
    words = (*SMALL, "executor=ray", "executor.groups={train:2}")
    prepare(config_of(*words, "executor.memory_limit=2GiB"))
    assert "a peak of 1.8" in refusal(*words, "executor.memory_limit=1800MiB")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("executor.device=cuda",),
         "'executor.memory_limit' is set, but what 'cuda' devices hold is not compared with it\n "
         "   leave it out"),
        (("algorithm=env_ppo", "model=mlp", "task=cartpole"),
         "'executor.memory_limit' is set, but no role of env_ppo has a language model\n    leave "
         "it out"),
        (("engine=fsdp", "rollout=torch", "executor=ray_split"),
         "'executor.memory_limit' is set, but 'actor.train' runs on engine=fsdp, which is not "
         "predicted\n    leave it out"),
        (("algorithm.roles.actor.options.offload=true",),
         "'executor.memory_limit' is set, but 'actor' is offloaded to the memory that it limits\n"
         "    leave it out"),
    ],
)  # fmt: skip
def test_what_cannot_be_predicted(words: tuple[str, ...], message: str) -> None:
    run = config_of(*words, "executor.memory_limit=6GiB")
    with pytest.raises(ConfigError) as caught:
        check_memory(build_stages(run))
    assert str(caught.value) == message


@pytest.mark.slow
@pytest.mark.parametrize("size", ["6", "6 gigabytes", "-1GiB", "0GiB", "9" * 400 + "GiB", "nanGiB"])
def test_a_limit_is_a_size(size: str) -> None:
    with pytest.raises(ConfigError, match=r"executor\.memory_limit") as caught:
        config_of(f"executor.memory_limit='{size}'")
    assert len(str(caught.value).splitlines()) < 4
