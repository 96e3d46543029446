"""Log-probabilities of several words in each token's place: chosen, asked for, learned from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from penstock.algorithms.losses import DistillationLoss
from penstock.algorithms.roles import DistillationBatch
from penstock.dataflow.runtime.call_context import call_scope
from penstock.workers.training import token_logprob as chunked
from penstock.workers.training.optimizer import OptimizerSpec
from penstock.workers.training.token_logprob import token_logprob, top_words
from torch import Tensor
from torch_models import VOCAB, make_policy, module_of

NAMES = ("llama3", "qwen3", "gpt2", "gemma2")
"""One of each way through the engine: packed, with and without a tied head; Hugging Face's forward,
up to the states and up to logits that are capped."""


def rows() -> tuple[Tensor, Tensor]:
    """Tokens and mask; two rows share a prompt, and one has no token."""
    tokens = torch.randint(0, VOCAB, (5, 9), generator=torch.Generator().manual_seed(4))
    tokens[1, :3] = tokens[0, :3]
    length = torch.tensor([9, 7, 5, 3, 8])
    place = torch.arange(9)
    tokens[place >= length[:, None]] = -1
    return tokens, (place >= 3) & (place < length[:, None])


def every_logprob(module: Any, tokens: Tensor, temperature: float) -> Tensor:
    """f32[rows, T, V]: Hugging Face's, in the place of each token."""
    mask = (tokens >= 0).long()
    logits = module(input_ids=tokens.clamp(min=0), attention_mask=mask).logits.float()
    return torch.log_softmax(logits / temperature, -1).roll(1, dims=1)


@pytest.mark.parametrize("name", NAMES)
def test_the_likeliest_words_are_hugging_faces(name: str):
    policy = make_policy(name)
    tokens, mask = rows()
    top = policy.top_words(tokens, mask, num_words=6, temperature=0.8)
    with torch.no_grad():
        best = every_logprob(module_of(policy), tokens, 0.8).topk(6)
    torch.testing.assert_close(top.logprob[mask], best.values[mask], atol=1e-5, rtol=0)
    assert torch.equal(top.words[mask], best.indices[mask])
    assert (top.words[~mask] == -1).all()
    assert not top.logprob[~mask].any()
    whole = policy.top_words(tokens, mask, num_words=10**6)
    assert whole.words.shape == (*tokens.shape, VOCAB)
    torch.testing.assert_close(whole.logprob[mask].exp().sum(-1), torch.ones(int(mask.sum())))


def batch_of(tokens: Tensor, mask: Tensor, words: Tensor) -> DistillationBatch:
    told = -torch.rand(words.shape, generator=torch.Generator().manual_seed(5)) - 3
    return DistillationBatch(tokens=tokens, mask=mask, words=words, teacher_logprob=told)


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_of_a_divergence_is_autograds_over_all_logits(name: str):
    policy = make_policy(name)
    tokens, mask = rows()
    words = policy.top_words(tokens, mask, num_words=6).words
    batch, loss = batch_of(tokens, mask, words), DistillationLoss(beta=0.5)
    totals = loss.totals(batch)
    network: Any = policy.network
    network.flat.enable_gradients()
    output = policy._output(tokens, mask, 0.8, words)  # pyright: ignore[reportPrivateUsage]
    loss(output, batch, totals).total.backward()
    got = {name: part.clone() for name, part in network.tensors(network.flat.grad).items()}

    network.flat.enable_gradients()
    every = every_logprob(module_of(policy), tokens, 0.8)
    plain = type(output)(output.logprob.detach(), None, every.gather(2, words.clamp(min=0)))
    assert output.word_logprob is not None
    torch.testing.assert_close(output.word_logprob[mask], plain.word_logprob[mask])  # pyright: ignore
    loss(plain, batch, totals).total.backward()
    for name_, expected in network.tensors(network.flat.grad).items():
        scale = max(float(expected.abs().max()), 1e-3)
        torch.testing.assert_close(got[name_], expected, atol=1e-5 * scale, rtol=0)


def test_micro_batches_change_neither_words_nor_what_is_learned():
    tokens, mask = rows()
    results: list[tuple[Tensor, ...]] = []
    for size in (9, 4096):
        policy = make_policy("llama", optimizer=OptimizerSpec(), micro_batch_tokens=size)
        top = policy.top_words(tokens, mask, num_words=6)
        with call_scope(0, 0, 0):
            found = policy.train(DistillationLoss(), batch_of(tokens, mask, top.words))
        kl, norm = (found.metrics[key].value for key in ("reverse_kl", "grad_norm"))
        results.append((top.words, top.logprob, torch.tensor(kl), torch.tensor(norm)))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1:], results[1][1:], atol=1e-5, rtol=1e-5)


def test_small_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch):
    random = torch.Generator().manual_seed(6)
    states, weight = torch.randn(7, 5, generator=random), torch.randn(13, 5, generator=random)
    entry = torch.tensor([4, 0, 0, 6])
    target = torch.randint(0, 13, (4, 3), generator=random)
    results: list[tuple[Tensor, ...]] = []
    for most in (1 << 20, 26):
        monkeypatch.setattr(chunked, "MOST_LOGITS", 2 * most)
        monkeypatch.setattr(chunked, "MOST_IN_FLOAT32", most)
        leaves = [states.clone().requires_grad_(), weight.clone().requires_grad_()]
        logprob, entropy = token_logprob(
            leaves[0], leaves[1], None, target, entry, 0.9, needs_entropy=True
        )
        assert entropy is not None
        weights = torch.arange(12.0).view(4, 3)
        grads = torch.autograd.grad((logprob * weights).sum() + entropy.sum(), leaves)
        results.append((logprob, entropy, *grads, *top_words(states, weight, None, 4, 0.9)))
    torch.testing.assert_close(results[0], results[1])
    every = torch.log_softmax(states @ weight.t() / 0.9, -1)
    torch.testing.assert_close(results[0][0], every[entry].gather(1, target))


def test_words_of_a_larger_vocabulary_are_named():
    policy = make_policy("llama", optimizer=OptimizerSpec())
    tokens, mask = rows()
    words = torch.where(mask[..., None], VOCAB + 3, -1)
    with call_scope(0, 0, 0), pytest.raises(ValueError, match="the batch asks for word") as raised:
        policy.train(DistillationLoss(), batch_of(tokens, mask, words))
    assert str(raised.value) == (
        f"the batch asks for word {VOCAB + 3}, and the model knows {VOCAB}; student and teacher "
        "need one vocabulary"
    )
