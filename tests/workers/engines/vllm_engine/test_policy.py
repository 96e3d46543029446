"""Generation with a real vLLM engine, started once."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.algorithms.roles import Rollout, Sampling
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.vllm_engine.engine import GenerationAbortedError, Request
from penstock.workers.engines.vllm_engine.policy import VllmPolicy, VllmPolicySpec
from penstock.workers.models.spec import ModelSpec
from torch_models import EOS, VOCAB, architecture, make_prompts, to_batch
from vllm_models import (
    CONTEXT,
    by_sample,
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
    CHANGED["environment"] = any(os.environ.get(n) != v for n, v in before[0].items())
    CHANGED["new switches"] = bool({"TORCHDYNAMO_DISABLE", "RANK"} & os.environ.keys())
    CHANGED["set_num_threads"] = torch.set_num_threads is not before[1]
    CHANGED["torch seed"] = not torch.equal(torch.random.get_rng_state(), before[3])
    CHANGED["seeds"] = (random.getstate(), np.random.get_state()[1].tolist()) != seeds  # pyright: ignore
    made.load_weights(random_weights(module, 1))
    yield made
    made.close()


def test_starting_leaves_the_process_as_it_was(policy: VllmPolicy):
    assert dict.fromkeys(CHANGED, False) == CHANGED


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_logprobs_are_hugging_faces_at_the_sampling_temperature(
    policy: VllmPolicy, module: Any, temperature: float
):
    prompt, prompt_id = make_prompts(8)
    sampling = Sampling(num_samples=3, max_new_tokens=20, temperature=temperature)
    roll = generate(policy, prompt, prompt_id, sampling)
    expected = hugging_face_logprob(module, roll, temperature)
    torch.testing.assert_close(roll.behavior_logprob, expected, atol=1e-5, rtol=0)
    assert bool((roll.behavior_logprob[roll.mask] < 0).all())


def test_the_rollout_is_laid_out_as_the_table_says(policy: VllmPolicy):
    prompt, prompt_id = make_prompts(8)
    roll = generate(policy, prompt, prompt_id, SAMPLING)
    assert roll.prompt_id.tolist() == prompt_id.repeat_interleave(3).tolist()
    for row in range(len(roll.tokens)):
        begin = int((prompt[row // 3] >= 0).sum())
        response = roll.tokens[row][roll.mask[row]].tolist()
        end = begin + len(response)
        assert roll.tokens[row, :begin].tolist() == prompt[row // 3, :begin].tolist()
        assert torch.nonzero(roll.mask[row])[:, 0].tolist() == list(range(begin, end))
        assert bool((roll.tokens[row, end:] == -1).all())
        assert bool((roll.behavior_logprob[row][~roll.mask[row]] == 0).all())
        assert EOS not in response[:-1]
        assert bool(roll.finished[row]) == (response[-1] == EOS)
        assert roll.finished[row] or len(response) == SAMPLING.max_new_tokens
    assert 0 < int(roll.finished.sum()) < len(roll.finished)


def test_a_sample_does_not_depend_on_its_batch(policy: VllmPolicy):
    prompt, prompt_id = make_prompts(24)
    whole = by_sample(generate(policy, prompt, prompt_id, SAMPLING), 3)
    for rows in (torch.arange(23, -1, -1), torch.tensor([17]), torch.tensor([3, 20, 4])):
        part = by_sample(generate(policy, prompt[rows], prompt_id[rows], SAMPLING), 3)
        assert {key: tokens for key, (tokens, _) in part.items()} == {
            key: whole[key][0] for key in part
        }
        for key, (_, logprob) in part.items():
            assert logprob == pytest.approx(whole[key][1], abs=1e-5)


def test_more_samples_extend_fewer_and_a_longer_limit_a_shorter(policy: VllmPolicy):
    prompt, prompt_id = make_prompts(5)
    few = by_sample(generate(policy, prompt, prompt_id, SAMPLING), 3)
    more = Sampling(num_samples=6, max_new_tokens=40)
    many = by_sample(generate(policy, prompt, prompt_id, more), 6)
    for key, (tokens, _) in few.items():
        assert many[key][0][: len(tokens)] == tokens


def test_samples_of_a_prompt_differ_and_steps_draw_anew(policy: VllmPolicy):
    prompt, prompt_id = make_prompts(4)
    first = generate(policy, prompt, prompt_id, SAMPLING).tokens.tolist()
    assert generate(policy, prompt, prompt_id, SAMPLING, step=1).tokens.tolist() != first
    assert generate(policy, prompt, prompt_id, SAMPLING).tokens.tolist() == first
    assert first[0] != first[1]


def test_draws_follow_the_models_probabilities(policy: VllmPolicy, module: Any):
    """Chi-squared of the first token of 4,000 samples against Hugging Face's distribution."""
    prompt, prompt_id = torch.tensor([[5, 9, 11]]), torch.tensor([3])
    roll = generate(policy, prompt, prompt_id, Sampling(num_samples=4000, max_new_tokens=1))
    with torch.no_grad():
        expected = module(input_ids=prompt).logits[0, -1].softmax(-1) * 4000
    counts = torch.bincount(roll.tokens[:, 3], minlength=VOCAB)
    common = expected >= 5
    statistic = float(((counts - expected)[common] ** 2 / expected[common]).sum())
    freedom = int(common.sum())
    assert freedom > 20
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_greedy_takes_the_most_likely_token_of_hugging_face(policy: VllmPolicy, module: Any):
    prompt, prompt_id = make_prompts(3)
    roll = generate(policy, prompt, prompt_id, Sampling(max_new_tokens=10, temperature=0))
    for row in range(3):
        begin = int((prompt[row] >= 0).sum())
        tokens = roll.tokens[row][roll.tokens[row] >= 0]
        logits = module(input_ids=tokens[None]).logits[0]
        assert tokens[begin:].tolist() == logits[begin - 1 : -1].argmax(-1).tolist()
    assert not roll.behavior_logprob.any()


def test_a_group_computes_its_prompt_once(policy: VllmPolicy):
    prompt, _ = long_prompts(1, 70)
    requests = [Request(prompt[0].tolist(), seed) for seed in range(4)]
    drawn = policy.engine.generate(requests, temperature=1, max_new_tokens=4, eos_token_id=EOS)
    assert [one.cached_tokens for one in drawn][1:] == [64, 64, 64]  # whole blocks of 32


def test_lengths_are_reported(policy: VllmPolicy):
    policy.metrics.clear()
    prompt, prompt_id = make_prompts(6)
    roll = generate(policy, prompt, prompt_id, SAMPLING)
    lengths = roll.mask.sum(1)
    assert {name: metric.value for name, metric in policy.metrics.items()} == {
        "response_length": pytest.approx(float(lengths.float().mean())),
        "response_length_min": float(lengths.min()),
        "response_length_max": float(lengths.max()),
        "truncated": pytest.approx(1 - float(roll.finished.float().mean())),
        "new_tokens": float(lengths.sum()),
    }


def test_no_prompts_make_no_rows(policy: VllmPolicy):
    empty = torch.zeros(0, 5, dtype=torch.int64)
    roll = policy.generate(empty, torch.zeros(0, dtype=torch.int64), SAMPLING)
    assert roll.tokens.shape == (0, 0)
    assert roll.finished.shape == (0,)


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
        assert again.engine is policy.engine
        first: Any = model_spec("qwen2-tied").causal_lm("cpu")
        roll = generate(again, prompt, prompt_id, SAMPLING)
        expected = hugging_face_logprob(first, roll)
        torch.testing.assert_close(roll.behavior_logprob, expected, atol=1e-5, rtol=0)
        assert roll.tokens.tolist() != before.tokens.tolist()
    finally:
        policy.load_weights(random_weights(module, 1))
    assert torch.equal(generate(policy, prompt, prompt_id, SAMPLING).tokens, before.tokens)


# --- refusals


def test_prompts_that_cannot_be_answered_are_refused(policy: VllmPolicy):
    prompt, prompt_id = make_prompts(3)
    prompt[1] = -1
    with pytest.raises(ValueError, match=r"prompt row 1 is empty"):
        policy.generate(prompt, prompt_id, SAMPLING)
    prompt, prompt_id = make_prompts(3)
    with pytest.raises(ValueError, match=r"exceeds the model's 256 positions"):
        policy.generate(prompt, prompt_id, Sampling(max_new_tokens=250))
    prompt[2, 0] = VOCAB
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text follows
        policy.generate(prompt, prompt_id, SAMPLING)
    assert str(error.value) == (
        "prompt row 2 has token 61, but the model's vocabulary has 61; prompts and model need the "
        "same tokenizer"
    )


def test_a_temperature_that_vllm_would_change_is_refused(policy: VllmPolicy):
    prompt, prompt_id = make_prompts(1)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        policy.generate(prompt, prompt_id, Sampling(temperature=0.001))
    assert str(error.value) == (
        "temperature is 0.001; vLLM samples at no less than 0.01, so log-probabilities would be of "
        "another distribution. Set it to 0 for the likeliest token, or higher"
    )


def test_what_is_a_training_engines_work_is_refused(policy: VllmPolicy, tmp_path: Path):
    prompt, prompt_id = make_prompts(1)
    roll = generate(policy, prompt, prompt_id, SAMPLING)
    begin = "'actor' runs in vLLM here, which generates and cannot "
    end = "' on a group with a training engine (torch, megatron)"
    for call, what, node in (
        (lambda: policy.logprob(roll.tokens, roll.mask), "evaluate log-probabilities", "logprob"),
        (lambda: policy.train(ClippedPolicyLoss(), to_batch(roll)), "train", "train"),
        (policy.export_weights, "give its weights back", "train"),
        (lambda: policy.save_state(tmp_path), "save a state", "train"),
    ):
        with pytest.raises(RuntimeError) as error:
            call()
        assert str(error.value) == f"{begin}{what}; place 'actor.{node}{end}"


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


def test_specs_that_contradict_themselves_are_refused():
    model = model_spec("llama")
    with pytest.raises(ValueError) as error:  # noqa: PT011
        VllmPolicySpec(model=model, eos_token_id=EOS, stop=("x",))
    assert str(error.value) == (
        "stop strings are looked for in text, and the spec has no tokenizer; give tokenizer=, or "
        "drop stop="
    )
    with pytest.raises(ValueError, match=r"memory_fraction is 0; expected more than 0"):
        VllmPolicySpec(model=model, eos_token_id=EOS, memory_fraction=0)
