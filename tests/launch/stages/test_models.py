"""Models that cannot be started from are refused before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.launch.cli.hydra_app import compose
from penstock.launch.inputs.run import resolved
from penstock.launch.stages.prepare import build_stages, prepare
from penstock.launch.stages.report import high_rates, rounded_adapters
from penstock.launch.stages.worker_specs import worker_specs
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec, TorchRewardModelSpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.tokenizer import TokenizerSpec
from penstock.workers.training.flat_parameters import read_tensors, write_tensors

from ..placement.test_models import ARCHITECTURE, SMALL
from ..placement.test_place import config_of

NORM = "model.norm.weight"


def rates_of(folder: Path, *words: str) -> list[str]:
    run = config_of(*words, *SMALL)
    made = run.model.model_copy(update={"folder": str(folder), "architecture": {}})
    return [line for stage in build_stages(run).stages for line in high_rates(stage, made)]


@pytest.mark.slow
def test_rates_that_are_too_high_for_a_large_model_are_said_before_the_first_step(
    tmp_path: Path,
) -> None:
    large = {**ARCHITECTURE, "vocab_size": 49152, "hidden_size": 1024, "num_attention_heads": 16}
    (tmp_path / "config.json").write_text(json.dumps(large))
    (line,) = rates_of(tmp_path, "algorithm=sft")
    assert line == (
        "warning: stage 'sft' trains a model of 103M parameters with a learning rate of 0.001, "
        "which suits one of a million; 5e-05 is usual: algorithm.optimizer.lr=5e-05"
    )
    sft, grpo = rates_of(tmp_path, "algorithm=grpo", "algorithm.roles.actor.start=sft")
    assert sft.endswith(": algorithm.before.sft.optimizer.lr=5e-05")
    assert grpo.endswith("; 1e-05 is usual: algorithm.optimizer.lr=1e-05")
    lora = "model.lora.rank=4"
    assert rates_of(tmp_path, "algorithm=grpo", lora, "algorithm.roles.actor.start=model") == []
    (line,) = rates_of(tmp_path, "algorithm=sft", lora)
    assert line.endswith("; 0.0002 is usual: algorithm.optimizer.lr=0.0002")
    assert rates_of(tmp_path, "algorithm=sft", "algorithm.optimizer.lr=2e-5") == []
    dpo = ("algorithm=dpo", "~algorithm.before")
    assert rates_of(tmp_path, *dpo) == []  # its own rate suits a large model
    (line,) = rates_of(tmp_path, *dpo, "algorithm.optimizer.lr=1e-3")
    assert line.endswith("; 5e-06 is usual: algorithm.optimizer.lr=5e-06")
    (tmp_path / "config.json").write_text(json.dumps(ARCHITECTURE))
    assert rates_of(tmp_path, "algorithm=sft") == []


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["algorithm=sft"], ""),
        (["rollout=torch", "algorithm.roles.actor.start=model"], ""),
        (["rollout=vllm", "algorithm.roles.actor.start=model"], "for 'actor.generate' (vllm)"),
        ([], "for what starts from 'sft'"),
        (["rollout=vllm"], "for 'actor.generate' (vllm) and for what starts from 'sft'"),
        (["model.dtype=float32", "rollout=vllm"], ""),
        (["model.lora.rank=0", "rollout=vllm"], ""),
    ],
)
def test_adapters_that_are_merged_into_bfloat16_are_told_of(words: list[str], where: str) -> None:
    run = config_of("model.lora.rank=4", "model.dtype=bfloat16", *words, *SMALL)
    line = (
        f"note: adapters are merged into bfloat16 weights {where}, which rounds small updates "
        "away: model.dtype=float32 keeps them"
    )
    assert rounded_adapters(build_stages(run)) == (where and line)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy with a tokenizer, a reward model, and one of each that lacks a tensor."""
    home = tmp_path_factory.mktemp("models")
    model, context = ModelSpec(architecture=ARCHITECTURE), WorkerContext("role")
    policy = TorchPolicySpec(model=model, end_ids=(2,)).build(context)
    policy.save_pretrained(home / "policy")
    TokenizerSpec(kind="char").build().save(home / "policy")
    TorchRewardModelSpec(model=model).build(context).save_pretrained(home / "reward")
    for name, missing in (("policy", NORM), ("reward", NORM.removeprefix("model."))):
        broken = shutil.copytree(home / name, home / f"broken-{name}")
        tensors = read_tensors(broken / "model.safetensors")
        del tensors[missing]
        write_tensors(broken / "model.safetensors", tensors)
    tensors = {"score.weight": torch.zeros(1, 5), "score.bias": torch.zeros(1)}
    write_tensors(shutil.copytree(home / "reward", home / "odd") / "head.safetensors", tensors)
    return home


def refused(*words: str) -> str:
    composed = compose("run", [*words, *SMALL])
    composed.pop("resume")
    with pytest.raises(ConfigError) as error:
        prepare(resolved(composed))
    return str(error.value)


WHOLE = "\n    copy or save them again, all of them, with the configuration they were made by"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["algorithm=grpo", "model=folder", "model.folder=HOME/broken-policy"],
            "'model.folder': the weights in 'HOME/broken-policy' are not those of the 'qwen2' "
            f"model that its config.json describes:\n    missing: {NORM}{WHOLE}",
        ),
        (
            ["algorithm=ppo", "algorithm.roles.reward.start=HOME/broken-reward"],
            "'algorithm.roles.reward.start': the weights in 'HOME/broken-reward' are not those of "
            f"the 'qwen2' model that its config.json describes:\n    missing: {NORM}{WHOLE}",
        ),
        (
            ["algorithm=ppo", "algorithm.roles.reward.start=HOME/odd"],
            "'algorithm.roles.reward.start': the weights in 'HOME/odd/head.safetensors' are not "
            "those of a score:\n    of another shape: score.weight [1, 5], expected [1, 16]"
            f"{WHOLE}",
        ),
        (
            ["algorithm=ppo", "algorithm.roles.actor.start=HOME/reward"],
            "'algorithm.roles.actor.start': the weights in 'HOME/reward' are not those of the "
            "'qwen2' model that its config.json describes:\n    missing: lm_head.weight" + WHOLE,
        ),
        (
            ["algorithm=ppo", "algorithm.roles.reward.start=HOME/policy"],
            "'algorithm.roles.reward' is a reward model that starts from 'HOME/policy', which has "
            "no head that scores: all scores would be random\n    train one in a stage before "
            "(algorithm.before), give the folder of one (algorithm.roles.reward.start=PATH), or "
            "set algorithm.roles.reward.worker=rule",
        ),
        *(
            (
                ["algorithm=ppo", "~algorithm.before.reward_modelling", *words],
                f"'algorithm.roles.reward' is a reward model that starts from '{start}', which has "
                "no head",
            )
            for start, words in (
                ("sft", ["algorithm.roles.reward.worker=reward_model"]),
                ("model", ["algorithm.roles.reward.start=model"]),
            )
        ),
        (
            ["+model.architecture.vocab_size=7"],
            "'model.architecture.vocab_size': the model knows 7 tokens, and the tokenizer has 17\n"
            "    give the model's own tokenizer, or an architecture without vocab_size, which then "
            "is the tokenizer's",
        ),
        (
            ["model.architecture.num_attention_heads=0"],
            "'model.architecture.num_attention_heads' is 0; expected an integer from 1 to 16384",
        ),
        (["model.architecture.model_type=t5"], "there is no key 'model.architecture."),
        (
            ["model=folder", "model.folder=HOME/policy", "+model.tokenizer.kind=byte"],
            "'model.folder': the model knows 128 tokens, and the tokenizer has 260\n    give the "
            "model's own tokenizer, or ",
        ),
    ],
)
def test_models_are_looked_at_before_a_run(models: Path, words: list[str], message: str) -> None:
    said = refused(*(word.replace("HOME", str(models)) for word in words))
    assert said.replace(str(models), "HOME")[: len(message)] == message


@pytest.mark.slow
def test_a_reward_model_may_have_a_tokenizer_of_its_own(models: Path) -> None:
    """It is not trained on tokens that are not its own, and must know those that are."""
    home = shutil.copytree(models / "reward", models / "own")
    TokenizerSpec(kind="char", alphabet="0123456789+-= ").build().save(home)
    start = f"algorithm.roles.reward.start={home}"
    composed = compose("run", ["algorithm=ppo", "~algorithm.before.sft", start, *SMALL])
    composed.pop("resume")
    run = prepare(resolved(composed))
    spec: Any = worker_specs(run.main, run, {})["reward"]
    assert (spec.own_text.folder, spec.own_text.differs) == (str(home), True)
    assert refused("algorithm=reward_modelling", start).startswith(
        f"'algorithm.roles.reward.start': the tokenizer or the chat template in '{home}' is not "
        "the run's, and responses can be written anew neither to be trained on nor of several turns"
    )
    TokenizerSpec(kind="byte").build().save(home)
    assert "the model knows 128 tokens, and the tokenizer has 260" in refused(
        "algorithm=ppo", start
    )
