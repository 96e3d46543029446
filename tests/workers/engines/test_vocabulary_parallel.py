"""Log-probabilities and entropies by their own gradient; several processes: see the engine."""

from __future__ import annotations

import pytest
import torch
from fake_device import LargestTensor
from penstock.workers.engines import divided_network
from penstock.workers.engines.divided_network import vocabulary_logprob, vocabulary_top
from torch import Tensor


def plain(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    every = torch.log_softmax(logits, -1)
    return every.gather(1, target[:, None])[:, 0], -(every.exp() * every).sum(-1)


def test_several_words_of_each_distribution():
    torch.manual_seed(0)
    logits = (torch.randn(6, 9, dtype=torch.float64) * 4).requires_grad_()
    words, entropy = torch.randint(0, 9, (6, 4)), torch.randn(6, dtype=torch.float64)
    weights = torch.randn(6, 4, dtype=torch.float64)
    found, spread = vocabulary_logprob(logits, words, 1.0, None)
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
    logprob, entropy = vocabulary_logprob(logits, none, 1.0, None)
    assert logprob.shape == entropy.shape == (0,)
    assert vocabulary_logprob(logits, none.view(0, 4), 1.0, None)[0].shape == (0, 4)
    (grad,) = torch.autograd.grad(logprob.sum() + entropy.sum(), logits)
    assert grad.shape == (0, 9)
    assert vocabulary_top(logits.detach(), 4, None)[1].shape == (0, 4)


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e4, 0.0, -1e4], [3e38, 3e38, 0.0]])
    logprob, entropy = vocabulary_logprob(logits, torch.tensor([0, 1]), 1.0, None)
    torch.testing.assert_close(logprob, torch.tensor([0.0, -0.6931472]))
    torch.testing.assert_close(entropy, torch.tensor([0.0, 0.6931472]))


def whole(logits: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The same with everything in float32 at once, by autograd."""
    return plain(logits.float() / temperature, target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_looking_at_some_rows_at_a_time_changes_no_bit(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(37, 50) * 4).to(dtype).requires_grad_()
    target, weights = torch.randint(0, 50, (37,)), torch.randn(2, 37)
    results: list[tuple[Tensor, ...]] = []
    for at_once in (1 << 26, 7 * 50, 1):
        monkeypatch.setattr(divided_network, "_AT_ONCE", at_once)
        logprob, entropy = vocabulary_logprob(logits, target, 0.7, None)
        loss = (weights[0] * logprob + weights[1] * entropy).sum()
        results.append((logprob, entropy, *torch.autograd.grad(loss, logits)))
    for others in results[1:]:
        assert all(map(torch.equal, results[0], others))
    logprob, entropy = whole(logits, target, 0.7)
    loss = (weights[0] * logprob + weights[1] * entropy).sum()
    (grad,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(results[0], (logprob, entropy, grad))


def test_nothing_is_as_large_as_all_logits_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divided_network, "_AT_ONCE", 8 * 1000)
    logits = torch.randn(64, 1000, dtype=torch.bfloat16, requires_grad=True)
    with LargestTensor() as seen:
        logprob, entropy = vocabulary_logprob(logits, torch.arange(64), 1.0, None)
        torch.autograd.grad(logprob.sum() + entropy.sum(), logits)
    assert seen.num_bytes == 64 * 1000 * 2  # the gradient
