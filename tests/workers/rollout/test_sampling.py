"""Counter-based random numbers and inverse-CDF samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock.dataflow.runtime.call_context import CallKey
from penstock.workers.rollout.sampling import (
    SampleStreams,
    row_uniforms,
    sample_token,
    stream_generator,
    stream_key,
)

KEY = stream_key(1, "actor", "generate", CallKey(2, 3))
EXPECTED_KEY = [17484432256914496287, 5461913485380153386]
EXPECTED_UNIFORMS = [0.7995464162668213, 0.5210370222339407, 0.15454361180309206]
EXPECTED_SHUFFLE = [5, 3, 0, 1, 2, 4]


def uniforms(prompts: list[int], samples: list[int], count: int) -> list[list[float]]:
    rows = row_uniforms(KEY, np.array(prompts, np.int64), np.array(samples, np.int64), count)
    return rows.tolist()


def test_the_stream_never_changes():
    # Written down once: another value here would change every run of every user.
    assert KEY.tolist() == EXPECTED_KEY
    assert uniforms([5], [0], 3)[0] == EXPECTED_UNIFORMS
    shuffle = stream_generator(1, "actor", "minibatches", CallKey(0, 0), 0).permutation(6)
    assert shuffle.tolist() == EXPECTED_SHUFFLE


def test_a_seed_changes_where_a_response_goes_on():
    streams = SampleStreams(7, "actor", CallKey(3, 0), torch.tensor([40, 41]), 2)
    fresh = streams.seeds()
    assert fresh == [  # written down once
        4973046992985111131,
        4808012244145249564,
        4222883562587726133,
        3475369444154642879,
    ]
    assert streams.seeds([0, 0, 0, 0]) == fresh
    old, first, other, second = streams.seeds([0, 1, 0, 2])
    assert [old, other] == [fresh[0], fresh[2]]
    assert len({*fresh, first, second, *streams.seeds([0, 2, 0, 1])}) == 8


def test_a_row_is_its_own_stream():
    whole = uniforms([5, 5, 9, -1], [0, 1, 0, 0], 8)
    assert uniforms([9], [0], 3)[0] == whole[2][:3]
    assert uniforms([-1, 5], [0, 1], 8) == [whole[3], whole[1]]
    assert len({row[0] for row in whole}) == 4


@pytest.mark.parametrize(
    "other",
    [
        stream_key(2, "actor", "generate", CallKey(2, 3)),
        stream_key(1, "critic", "generate", CallKey(2, 3)),
        stream_key(1, "actor", "minibatches", CallKey(2, 3)),
        stream_key(1, "actor", "generate", CallKey(3, 2)),
        stream_key(1, "actor", "generate", CallKey(2, 3), 0),
    ],
)
def test_every_part_of_the_key_counts(other: np.ndarray):
    assert other.tolist() != KEY.tolist()


def test_samples_follow_the_distribution():
    logits = torch.tensor([1.0, float("-inf"), 0.0, 2.0, float("-inf")])
    count = 20000
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    token, logprob = sample_token(logits.expand(count, -1), uniform, 2.0)
    expected = torch.log_softmax(logits / 2.0, -1)
    share = torch.bincount(token, minlength=5) / count
    torch.testing.assert_close(share, expected.exp(), atol=1e-4, rtol=0)
    torch.testing.assert_close(logprob, expected[token])


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.1, 1.0, 3.0]),
)
def test_an_impossible_token_is_never_sampled(values: list[float], word: int, temperature: float):
    logits = torch.tensor([float("-inf"), *values, float("-inf")])
    uniform = torch.tensor([(word + 0.5) / 2**32], dtype=torch.float64)
    token, logprob = sample_token(logits[None], uniform, temperature)
    assert 1 <= int(token) <= len(values)
    assert bool(logprob.isfinite())


def test_temperature_zero_is_greedy():
    logits = torch.tensor([[0.0, 3.0, 3.0], [2.0, 1.0, 0.0]])
    token, logprob = sample_token(logits, torch.tensor([0.99, 0.99], dtype=torch.float64), 0.0)
    assert token.tolist() == [1, 0]
    assert logprob.tolist() == [0.0, 0.0]


def test_prompts_that_began_in_other_steps_keep_their_streams():
    ids = torch.tensor([5, 9, 5, 7])
    steps = torch.tensor([2, 3, 3, 1])
    streams = SampleStreams(1, "actor", CallKey(3, 0), ids, 2, steps)
    numbers, seeds = streams.uniforms(6), streams.seeds()
    for at, step in enumerate(steps.tolist()):
        own = SampleStreams(1, "actor", CallKey(step, 0), ids[at : at + 1], 2)
        assert torch.equal(numbers[2 * at : 2 * at + 2], own.uniforms(6))
        assert seeds[2 * at : 2 * at + 2] == own.seeds()
    assert len({row[0] for row in numbers.tolist()}) == len(set(seeds)) == 8
    now = SampleStreams(1, "actor", CallKey(3, 0), ids, 2)
    again = SampleStreams(1, "actor", CallKey(3, 0), ids, 2, torch.full((4,), 3))
    assert torch.equal(now.uniforms(6), again.uniforms(6))
    assert now.seeds() == again.seeds()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.0, 1.0, 20.0])
def test_a_large_vocabulary_is_searched_alike_without_a_look(dtype: torch.dtype, spread: float):
    """Also at the ends of the unit interval, with tokens that are left out."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(300, 9001, generator=generator) * spread).to(dtype)
    logits[:, 64:192] = -torch.inf  # two whole blocks
    logits[100:200, -1:] = logits[:100, :1] = -torch.inf
    uniform = torch.rand(300, dtype=torch.float64, generator=generator)
    uniform[::7], uniform[1::7] = 0.5 * 2.0**-32, 1 - 0.5 * 2.0**-32
    token, logprob = sample_token(logits, uniform, 0.9)
    found, its = sample_token(logits, uniform, 0.9, waits=False)
    assert torch.equal(found, token)
    torch.testing.assert_close(its, logprob, atol=2e-6, rtol=0)
    assert bool(its.isfinite().all())


@pytest.mark.parametrize("waits", [True, False])
def test_logits_that_are_not_finite_are_told(waits: bool):
    logits = torch.zeros(2, 5000)
    logits[0, 7] = torch.nan
    token, logprob = sample_token(logits, torch.full((2,), 0.5).double(), 1.0, waits=waits)
    assert logprob.isnan().tolist() == [True, False]
    assert waits or bool((token < 5000).all())
