"""Responses that go on: every option of sampling does what it does in one go, to the bit.

The model is a table that depends on the whole text so far, so nothing rounds differently.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.algorithms.roles import Sampling
from penstock.workers.models.tokenizer import TokenizerSpec
from penstock.workers.rollout.generation_engine import BegunRows, EndedRows, Responses, collected
from penstock.workers.rollout.response_sampler import ResponseSampler
from torch import Tensor

VOCAB, EOS, MOST = 40, 2, 14
TOKENIZER = TokenizerSpec(alphabet="abcdefghijklmnopqrstuvwxyz")  # ids 4 to 29
PROMPT = torch.tensor([[5, 6, 7, -1], [9, -1, -1, -1], [5, 8, 30, 31]])


def logits_after(texts: Tensor) -> Tensor:
    """[n, VOCAB]; of each text, i64[n, T] right padded with -1, another row."""
    place = torch.arange(1, texts.shape[1] + 1)
    key = ((texts + 1) * (place * 7919 + 13)).where(texts >= 0, 0).sum(1) % 9973
    return ((key[:, None] * (torch.arange(VOCAB) * 31 + 17)) % 101).float() / 40


def sampler_of(sampling: Sampling, begun: BegunRows | None = None) -> ResponseSampler:
    rows = len(PROMPT) * sampling.num_samples
    seeded = torch.Generator().manual_seed(5)
    return ResponseSampler(
        PROMPT,
        torch.rand(rows, sampling.max_new_tokens, dtype=torch.float64, generator=seeded),
        sampling,
        end_ids=(EOS,),
        vocab_size=VOCAB,
        tokenizer=TOKENIZER,
        begun=begun,
    )


def sampled(sampler: ResponseSampler) -> list[EndedRows]:
    """All that is open, a token at a time."""
    given_ = [sampler.end(torch.nonzero(~sampler.open)[:, 0])]
    row = torch.nonzero(sampler.open)[:, 0]
    while len(row):
        texts, text = sampler.texts(row)
        every = torch.ones_like(row, dtype=torch.bool)
        live = sampler.sample(logits_after(texts)[text], row, every)[1]
        given_.append(sampler.end(row[~live]))
        row = row[live]
    return given_


def once(sampling: Sampling) -> Responses:
    rows = len(PROMPT) * sampling.num_samples
    return collected(sampled(sampler_of(sampling)), rows, sampling.max_new_tokens)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([1.0, 1.5]),
    st.integers(0, 9),
    st.sampled_from([0, 12]),
    st.sampled_from([(), ("k",), ("ab", "z", "qr")]),
    st.lists(st.integers(1, 6), min_size=1, max_size=5),
)
def test_segments_make_what_one_call_makes(
    num_samples: int,
    warm: bool,
    penalty: float,
    least: int,
    total: int,
    stop: tuple[str, ...],
    segments: list[int],
):
    sampling = Sampling(
        num_samples=num_samples,
        max_new_tokens=MOST,
        temperature=float(warm),
        repetition_penalty=penalty,
        min_new_tokens=least,
        max_total_tokens=total,
        stop=stop,
        stop_token_ids=(33, 34),
    )
    expected = once(sampling)
    shape = (len(PROMPT) * num_samples, MOST)
    token, logprob = torch.full(shape, -1), torch.zeros(shape)
    over = torch.zeros(shape[0], dtype=torch.bool)
    rows = torch.arange(shape[0])
    for most_new in [*(n if n % 2 else rows % (n + 1) for n in segments), MOST]:
        begun = BegunRows(token, logprob, over, most_new)
        before = (token >= 0).sum(1)
        given_ = sampled(sampler_of(sampling, begun))
        for place, ended in enumerate(given_):
            later = [one.responses.length for one in given_[place + 1 :]]
            assert all(bool((lengths >= ended.at_least).all()) for lengths in later)
        made = collected(given_, shape[0], MOST)
        assert bool((made.length - before <= most_new).all())
        assert torch.equal(made.finished, expected.finished & (made.length == expected.length))
        token, logprob = made.token, made.logprob
        over = made.length == expected.length
    assert torch.equal(token, expected.token)
    assert torch.equal(logprob, expected.logprob)


def test_texts_are_shared_by_samples_that_have_none_yet():
    sampling = Sampling(num_samples=2, max_new_tokens=4)
    token = torch.full((6, 4), -1)
    token[1, 0] = 11
    token[4:, 0] = 12
    begun = BegunRows(token, torch.zeros(6, 4), torch.zeros(6, dtype=torch.bool), 4)
    texts, text = sampler_of(sampling, begun).texts(torch.arange(6))
    assert [[token for token in row if token >= 0] for row in texts.tolist()] == [
        [5, 6, 7],
        [5, 6, 7, 11],
        [9],
        [5, 8, 30, 31, 12],
        [5, 8, 30, 31, 12],
    ]
    assert text.tolist() == [0, 1, 2, 2, 3, 4]


@pytest.mark.parametrize("stop", ["", "k"])
def test_what_has_ended_is_given_as_it_is(stop: str):
    sampling = Sampling(max_new_tokens=4, stop=(stop,) if stop else ())
    token = torch.tensor([[7, EOS, -1, -1], [7, 14, -1, -1], [5, 6, 7, 8]])  # 14 is "k"
    logprob = torch.full((3, 4), -0.5).where(token >= 0, 0)
    begun = BegunRows(token, logprob, torch.ones(3, dtype=torch.bool), 2)
    (ended,) = sampled(sampler_of(sampling, begun))
    assert ended.rows.tolist() == [0, 1, 2]
    assert torch.equal(ended.responses.token, token)
    assert torch.equal(ended.responses.logprob, logprob)
    assert ended.responses.length.tolist() == [2, 2, 4]
    assert ended.responses.finished.tolist() == [True, bool(stop), False]
