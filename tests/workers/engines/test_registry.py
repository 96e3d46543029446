"""What engines declare of themselves: names, workers that are there, and layouts they run."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.planner.inputs.calls import CallKind
from penstock.planner.inputs.layout import Layout
from penstock.planner.inputs.model_shape import ModelShape, shape_of
from penstock.workers.engines.engine import EngineKind, Requirement
from penstock.workers.engines.registry import DEFAULT, ENGINES, rollouts, trainers

QWEN = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 64,
}


def shape(**changes: object) -> ModelShape:
    return shape_of({**QWEN, **changes})


def test_every_worker_that_an_engine_names_is_there() -> None:
    """A name is a string, so nothing else would notice that a class was moved."""
    declared = [replace(engine, needs=None) for engine in ENGINES.values()]
    specs = [engine.spec(worker) for engine in declared for worker in engine.roles]
    specs += [engine.rollout_spec for engine in declared if engine.rollout is not None]
    assert len(specs) == 12
    assert all(callable(spec.build) for spec in specs)


def test_an_engine_trains_or_generates_or_both() -> None:
    assert trainers() == ["torch", "fsdp", "megatron"]
    assert rollouts() == ["torch", "vllm"]
    assert set(trainers()) | set(rollouts()) == set(ENGINES)
    for name in trainers():
        assert {"policy", "value", "reward_model"} <= set(ENGINES[name].roles)
    assert DEFAULT.generates
    assert DEFAULT.needs is None


@pytest.mark.slow
def test_importing_the_registry_imports_no_engine() -> None:
    code = (
        "import sys, penstock.workers.engines.registry\n"
        "print([name for name in ('ray', 'transformers', 'vllm', 'megatron', 'hydra')\n"
        "       if name in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=False
    )
    assert (ran.stdout.strip(), ran.stderr) == ("[]", "")


def test_what_is_not_installed_is_said_with_what_to_install() -> None:
    missing = Requirement("nosuchmodule", "no-such-package", "penstock-rl[such]")
    engine = EngineKind(
        planned=DEFAULT.planned, roles=DEFAULT.roles, rollout=DEFAULT.rollout, needs=missing
    )
    with pytest.raises(ConfigError) as caught:
        engine.spec("policy")
    assert str(caught.value) == (
        "engine=torch needs the package no-such-package, which is not installed\n"
        "    pip install 'penstock-rl[such]'"
    )
    with pytest.raises(ConfigError, match="^rollout=torch needs the package no-such-package"):
        _ = engine.rollout_spec


@pytest.mark.parametrize(
    ("engine", "kind", "layout"),
    [
        ("torch", "train", Layout(dp=4)),
        ("torch", "train", Layout(dp=2, checkpointing=True)),
        ("torch", "generate", Layout(dp=2, zero=3)),  # of a frozen policy that another evaluates
        ("fsdp", "train", Layout(dp=4, zero=3)),
        ("fsdp", "train", Layout(tp=2, dp=2, zero=3)),
        ("fsdp", "forward", Layout(dp=2)),
        ("fsdp", "train", Layout(tp=2, cp=2, dp=2, zero=3, checkpointing=True)),
        ("fsdp", "forward", Layout(cp=2)),
        ("megatron", "train", Layout(tp=2, pp=2, dp=2, zero=1, sequence_parallel=True)),
        ("megatron", "forward", Layout(pp=4)),
        ("megatron", "train", Layout(dp=2, checkpointing=True)),
        ("vllm", "generate", Layout(tp=2, dp=2)),
    ],
)
def test_what_an_engine_runs(engine: str, kind: CallKind, layout: Layout) -> None:
    assert ENGINES[engine].why_not(layout, kind, shape()) is None


@pytest.mark.parametrize(
    ("engine", "kind", "layout", "problem"),
    [
        ("torch", "train", Layout(tp=2), "the torch engine runs data-parallel only"),
        ("torch", "train", Layout(dp=2, zero=1), "the torch engine runs data-parallel only"),
        ("fsdp", "generate", Layout(), "FSDP does not generate here"),
        ("fsdp", "forward", Layout(pp=2), "FSDP has no pipeline stages"),
        ("fsdp", "train", Layout(dp=2, zero=1),
         "FSDP shares a model's gradients and weights (zero=2 or 3) or nothing"),
        ("fsdp", "train", Layout(tp=2, sequence_parallel=True),
         "FSDP does not cut activations between tensor-parallel regions"),
        ("fsdp", "forward", Layout(tp=4), "FSDP cannot divide 2 key heads by tp=4"),
        ("fsdp", "forward", Layout(dp=2, ep=2), "FSDP does not divide a mixture's experts"),
        ("megatron", "generate", Layout(), "Megatron does not generate here"),
        ("megatron", "train", Layout(dp=2, zero=3),
         "Megatron shares no more than the optimizer's state"),
        ("megatron", "train", Layout(tp=4), "Megatron cannot divide 2 key heads by tp=4"),
        ("megatron", "train", Layout(cp=2),
         "Megatron's own attention has no context parallelism without Transformer Engine"),
        ("megatron", "train", Layout(dp=2, ep=2), "qwen2 has no experts to divide by ep=2"),
        ("vllm", "train", Layout(), "vLLM only generates"),
        ("vllm", "generate", Layout(pp=2), "vLLM has no pipeline stages here"),
        ("vllm", "generate", Layout(offload=True),
         "engine 'vllm' keeps a model on the device that it generates with"),
    ],
)  # fmt: skip
def test_what_an_engine_does_not_run(
    engine: str, kind: CallKind, layout: Layout, problem: str
) -> None:
    assert ENGINES[engine].why_not(layout, kind, shape()) == problem


def test_an_engine_knows_its_families() -> None:
    mistral = shape(model_type="mistral")
    assert ENGINES["megatron"].why_not(Layout(), "train", mistral) is None
    other = mistral.model_copy(update={"family": "gemma"})
    why = ENGINES["megatron"].why_not(Layout(), "train", other)
    assert why == (
        "Megatron computes llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe here, "
        "not 'gemma'"
    )
    mixture = shape(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
    assert ENGINES["megatron"].why_not(Layout(dp=4, ep=2, zero=1), "train", mixture) is None
    assert ENGINES["megatron"].why_not(Layout(dp=4, ep=2), "train") is None
    fsdp = ENGINES["fsdp"]
    assert fsdp.why_not(Layout(dp=2, zero=3), "train", mistral) is None
    assert fsdp.why_not(Layout(dp=4, zero=3), "train", mixture) is None
    assert fsdp.why_not(Layout(dp=8, zero=3), "train", mixture) == (
        "FSDP divides 4 experts among at most as many processes"
    )
    assert fsdp.why_not(Layout(tp=2), "train", mistral) == (
        "FSDP has tensor parallelism for llama, qwen2, qwen3, not for 'mistral'"
    )
    assert fsdp.why_not(Layout(cp=2), "train", mistral) == (
        "FSDP has context parallelism for llama, qwen2, qwen3, not for 'mistral'"
    )


@pytest.mark.parametrize(
    ("engine", "layout", "division", "options"),
    [
        ("torch", Layout(dp=4), (1, 1), {}),
        ("torch", Layout(dp=2, checkpointing=True), (1, 1), {"activation_checkpointing": True}),
        ("megatron", Layout(tp=2, pp=2, dp=2), (2, 2), {}),
        ("megatron", Layout(tp=2, sequence_parallel=True), (2, 1), {"sequence_parallel": True}),
        ("megatron", Layout(checkpointing=True), (1, 1), {"activation_checkpointing": True}),
        ("megatron", Layout(tp=2, pp=2, dp=4, ep=2), (4, 2), {"expert_parallel": 2}),
        ("fsdp", Layout(dp=4, zero=3), (4, 1), {"shards": 4, "context_parallel": 1}),
        ("fsdp", Layout(tp=2, dp=2, zero=3), (4, 1), {"shards": 2, "context_parallel": 1}),
        ("fsdp", Layout(tp=2, dp=2), (2, 1), {"shards": 1, "context_parallel": 1}),
        ("fsdp", Layout(cp=2, dp=2, zero=3), (4, 1), {"shards": 4, "context_parallel": 2}),
        ("fsdp", Layout(tp=2, cp=3), (6, 1), {"shards": 3, "context_parallel": 3}),
        ("vllm", Layout(tp=2, dp=2), (2, 1), {}),
    ],
)
def test_a_layout_says_what_processes_and_workers_are(
    engine: str, layout: Layout, division: tuple[int, int], options: dict[str, object]
) -> None:
    assert ENGINES[engine].division(layout) == division
    assert ENGINES[engine].options(layout) == options
