"""A real vLLM engine, started once: what is its own.

What it has in common with other engines is in `rollout/test_generation_engines.py`.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from penstock.algorithms.roles import Rollout, Sampling
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.vllm_engine.engine import (
    EngineOptions,
    GenerationAbortedError,
    Request,
    engine_arguments,
)
from penstock.workers.engines.vllm_engine.generator import (
    VllmPolicy,
    VllmPolicySpec,
    engine_options,
    longest_sequence,
)
from penstock.workers.models.spec import ModelSpec
from penstock.workers.training.flat_parameters import read_tensors, write_tensors
from torch_models import EOS, architecture, make_policy, make_prompts
from vllm_models import (
    CONTEXT,
    generate,
    hugging_face_logprob,
    long_prompts,
    model_spec,
    random_weights,
    set_weights,
    start,
)

SAMPLING = Sampling(num_samples=3, max_new_tokens=20)
CHANGED: dict[str, Any] = {}
"""What of the process differed after the engine's start."""


@pytest.fixture(scope="module")
def module() -> Any:
    """Hugging Face's own, with random weights."""
    made: Any = model_spec("qwen2-tied").causal_lm("cpu")
    set_weights(made, random_weights(made, 1))
    return made


@pytest.fixture(scope="module")
def policy(module: Any) -> Generator[VllmPolicy]:
    before = dict(os.environ), torch.set_num_threads, random.random, torch.random.get_rng_state()
    seeds = random.getstate(), np.random.get_state()[1].tolist()  # pyright: ignore
    made = start("qwen2-tied")
    # A second engine in a process gives another value to what vLLM keeps there for itself.
    others = {n: v for n, v in before[0].items() if n != "VLLM_DIST_IDENT"}
    CHANGED["environment"] = {n for n, v in others.items() if os.environ.get(n) != v}
    CHANGED["new switches"] = bool({"TORCHDYNAMO_DISABLE", "RANK"} & os.environ.keys())
    CHANGED["set_num_threads"] = torch.set_num_threads is not before[1]
    CHANGED["torch seed"] = not torch.equal(torch.random.get_rng_state(), before[3])
    CHANGED["seeds"] = (random.getstate(), np.random.get_state()[1].tolist()) != seeds  # pyright: ignore
    made.load_weights(random_weights(module, 1))
    yield made
    made.close()


@pytest.mark.slow
def test_starting_leaves_the_process_as_it_was(policy: VllmPolicy):
    assert {name: changed for name, changed in CHANGED.items() if changed} == {}


def test_a_group_computes_its_prompt_once(policy: VllmPolicy):
    prompt, _ = long_prompts(1, 70)
    requests = [Request(prompt[0].tolist(), seed) for seed in range(4)]
    sampled = policy.vllm.generate(requests, Sampling(max_new_tokens=4), eos_token_id=EOS)
    assert [one.cached_tokens for one in sampled][1:] == [64, 64, 64]  # whole blocks of 32


# --- abort


def while_aborting(run: Callable[[], Rollout], abort: Callable[[], None]) -> Rollout | Exception:
    """What `run` gives or raises in a thread while `abort` is called again and again."""
    found: list[Rollout | Exception] = []

    def target() -> None:
        try:
            found.append(run())
        except GenerationAbortedError as error:
            found.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    deadline = time.monotonic() + 60
    while thread.is_alive() and time.monotonic() < deadline:
        abort()
        time.sleep(0.005)
    thread.join(timeout=1)
    return found[0]


def test_a_whole_call_can_be_aborted_and_the_engine_goes_on(policy: VllmPolicy):
    prompt, prompt_id = long_prompts(16, 30)
    long = Sampling(num_samples=8, max_new_tokens=200)
    error = while_aborting(lambda: generate(policy, prompt, prompt_id, long), policy.abort)
    assert str(error) == "generation was aborted; nothing was kept of the call"
    again = generate(policy, prompt, prompt_id, SAMPLING)
    assert generate(policy, prompt, prompt_id, SAMPLING).tokens.tolist() == again.tokens.tolist()


@pytest.mark.slow
def test_aborted_rows_keep_what_they_have(policy: VllmPolicy):
    prompt, prompt_id = long_prompts(16, 30)
    long = Sampling(num_samples=8, max_new_tokens=200)
    whole = generate(policy, prompt, prompt_id, long)
    longest = int(whole.mask.sum(1).argmax())
    cut = while_aborting(
        lambda: generate(policy, prompt, prompt_id, long), lambda: policy.abort([longest])
    )
    assert isinstance(cut, Rollout)
    kept = cut.tokens[longest][cut.mask[longest]].tolist()
    assert len(kept) < int(whole.mask[longest].sum())
    assert kept == whole.tokens[longest][whole.mask[longest]].tolist()[: len(kept)]
    assert not cut.finished[longest]
    others = torch.arange(len(whole.tokens)) != longest
    assert cut.mask[others].sum(1).tolist() == whole.mask[others].sum(1).tolist()


# --- sleeping


@pytest.mark.slow
def test_a_sleeping_engine_frees_its_cache_and_wakes_as_it_was(policy: VllmPolicy):
    prompt, prompt_id = long_prompts(32, 100)
    sampling = Sampling(num_samples=8, max_new_tokens=100)
    before = generate(policy, prompt, prompt_id, sampling)
    resident = psutil.Process().memory_info().rss
    policy.sleep()
    policy.sleep()
    freed = resident - psutil.Process().memory_info().rss
    assert freed > 4 << 20
    with pytest.raises(RuntimeError) as error:
        generate(policy, prompt, prompt_id, SAMPLING)
    assert str(error.value) == "the vLLM engine sleeps; call wake() before generating"
    policy.wake()
    policy.wake()
    slept = policy.metrics["slept_bytes"].value
    assert 0.5 * slept < freed < 1.5 * slept
    assert policy.metrics["wake_s"].value < 5
    after = generate(policy, prompt, prompt_id, sampling)
    assert torch.equal(after.tokens, before.tokens)
    torch.testing.assert_close(after.behavior_logprob, before.behavior_logprob, atol=1e-5, rtol=0)


# --- the next run


def test_a_warm_engine_serves_the_next_policy_with_its_weights(policy: VllmPolicy, module: Any):
    prompt, prompt_id = make_prompts(8)
    before = generate(policy, prompt, prompt_id, SAMPLING)
    policy.keep_warm()
    again = start("qwen2-tied", context=WorkerContext("actor", seed=8))
    try:
        assert again.vllm is policy.vllm
        first: Any = model_spec("qwen2-tied").causal_lm("cpu")
        roll = generate(again, prompt, prompt_id, SAMPLING)
        expected = hugging_face_logprob(first, roll)
        torch.testing.assert_close(roll.behavior_logprob, expected, atol=1e-5, rtol=0)
        assert roll.tokens.tolist() != before.tokens.tolist()
    finally:
        policy.load_weights(random_weights(module, 1))
    assert torch.equal(generate(policy, prompt, prompt_id, SAMPLING).tokens, before.tokens)


# --- refusals


def test_a_temperature_that_vllm_would_change_is_refused(policy: VllmPolicy):
    prompt, prompt_id = make_prompts(1)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        policy.generate(prompt, prompt_id, Sampling(temperature=0.001))
    assert str(error.value) == (
        "temperature is 0.001; vLLM samples at no less than 0.01, so log-probabilities would be of "
        "another distribution. Set it to 0 for the likeliest token, or higher"
    )


def test_a_second_engine_in_the_process_is_refused(policy: VllmPolicy):
    with pytest.raises(RuntimeError) as error:
        start("llama")
    assert str(error.value) == (
        "this process already runs a vLLM engine, and vLLM can have one per process; place the "
        "roles that use it on groups of their own (executor=ray)"
    )


def test_models_that_vllm_cannot_run_here_are_refused():
    small = ModelSpec(architecture=architecture("llama"))
    with pytest.raises(ValueError) as error:  # noqa: PT011
        VllmPolicySpec(model=small, eos_token_id=EOS).build(CONTEXT)
    assert str(error.value) == (
        "'actor' has attention heads of 12 dimensions; vLLM on CPUs computes heads of 32, 64, 80, "
        "96, 112, 128, 160, 192, 224, 256, 512. Change the model, or generate with the torch engine"
    )
    with pytest.raises(ValueError, match=r"max_model_len is 300; the model is made for 256 pos"):
        start("llama", max_model_len=300)
    with pytest.raises(ValueError, match=r"on 2 pipeline stages; this engine divides a model by"):
        start("llama", context=WorkerContext("actor", pipeline_parallel=2))


@pytest.mark.usefixtures("policy")  # whose start makes vLLM read its environment
def test_a_cache_on_a_cpu_is_as_large_as_the_step_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = model_spec("llama").config
    row_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * 32 * 4 * 64

    def options(free_bytes: int, **given: Any) -> EngineOptions:
        free = SimpleNamespace(available=free_bytes)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
        spec = VllmPolicySpec(model=model_spec("llama"), eos_token_id=EOS, **given)
        return engine_options(spec, config, 64, CONTEXT)

    plenty = options(1 << 40)
    assert (plenty.max_rows, plenty.kv_cache_bytes) == (256, 257 * row_bytes)
    little = options(2 * 33 * row_bytes)
    assert (little.max_rows, little.kv_cache_bytes) == (32, 33 * row_bytes)
    assert options(0).max_rows == 1
    assert options(0, max_decode_rows=9, kv_cache_bytes=1 << 20).kv_cache_bytes == 1 << 20
    arguments = engine_arguments(tmp_path, plenty)
    assert (arguments.max_num_seqs, arguments.max_num_batched_tokens) == (256, 2048)


def test_lengths_of_a_run_are_those_of_the_engine():
    config = model_spec("llama").config  # made for 256 positions

    def longest(**given: Any) -> int:
        return longest_sequence(
            VllmPolicySpec(model=model_spec("llama"), eos_token_id=EOS, **given), config
        )

    assert longest() == 256
    assert longest(longest_sequence=65) == 128
    assert longest(longest_sequence=250) == 256
    assert longest(longest_sequence=65, max_model_len=100) == 100


@pytest.mark.usefixtures("policy")  # whose start makes vLLM read its environment
def test_what_is_not_set_is_left_to_vllm_on_gpus(tmp_path: Path):
    spec = VllmPolicySpec(model=model_spec("llama"), eos_token_id=EOS)
    made = engine_options(spec, spec.model.config, 256, WorkerContext("actor", device="cuda"))
    assert made.device == "cuda:0"
    arguments = engine_arguments(tmp_path, made)
    left = (arguments.max_num_seqs, arguments.max_num_batched_tokens)
    assert (*left, arguments.kv_cache_memory_bytes) == (None, None, None)
    assert arguments.enable_sleep_mode


def test_a_folder_is_looked_at_before_vllm_loads_it(tmp_path: Path):
    made = make_policy("qwen2")
    made.local_tensors()["model.norm.weight"][0] = torch.nan
    made.save_pretrained(tmp_path)
    spec = VllmPolicySpec(model=ModelSpec(folder=str(tmp_path)), eos_token_id=EOS)
    with pytest.raises(ConfigError, match=r"are not finite, or beyond 1e12: model.norm.weight\n"):
        spec.build(CONTEXT)
    tensors = read_tensors(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    write_tensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ConfigError, match=r"config.json describes:\n    missing: model.norm.weigh"):
        spec.build(CONTEXT)


def test_specs_that_contradict_themselves_are_refused():
    model = model_spec("llama")
    with pytest.raises(ValueError, match=r"memory_fraction is 0; expected more than 0"):
        VllmPolicySpec(model=model, eos_token_id=EOS, memory_fraction=0)
