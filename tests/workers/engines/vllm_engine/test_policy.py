"""A real vLLM engine, started once: what is its own.

What it has in common with other engines is in `rollout/test_generation_engines.py`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Generator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from penstock.algorithms.roles import Sampling
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.call_context import CallKey, call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.vllm_engine.engine import (
    EngineOptions,
    engine_arguments,
)
from penstock.workers.engines.vllm_engine.generator import (
    VllmPolicy,
    VllmPolicySpec,
    engine_options,
    longest_sequence,
)
from penstock.workers.models.spec import ModelSpec
from penstock.workers.rollout.generation_engine import (
    BegunRows,
    EndedRows,
    Responses,
    collected,
    to_rollout,
)
from penstock.workers.rollout.sampling import SampleStreams
from penstock.workers.training.flat_parameters import read_tensors, write_tensors
from penstock.workers.training.host_memory import give_back_freed
from torch import Tensor
from torch_models import EOS, TOKENIZER, architecture, make_policy, make_prompts
from vllm_models import (
    CONTEXT,
    by_sample,
    generate,
    hugging_face_logprob,
    long_prompts,
    model_spec,
    random_weights,
    sample_seeds,
    set_weights,
    start,
)

pytestmark = pytest.mark.slow

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
    made = start("qwen2-tied", tokenizer=TOKENIZER)
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


def test_starting_leaves_the_process_as_it_was(policy: VllmPolicy):
    assert {name: changed for name, changed in CHANGED.items() if changed} == {}


def test_a_group_computes_its_prompt_once(policy: VllmPolicy):
    prompt, _ = long_prompts(1, 70)
    sampled = sample_seeds(policy, prompt[0].tolist(), range(4), Sampling(max_new_tokens=4))
    assert [one.cached_tokens for one in sampled][1:] == [64, 64, 64]  # whole blocks of 32


# --- streaming


def streams_of(prompt_id: Tensor, sampling: Sampling) -> SampleStreams:
    return SampleStreams(CONTEXT.seed, CONTEXT.role, CallKey(0, 0), prompt_id, sampling.num_samples)


def test_responses_leave_as_they_end(policy: VllmPolicy):
    prompt, prompt_id = make_prompts(8)
    sampling = Sampling(num_samples=3, max_new_tokens=80)
    whole = generate(policy, prompt, prompt_id, sampling)
    steps: list[EndedRows] = []
    for ended in policy.engine.stream(prompt, streams_of(prompt_id, sampling), sampling):
        assert all(bool((ended.responses.length >= one.at_least).all()) for one in steps)
        steps.append(ended)
    rows = torch.cat([step.rows for step in steps])
    lengths = whole.mask.sum(1)
    assert rows.tolist() == sorted(range(24), key=lambda row: (int(lengths[row]), row))
    assert len({step.at_least for step in steps}) > 10
    responses = collected(steps, 24, sampling.max_new_tokens)
    assert responses.token[responses.token >= 0].tolist() == whole.tokens[whole.mask].tolist()
    assert responses.finished.tolist() == whole.finished.tolist()
    # Calls for some of the prompts each are answered in the order of their longest responses.
    calls = [
        {"prompt": prompt[part], "prompt_id": prompt_id[part], "sampling": sampling}
        for part in torch.arange(8).split([1, 2, 1, 3, 1])
    ]
    with call_scope(0, 0):
        answers = [answer for answer in policy.stream("generate", calls) if answer is not None]
    assert [(a.size, a.call) for a in answers] == sorted((a.size, a.call) for a in answers)
    assert [a.call for a in answers] != list(range(5))
    expected = by_sample(whole, 3)
    found = {key: row for a in answers for key, row in by_sample(a.returned, 3).items()}
    assert {key: tokens for key, (tokens, _) in found.items()} == {
        key: tokens for key, (tokens, _) in expected.items()
    }
    # One that is not read to its end keeps the engine from anything else until it is closed.
    left = policy.engine.stream(prompt, streams_of(prompt_id, sampling), sampling)
    next(left)
    for change, what in (
        (lambda: generate(policy, prompt, prompt_id, sampling), "generate"),
        (policy.sleep, "sleep"),
    ):
        with pytest.raises(RuntimeError) as error:
            change()
        assert str(error.value) == (
            f"the vLLM engine cannot {what}: it is sampling for a stream that was not read to its "
            "end; close that one first"
        )
    left.close()  # pyright: ignore[reportAttributeAccessIssue] - it is a generator
    assert generate(policy, prompt, prompt_id, sampling).tokens.tolist() == whole.tokens.tolist()


FRESH_WORDS = Sampling(temperature=0, max_new_tokens=30, repetition_penalty=1e4)
GOING_ON = {
    "sampled": Sampling(num_samples=3, max_new_tokens=20),
    "stopped": replace(FRESH_WORDS, stop=("Jb", "UMZ", "aTx", "ca")),
    "constrained": replace(
        FRESH_WORDS, max_total_tokens=34, min_new_tokens=8, stop_token_ids=(23, 36)
    ),
}


@pytest.mark.parametrize("name", GOING_ON)
def test_responses_go_on_where_earlier_calls_have_left_them(
    policy: VllmPolicy, module: Any, name: str
):
    prompt, prompt_id = make_prompts(12)
    sampling = GOING_ON[name]
    rows, most = 12 * sampling.num_samples, sampling.max_new_tokens
    limits = torch.tensor([sampling.longest_response(n) for n in (prompt >= 0).sum(1).tolist()])
    limits = limits.repeat_interleave(sampling.num_samples)
    streams = streams_of(prompt_id, sampling)
    whole = collected(policy.engine.stream(prompt, streams, sampling), rows, most)

    def segments() -> list[Responses]:
        """What there is after each segment of 5 tokens."""
        found = [Responses.none_yet(rows, most)]
        while not bool((is_over := found[-1].finished | (found[-1].length >= limits)).all()):
            begun = BegunRows(found[-1].token, found[-1].logprob, is_over, most_new=5)
            steps = list(policy.engine.stream(prompt, streams, sampling, begun))
            if bool(is_over.any()):
                assert steps[0].rows.tolist() == torch.nonzero(is_over)[:, 0].tolist()
            found.append(collected(steps, rows, most))
        return found[1:]

    after = segments()
    last = after[-1]
    assert len(after) == -(-int(last.length.max()) // 5) > 2
    for number, now in enumerate(after, start=1):
        assert now.length.tolist() == last.length.clamp(max=5 * number).tolist()
        assert torch.equal(now.token[:, : 5 * number], last.token[:, : 5 * number])
    assert torch.equal(after[0].token[:, :5], whole.token[:, :5])
    assert torch.equal(segments()[-1].token, last.token)
    assert 0 < int(last.finished.sum()) < rows
    if not sampling.temperature:
        assert torch.equal(last.token, whole.token)
        assert torch.equal(last.finished, whole.finished)
        return
    assert not torch.equal(last.token, whole.token)  # other random numbers, the same distribution
    roll = to_rollout(prompt, prompt_id.repeat_interleave(sampling.num_samples), last)
    expected = hugging_face_logprob(module, roll)
    torch.testing.assert_close(roll.behavior_logprob, expected, atol=1e-5, rtol=0)


# --- sleeping


def test_a_sleeping_engine_frees_its_cache_and_wakes_as_it_was(policy: VllmPolicy):
    prompt, prompt_id = long_prompts(32, 100)
    sampling = Sampling(num_samples=8, max_new_tokens=100)
    before = generate(policy, prompt, prompt_id, sampling)
    resident = psutil.Process().memory_info().rss
    policy.sleep()
    policy.sleep()
    give_back_freed(
        torch.device("cpu")
    )  # what other tests freed decides whether the C library does it by itself
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
        VllmPolicySpec(model=small, end_ids=(EOS,)).build(CONTEXT)
    assert str(error.value) == (
        "'actor' has attention heads of 12 dimensions; vLLM on CPUs computes heads of 32, 64, 80, "
        "96, 112, 128, 160, 192, 224, 256, 512. Change the model, or generate with the torch engine"
    )
    with pytest.raises(ValueError, match=r"max_model_len is 300; the model is made for 256 pos"):
        start("llama", max_model_len=300)
    with pytest.raises(ConfigError, match=r"2 pipeline stages, and this engine divides a model by"):
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
        spec = VllmPolicySpec(model=model_spec("llama"), end_ids=(EOS,), **given)
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
            VllmPolicySpec(model=model_spec("llama"), end_ids=(EOS,), **given), config
        )

    assert longest() == 256
    assert longest(longest_sequence=65) == 128
    assert longest(longest_sequence=250) == 256
    assert longest(longest_sequence=65, max_model_len=100) == 100


ON_PURPOSE = {
    "dtype": "what the trainer computes with, whatever the folder's config says",
    "max_model_len": "the run's longest sequence: memory that longer ones would need is rows",
    "skip_tokenizer_init": "prompts and responses are token ids",
    "generation_config": "nothing but what a request says decides how it is sampled",
    "logprobs_mode": "log-probabilities of the distribution that is sampled from",
    "enable_prefix_caching": "prompts are sampled from several times",
    "enable_sleep_mode": "devices are shared",
    "weight_transfer_config": "weights come from the trainer",
    "use_tqdm_on_load": "it would write over what a run prints",
    "disable_log_stats": "the run has its own",
}
"""What is not vLLM's default on a GPU, and why."""


def _others(arguments: Any) -> set[str]:
    """The fields that are not as vLLM would have them."""
    from vllm.engine.arg_utils import EngineArgs

    defaults = EngineArgs(model=arguments.model)
    return {f.name for f in fields(EngineArgs) if _at(arguments, f.name) != _at(defaults, f.name)}


def _at(arguments: Any, name: str) -> Any:
    value = getattr(arguments, name)
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


@pytest.mark.usefixtures("policy")  # whose start makes vLLM read its environment
def test_what_is_not_set_is_left_to_vllm_on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rows at once, prefill tokens and its share of memory among it: its defaults know the GPU."""
    # The engine of the other tests has; in a rank of one process nobody has before vLLM does.
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    context = WorkerContext("actor", device="cuda")

    def arguments(**options: Any) -> Any:
        spec = VllmPolicySpec(model=model_spec("llama"), end_ids=(EOS,), **options)
        made = engine_options(spec, spec.model.config, 256, context)
        assert made.device == "cuda:0"
        return engine_arguments(tmp_path, made)

    plain = arguments()
    assert _others(plain) == set(ON_PURPOSE)
    for option, field, value in (
        ("max_decode_rows", "max_num_seqs", 48),
        ("kv_cache_bytes", "kv_cache_memory_bytes", 1 << 30),
        ("memory_fraction", "gpu_memory_utilization", 0.5),
        ("quantization", "quantization", "fp8_per_block"),
        ("enforce_eager", "enforce_eager", True),
    ):
        asked = arguments(**{option: value})
        assert getattr(asked, field) == value
        # vLLM makes a configuration of its own of the name.
        assert _others(asked) - {"quantization_config"} == {*ON_PURPOSE, field}


def test_a_folder_is_looked_at_before_vllm_loads_it(tmp_path: Path):
    made = make_policy("qwen2")
    made.local_tensors()["model.norm.weight"][0] = torch.nan
    made.save_pretrained(tmp_path)
    spec = VllmPolicySpec(model=ModelSpec(folder=str(tmp_path)), end_ids=(EOS,))
    with pytest.raises(ConfigError, match=r"are not finite, or beyond 1e12: model.norm.weight\n"):
        spec.build(CONTEXT)
    tensors = read_tensors(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    write_tensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ConfigError, match=r"config.json describes:\n    missing: model.norm.weigh"):
        spec.build(CONTEXT)


def test_specs_that_contradict_themselves_are_refused():
    model = model_spec("llama")
    with pytest.raises(ValueError, match=r"memory_fraction is 0; expected above 0 and at most 1"):
        VllmPolicySpec(model=model, end_ids=(EOS,), memory_fraction=0)
