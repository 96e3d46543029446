"""Log-probabilities and entropies by their own gradient; several processes: see the engine."""

from __future__ import annotations

import torch
from penstock.workers.engines.sharded.vocabulary_parallel import vocabulary_logprob, vocabulary_top
from torch import Tensor


def plain(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    every = torch.log_softmax(logits, -1)
    return every.gather(1, target[:, None])[:, 0], -(every.exp() * every).sum(-1)


def test_values_and_gradients_equal_autograds():
    torch.manual_seed(0)
    logits = (torch.randn(6, 9, dtype=torch.float64) * 4).requires_grad_()
    target = torch.tensor([0, 8, 3, 3, 1, 5])
    weights = torch.randn(2, 6, dtype=torch.float64)
    results: list[tuple[Tensor, ...]] = []
    for compute in (
        lambda: vocabulary_logprob(logits, target, None),
        lambda: plain(logits, target),
    ):
        logprob, entropy = compute()
        (grad,) = torch.autograd.grad((weights[0] * logprob + weights[1] * entropy).sum(), logits)
        results.append((logprob, entropy, grad))
    torch.testing.assert_close(results[0], results[1], atol=1e-12, rtol=1e-12)


def test_several_words_of_each_distribution():
    torch.manual_seed(0)
    logits = (torch.randn(6, 9, dtype=torch.float64) * 4).requires_grad_()
    words, entropy = torch.randint(0, 9, (6, 4)), torch.randn(6, dtype=torch.float64)
    weights = torch.randn(6, 4, dtype=torch.float64)
    found, spread = vocabulary_logprob(logits, words, None)
    (grad,) = torch.autograd.grad((weights * found).sum() + (entropy * spread).sum(), logits)
    every = torch.log_softmax(logits, -1)
    expected = every.gather(1, words)
    plain = (weights * expected).sum() - (entropy[:, None] * every.exp() * every).sum()
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(grad, torch.autograd.grad(plain, logits)[0], atol=1e-12, rtol=0)
    best = every.topk(4)
    logprob, top = vocabulary_top(logits.detach(), 4, None)
    torch.testing.assert_close(logprob, best.values)
    assert torch.equal(top, best.indices)


def test_a_process_may_have_no_distributions():
    logits = torch.zeros(0, 9, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    logprob, entropy = vocabulary_logprob(logits, none, None)
    assert logprob.shape == entropy.shape == (0,)
    assert vocabulary_logprob(logits, none.view(0, 4), None)[0].shape == (0, 4)
    (grad,) = torch.autograd.grad(logprob.sum() + entropy.sum(), logits)
    assert grad.shape == (0, 9)
    assert vocabulary_top(logits.detach(), 4, None)[1].shape == (0, 4)


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e4, 0.0, -1e4], [3e38, 3e38, 0.0]])
    logprob, entropy = vocabulary_logprob(logits, torch.tensor([0, 1]), None)
    torch.testing.assert_close(logprob, torch.tensor([0.0, -0.6931472]))
    torch.testing.assert_close(entropy, torch.tensor([0.0, 0.6931472]))
