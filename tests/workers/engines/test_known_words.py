"""Tokens that a model has and its tokenizer lacks are never sampled, and have no probability."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from penstock.algorithms.losses.tokens import ClippedPolicyLoss
from penstock.algorithms.roles import PolicyBatch, Sampling
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.divided_network import DividedNetwork
from penstock.workers.engines.torch_engine.generator import TorchGenerator
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.rollout.response_sampler import TurnSampler
from penstock.workers.training.network import Outputs
from penstock.workers.training.optimizer import OptimizerSpec
from torch_models import make_policy, make_prompts, module_of, to_batch

KNOWN = 40
"""Words that the tokenizer has, of the 61 of these models."""


def known_prompts() -> tuple[torch.Tensor, torch.Tensor]:
    prompt, prompt_id = make_prompts(6)
    return torch.where(prompt >= KNOWN, prompt - 30, prompt), prompt_id


@pytest.mark.parametrize("name", ["qwen2-tied", "llama-biased", "gpt2", "gemma2"])
def test_what_is_sampled_and_its_probabilities_are_of_the_tokenizers_words(name: str) -> None:
    learns = OptimizerSpec(lr=1e-2)
    policy = make_policy(name, num_words=KNOWN, optimizer=learns)
    sampling = Sampling(num_samples=8, max_new_tokens=12)
    with call_scope(0, 0):
        roll = policy.generate(*known_prompts(), sampling)
    assert int(roll.tokens.max()) < KNOWN
    batch: PolicyBatch = to_batch(roll)
    mask = batch.mask
    found = policy.logprob(batch.tokens, mask)
    torch.testing.assert_close(found[mask], batch.behavior_logprob[mask], atol=1e-5, rtol=0)
    with torch.no_grad():
        inputs = batch.tokens.clamp(min=0)
        logits = module_of(policy)(input_ids=inputs, attention_mask=(batch.tokens >= 0).long())
    every = logits.logits[:, :-1, :KNOWN].float().log_softmax(-1)
    right = every.gather(2, inputs[:, 1:, None])[:, :, 0]
    torch.testing.assert_close(found[mask], right[mask[:, 1:]], atol=1e-5, rtol=0)
    top = policy.top_words(batch.tokens, mask, num_words=99)
    assert top.words.shape[2] == KNOWN
    assert int(top.words.max()) < KNOWN
    sums = top.logprob[mask].exp().sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums))
    head = module_of(policy).get_output_embeddings()
    beyond = head.weight[KNOWN:].clone()
    metrics = policy.train(ClippedPolicyLoss(entropy_coef=0.1, report_entropy=True), batch)
    entropy = -(every.exp() * every).sum(-1)[mask[:, 1:]].mean()
    assert metrics.metrics["entropy"].value == pytest.approx(float(entropy), rel=1e-4)
    torch.testing.assert_close(head.weight[KNOWN:], beyond, atol=0, rtol=0)


def test_turns_of_conversations_only_have_words_of_the_tokenizer() -> None:
    policy: Any = make_policy("qwen2-tied", num_words=KNOWN)
    generator = policy._generator
    assert isinstance(generator, TorchGenerator)
    sampling = Sampling(max_new_tokens=4, max_total_tokens=30)
    turns: Any = generator.turns(sampling, 2)
    sampler: Any = turns._sampler
    assert isinstance(sampler, TurnSampler)
    logits = torch.zeros(2, 61)
    logits[:, KNOWN:] = 50.0
    sampler.open[:] = True
    sampler._limit[:] = 1  # pyright: ignore[reportPrivateUsage]
    token, _ = sampler.sample(logits, torch.arange(2), torch.ones(2, dtype=torch.bool))
    assert int(token.max()) < KNOWN


def test_a_divided_vocabulary_has_no_words_beyond_the_tokenizers() -> None:
    network = DividedNetwork()
    network.vocabulary_group, network.num_words = None, 5
    logits = torch.randn(7, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    target = torch.arange(7) % 5
    logprob, entropy = network.token_logprob(Outputs(logits), target, 0.7, needs_entropy=True)
    assert entropy is not None
    own = logits.detach()[:, :5].clone().requires_grad_()
    every = (own / 0.7).log_softmax(-1)
    right, spread = every.gather(1, target[:, None])[:, 0], -(every.exp() * every).sum(-1)
    torch.testing.assert_close(logprob, right)
    torch.testing.assert_close(entropy, spread)
    (logprob.sum() + entropy.sum()).backward()
    (right.sum() + spread.sum()).backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad[:, :5], own.grad)
    assert not logits.grad[:, 5:].any()
    best, words = network.top_words(Outputs(logits.detach()), 5, 0.7)
    assert sorted(words[0].tolist()) == [0, 1, 2, 3, 4]
    torch.testing.assert_close(best.exp().sum(-1), torch.ones(7))


def test_a_tokenizer_as_large_as_the_model_changes_no_bit() -> None:
    own, given = make_policy("qwen2-tied"), make_policy("qwen2-tied", num_words=61)
    sampling = Sampling(num_samples=4, max_new_tokens=8)
    with call_scope(0, 0):
        rolls = [policy.generate(*make_prompts(6), sampling) for policy in (own, given)]
    assert torch.equal(rolls[0].tokens, rolls[1].tokens)
    assert torch.equal(rolls[0].behavior_logprob, rolls[1].behavior_logprob)


@pytest.mark.slow
def test_vllm_samples_no_other_words() -> None:
    pytest.importorskip("vllm")
    from vllm_models import start

    policy = start("qwen2-tied", max_model_len=64, num_words=KNOWN)
    try:
        with call_scope(0, 0):
            roll = policy.generate(*known_prompts(), Sampling(num_samples=8, max_new_tokens=12))
        assert int(roll.tokens.max()) < KNOWN
        trained = TorchPolicySpec(
            model=ModelSpec(architecture=dict(policy_architecture())), end_ids=(2,), num_words=KNOWN
        ).build(WorkerContext("actor"))
        found = trained.logprob(roll.tokens, roll.mask)
        torch.testing.assert_close(
            found[roll.mask], roll.behavior_logprob[roll.mask], atol=1e-4, rtol=0
        )
    finally:
        policy.close()


def policy_architecture() -> Any:
    from vllm_models import model_spec

    return model_spec("qwen2-tied").architecture
