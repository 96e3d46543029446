"""Penalties and truncations against transformers' own, and against the definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock.algorithms.roles import Sampling
from penstock.workers.rollout.response_sampler import (
    filtered_logits,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalized,
)
from penstock.workers.rollout.sampling import sample_token
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

SEEDS = st.integers(0, 2**31)
VOCAB = st.integers(1, 700)


def random_logits(seed: int, vocab_size: int, spread: float = 3.0) -> Tensor:
    """f32[4, V], no two of a row equal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, vocab_size, generator=generator) * spread


def kept(logits: Tensor) -> list[list[int]]:
    return [torch.nonzero(row > -math.inf)[:, 0].tolist() for row in logits]


def nucleus(logits: Tensor, top_p: float) -> list[int]:
    """By definition: the likeliest tokens until they add up."""
    probability = logits.double().softmax(0)
    chosen: list[int] = []
    total = 0.0
    for token in probability.argsort(descending=True).tolist():
        chosen.append(token)
        total += float(probability[token])
        if total >= top_p:
            break
    return sorted(chosen)


@given(SEEDS, VOCAB, st.floats(0.01, 0.99), st.sampled_from([0.3, 3.0, 20.0]))
def test_top_p_keeps_the_nucleus(seed: int, vocab_size: int, top_p: float, spread: float):
    logits = random_logits(seed, vocab_size, spread)
    found = keep_top_p(logits, top_p)
    ids = torch.zeros(4, 1, dtype=torch.int64)
    theirs: Tensor = TopPLogitsWarper(top_p)(ids, logits)  # pyright: ignore[reportArgumentType]
    for row in range(4):
        ours, expected = kept(found)[row], nucleus(logits[row], top_p)
        # A sum may be rounded to the other side of top_p where it is equal to 6 digits.
        assert len(set(ours) ^ set(expected)) <= 1
        assert len(set(ours) ^ set(kept(theirs)[row])) <= 1
        assert torch.equal(found[row, ours], logits[row, ours])


@given(SEEDS, VOCAB, st.integers(1, 700))
def test_top_k_keeps_the_likeliest(seed: int, vocab_size: int, top_k: int):
    logits = random_logits(seed, vocab_size)
    ids = torch.zeros(4, 1, dtype=torch.int64)
    theirs: Tensor = TopKLogitsWarper(top_k)(ids, logits)  # pyright: ignore[reportArgumentType]
    assert torch.equal(keep_top_k(logits, min(top_k, vocab_size)), theirs)


@given(SEEDS, VOCAB, st.floats(0.001, 1))
def test_min_p_keeps_what_is_likely_enough(seed: int, vocab_size: int, min_p: float):
    logits = random_logits(seed, vocab_size)
    ids = torch.zeros(4, 1, dtype=torch.int64)
    theirs: Tensor = MinPLogitsWarper(min_p)(ids, logits)  # pyright: ignore[reportArgumentType]
    for ours, other in zip(kept(keep_min_p(logits, min_p)), kept(theirs), strict=True):
        assert len(set(ours) ^ set(other)) <= 1  # where a ratio equals min_p to 6 digits


@given(SEEDS, VOCAB, st.floats(0.1, 5))
def test_a_penalty_is_transformers_own(seed: int, vocab_size: int, penalty: float):
    logits = random_logits(seed, vocab_size)
    generator = torch.Generator().manual_seed(seed + 1)
    ids = torch.randint(vocab_size, (4, 9), generator=generator)
    seen = torch.zeros(4, vocab_size, dtype=torch.bool).scatter(1, ids, True)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits)  # pyright: ignore[reportArgumentType]
    assert torch.equal(penalized(logits, seen, penalty), theirs)


def test_tokens_as_likely_as_the_last_one_kept_are_kept():
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0, 1.0]])
    assert kept(keep_top_k(logits, 2)) == [[0, 1, 2, 4]]
    assert kept(keep_top_p(logits, 0.6)) == [[0, 1, 2, 4]]
    assert kept(keep_top_p(logits, 0.01)) == [[1]]
    assert kept(keep_min_p(logits, 1.0)) == [[1]]


@given(SEEDS, st.sampled_from([100, 700, 5000]), st.sampled_from([0.5, 0.9, 0.999]))
def test_a_row_is_filtered_for_itself(seed: int, vocab_size: int, top_p: float):
    logits = torch.cat([random_logits(seed, vocab_size, spread) for spread in (0.1, 1.0, 5.0)])
    sampling = Sampling(top_p=top_p, min_p=1e-4, temperature=0.7, repetition_penalty=1.1)
    seen = random_logits(seed + 1, vocab_size).repeat(3, 1) > 2
    whole = filtered_logits(logits, sampling, seen=seen, barred=None)
    for row in range(0, 12, 5):
        one = slice(row, row + 1)
        alone = filtered_logits(logits[one], sampling, seen=seen[one], barred=None)
        assert torch.equal(alone, whole[one])


def test_the_order_is_vllms():
    # 0.5, 0.3, 0.15, 0.05: without the last, 0.526, 0.316, 0.158.
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    either = Sampling(min_p=0.2, top_p=0.83)
    assert kept(filtered_logits(logits, either, seen=None, barred=None)) == [[0, 1]]
    assert kept(keep_min_p(keep_top_p(logits, 0.83), 0.2)) == [[0, 1, 2]]  # the other order
    barred = filtered_logits(logits, either, seen=None, barred=torch.arange(4)[None] == 0)
    assert kept(barred) == [[1, 2]]


def test_filters_that_keep_everything_change_no_bit():
    logits = random_logits(0, 5000)
    uniform = torch.rand(4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wide = Sampling(temperature=0.7, top_k=5000, min_p=1e-30)
    filtered = filtered_logits(logits, wide, seen=None, barred=None)
    for ours, plain in zip(
        sample_token(filtered, uniform, 1.0), sample_token(logits, uniform, 0.7), strict=True
    ):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("vocab_size", [4096, 4099, 9000])
@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0])
def test_a_token_found_in_blocks_is_the_one_of_the_whole_sum(vocab_size: int, spread: float):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(64, vocab_size, generator=generator) * spread
    word = torch.randint(2**32, (64,), generator=generator).double()
    word[0], word[1] = 0, 2**32 - 1
    token, logprob = sample_token(logits, (word + 0.5) * 2.0**-32, 0.8)
    every = torch.log_softmax(logits / 0.8, -1)
    cumulative = every.exp().double().cumsum(-1)
    target = (word + 0.5) * 2.0**-32 * cumulative[:, -1]
    expected = torch.searchsorted(cumulative, target[:, None], right=True)
    assert torch.equal(token, expected[:, 0])
    # Logits of up to 20 are exact to 1e-6, and processors add them up in different orders.
    torch.testing.assert_close(logprob, every.gather(1, expected)[:, 0], atol=5e-6, rtol=0)


@given(SEEDS, VOCAB, st.floats(0.001, 0.9999), st.sampled_from([0.0, 0.3, 3.0, 20.0]))
def test_the_nucleus_is_found_alike_without_a_look(
    seed: int, vocab_size: int, top_p: float, spread: float
):
    """Also where tokens are equally likely, or left out before."""
    logits = random_logits(seed, vocab_size, spread)
    logits[1] = logits[1].round()
    logits[2, 1::3] = -math.inf
    ranked, bisected = keep_top_p(logits, top_p), keep_top_p(logits, top_p, waits=False)
    if spread == 0:  # a sum of equal shares may be rounded to either side of top_p
        assert bool((bisected > -math.inf).any(1).all())
    else:
        assert torch.equal(bisected, ranked)
