"""Chunked log-probabilities: those of plain autograd, whatever the chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fake_device import LargestTensor
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_reference import use_functions
from penstock.algorithms.ops.distributions import action_logprob, entropy_of_logits
from penstock.workers.engines.divided_network import vocabulary_logprob
from penstock.workers.training import token_logprob as chunked
from penstock.workers.training.host_memory import sent
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WORDS, SIZE = 23, 5


def _plain(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    entry: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    every = torch.log_softmax(F.linear(states, weight, bias).float() / temperature, dim=-1)
    return every[entry, target], -(every.exp() * every).sum(-1)[entry]


@settings(max_examples=60, deadline=None)
@given(
    num_states=st.integers(1, 9),
    num_targets=st.integers(1, 14),
    rows_at_once=st.integers(1, 4),
    rows_exact=st.integers(1, 3),
    temperature=st.sampled_from([0.7, 1.0]),
    needs_entropy=st.booleans(),
    has_bias=st.booleans(),
    on_device=st.booleans(),
    keeps=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_numbers_and_gradients_are_those_of_plain_autograd(
    num_states: int,
    num_targets: int,
    rows_at_once: int,
    rows_exact: int,
    temperature: float,
    needs_entropy: bool,
    has_bias: bool,
    on_device: bool,
    keeps: bool,
    seed: int,
) -> None:
    random = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).requires_grad_()

    states, weight = numbers(num_states, SIZE), numbers(WORDS, SIZE)
    bias = numbers(WORDS) if has_bias else None
    target = torch.randint(WORDS, (num_targets,), generator=random)
    entry = torch.randint(num_states, (num_targets,), generator=random)
    upstream = torch.randn(2, num_targets, generator=random)
    leaves = [leaf for leaf in (states, weight, bias) if leaf is not None]

    def gradients(logprob: Tensor, entropy: Tensor | None) -> list[Tensor]:
        total = (logprob * upstream[0]).sum()
        if entropy is not None:
            total = total + (entropy * upstream[1]).sum()
        return list(torch.autograd.grad(total, leaves))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "MOST_LOGITS", WORDS * rows_at_once)
        patch.setattr(chunked, "MOST_IN_FLOAT32", WORDS * rows_exact)
        if on_device:
            use_functions(patch)
            patch.setattr(chunked, "keeps_logits", lambda *_, **__: keeps)  # pyright: ignore[reportUnknownLambdaType]
            patch.setattr(chunked, "_PIECE_KEPT", WORDS * (rows_at_once + 1))
        logprob, entropy = chunked.token_logprob(
            states, weight, bias, target, entry, temperature, needs_entropy=needs_entropy
        )
        found = gradients(logprob, entropy)
    expected, spread = _plain(states, weight, bias, target, entry, temperature)
    torch.testing.assert_close(logprob, expected, rtol=1e-5, atol=1e-5)
    if needs_entropy:
        torch.testing.assert_close(entropy, spread, rtol=1e-5, atol=1e-5)
    plain = gradients(expected, spread if needs_entropy else None)
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def _through_the_head(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return both for states that are the logits, under a head that leaves them as they are."""
    target = torch.zeros(len(logits), dtype=torch.int64)
    logprob, entropy = chunked.token_logprob(
        logits, torch.eye(logits.shape[1]), None, target, None, 1.0, needs_entropy=True
    )
    assert entropy is not None
    return logprob, entropy


def _over_the_vocabulary(logits: Tensor) -> tuple[Tensor, Tensor]:
    return vocabulary_logprob(logits, torch.zeros(len(logits), dtype=torch.int64), 1.0, None)


def _by_autograd(logits: Tensor) -> tuple[Tensor, Tensor]:
    return action_logprob(logits, torch.zeros(len(logits), dtype=torch.int64)), entropy_of_logits(
        logits
    )


@pytest.mark.parametrize("compute", [_through_the_head, _over_the_vocabulary, _by_autograd])
@pytest.mark.parametrize(
    "logits",
    [
        [40.0, 28.0, *[0.0] * 500],
        [40.0, 40.0, *[0.0] * 500],
        [-3.0, 55.0, 41.0, *[1.0] * 500],
        [1e4, 0.0, -1e4],
        [0.0] * 503,
    ],
    ids=["sure", "of two", "other", "certain", "flat"],
)
def test_entropy_keeps_its_digits_where_logits_are_large(
    compute: Callable[[Tensor], tuple[Tensor, Tensor]], logits: list[float]
) -> None:
    """Errors stay below a rounding of 1 in float32: the sum of exponentials is at least that."""
    found, exact = (torch.tensor([logits], dtype=d) for d in (torch.float32, torch.float64))
    results: list[tuple[Tensor, ...]] = []
    for z, rule in ((found, compute), (exact, _by_autograd)):
        logprob, entropy = rule(z.requires_grad_())
        (grad,) = torch.autograd.grad(entropy.sum(), z, retain_graph=True)
        (other,) = torch.autograd.grad(logprob.sum(), z)
        results.append((logprob.double(), entropy.double(), grad.double(), other.double()))
    assert float(results[0][1].detach()) >= 0
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize("compute", [_through_the_head, _over_the_vocabulary, _by_autograd])
def test_no_entropy_is_negative_and_words_without_a_chance_count_for_nothing(
    compute: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(400, 300, generator=random) * torch.logspace(0, 2.5, 400)[:, None]
    assert float(compute(logits)[1].min()) >= 0
    if compute is _through_the_head:  # a head of finite weights gives none that is infinite
        return
    z = torch.tensor([[3.0, 1.0, -torch.inf]]).requires_grad_()
    entropy = compute(z)[1]
    assert float(entropy.detach()) == pytest.approx(float(entropy_of_logits(z.detach()[:, :2])))
    assert bool(torch.autograd.grad(entropy.sum(), z)[0].isfinite().all())


def test_a_head_s_gradient_in_24_pieces_is_as_exact_as_in_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Errors agree to 2 %; added up in bfloat16 the error was 11 % larger."""
    random = torch.Generator().manual_seed(0)
    states, weight = (torch.randn(n, 64, generator=random).bfloat16() for n in (960, 500))
    target = torch.randint(500, (960,), generator=random)
    exact = weight.double().requires_grad_()
    every = F.linear(states.double(), exact).log_softmax(-1)
    (expected,) = torch.autograd.grad(every.gather(1, target[:, None]).sum(), exact)
    errors: list[float] = []
    monkeypatch.setattr(chunked, "ADDED_AT_ONCE", 64 * 200)
    for rows in (960, 40):
        monkeypatch.setattr(chunked, "MOST_LOGITS", 500 * rows)
        leaf = weight.clone().requires_grad_()
        found, _ = chunked.token_logprob(states, leaf, None, target, None, 1.0, needs_entropy=False)
        (grad,) = torch.autograd.grad(found.sum(), leaf)
        errors.append(float((grad.double() - expected).norm() / expected.norm()))
    assert errors[1] <= 1.02 * errors[0] <= 1e-2


def test_a_frozen_head_gets_no_gradient_and_states_do() -> None:
    states = torch.randn(3, SIZE).requires_grad_()
    weight = torch.randn(WORDS, SIZE)
    logprob, _ = chunked.token_logprob(
        states, weight, None, torch.tensor([1, 2, 3]), None, 1.0, needs_entropy=False
    )
    logprob.sum().backward()
    assert states.grad is not None
    assert weight.grad is None


def test_no_float32_tensor_has_rows_times_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16-bit weights, the largest float32 tensor made has a slice's size."""
    rows, words = 64, 512
    monkeypatch.setattr(chunked, "MOST_IN_FLOAT32", words * 4)
    states = torch.randn(rows, SIZE, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(words, SIZE, dtype=torch.bfloat16).requires_grad_()
    target = torch.arange(rows)
    with LargestTensor(torch.float32) as seen:
        logprob, entropy = chunked.token_logprob(
            states, weight, None, target, None, 1.0, needs_entropy=True
        )
        assert entropy is not None
        (logprob.sum() + entropy.sum()).backward()
    assert 0 < seen.numel <= words * 4


def test_elsewhere_products_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 151,936 words, those of a device are of 1,766 states; of the CPU, of 55."""
    states = torch.empty(8192, 64, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(151_936, 64, dtype=torch.bfloat16, device="meta")
    products: list[int] = []

    def product(states: Tensor, *more: Any) -> Tensor:
        products.append(len(states))
        return linear(states, *more)

    linear = F.linear
    monkeypatch.setattr(F, "linear", product)
    places = sent(torch.arange(8192), states.device)
    target = torch.empty(8192, dtype=torch.int64, device="meta")
    chunked.token_logprob(states, weight, None, target, places, 1.0, needs_entropy=True)
    assert products == [1766, 1766, 1766, 1766, 1128]


class _Products(TorchDispatchMode):
    """Counts products with a head's weights."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("keeps", "products"), [(True, 3), (False, 4)])
def test_logits_that_are_kept_are_not_made_again(
    keeps: bool, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_functions(monkeypatch)
    monkeypatch.setattr(chunked, "keeps_logits", lambda *_, **__: keeps)  # pyright: ignore[reportUnknownLambdaType]
    states, weight = (torch.randn(n, SIZE).requires_grad_() for n in (7, WORDS))
    target = torch.arange(7)
    with _Products() as seen:
        found, _ = chunked.token_logprob(
            states, weight, None, target, None, 1.0, needs_entropy=False
        )
        found.sum().backward()
    assert seen.count == products


def test_a_device_keeps_logits_of_16_bits_that_are_not_too_many() -> None:
    words, kept = 151_936, chunked.keeps_logits
    assert kept(16_384 * words, 2, on_cpu=False)
    assert not kept(32_768 * words, 2, on_cpu=False)
    assert not kept(words, 4, on_cpu=False)
    assert not kept(words, 2, on_cpu=True)


@pytest.mark.parametrize("keeps", [False, True], ids=["again", "kept"])
@pytest.mark.parametrize("num_targets", [1, 3])
@pytest.mark.parametrize("needs_entropy", [False, True], ids=["alone", "entropy"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(
    "device", ["cpu", "as a device", pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_logits_of_16_bits_have_the_numbers_of_float64_and_gradients_rounded_once(
    device: str,
    temperature: float,
    needs_entropy: bool,
    num_targets: int,
    keeps: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words, masked = 997, 5
    random = torch.Generator().manual_seed(num_targets)
    logits = (torch.randn(40, words, generator=random) * 3).bfloat16()
    logits[7, 11] = 40.0  # a word that is all but certain
    entry = torch.randint(40, (60,), generator=random)
    target = torch.randint(6, words, (60, num_targets), generator=random)
    entry[1], target[1] = entry[0], target[0]  # one distribution, asked for the same twice
    entry[2], target[2] = 7, 11
    upstream = torch.randn(60, num_targets, generator=random)
    of_entropy = torch.randn(60, generator=random) * 2

    exact = logits.double().requires_grad_()
    known = torch.arange(words) != masked
    every = torch.log_softmax(exact[:, known] / temperature, dim=-1)
    expected = every[entry[:, None], target - 1]
    spread = -(every.exp() * every).sum(-1)[entry]
    total = (expected * upstream).sum() + (spread * of_entropy).sum() * needs_entropy
    (gradient,) = torch.autograd.grad(total, exact)

    place = "cuda" if device == "cuda" else "cpu"
    if device == "as a device":
        use_functions(monkeypatch)
    monkeypatch.setattr(chunked, "keeps_logits", lambda *_, **__: keeps)  # pyright: ignore[reportUnknownLambdaType]
    states = logits.to(place).requires_grad_()
    head, bias = torch.eye(words).bfloat16().to(place), torch.zeros(words).bfloat16().to(place)
    bias[masked] = -torch.inf
    given = (target if num_targets > 1 else target[:, 0]).to(place)
    logprob, entropy = chunked.token_logprob(
        states, head, bias, given, entry.to(place), temperature, needs_entropy=needs_entropy
    )
    found = (logprob * upstream.to(place).view(logprob.shape)).sum()
    found = found if entropy is None else found + (entropy * of_entropy.to(place)).sum()
    found.backward()
    assert states.grad is not None
    torch.testing.assert_close(
        logprob.view(60, -1).double().cpu(), expected.detach(), rtol=1e-6, atol=4e-6
    )
    if entropy is not None:
        torch.testing.assert_close(entropy.double().cpu(), spread.detach(), rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(states.grad.double().cpu(), gradient, rtol=2**-8, atol=1e-6)
    best, likeliest = chunked.top_words(states.detach(), head, bias, 4, temperature)
    torch.testing.assert_close(
        best.double().cpu(), every.detach().topk(4).values, rtol=1e-6, atol=4e-6
    )
    assert masked not in likeliest.tolist()
