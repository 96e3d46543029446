"""What the device knows of responses while they are sampled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from penstock.algorithms.roles import Sampling
from penstock.workers.rollout.response_sampler import TokenSampler, tokens_of

VOCAB, EOS = 50, 2
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_p": 0.8, "top_k": 9, "min_p": 0.02, "repetition_penalty": 1.5, "min_new_tokens": 3},
]


def sampler_of(**options: Any) -> TokenSampler:
    """Of 4 responses that may have 6 tokens, and have 0, 1, 2 and 5."""
    sampling = Sampling(max_new_tokens=6, **options)
    text = torch.tensor([[5, -1], [6, 7], [8, -1], [9, 3]])
    return TokenSampler(
        torch.rand(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
        sampling,
        ends=torch.tensor([EOS, 30]),
        vocab_size=VOCAB,
        length=torch.tensor([0, 1, 2, 5]),
        limit=torch.full((4,), 6),
        seen=tokens_of(text, VOCAB) if "repetition_penalty" in options else None,
    )


@pytest.mark.parametrize("options", OPTIONS)
def test_waiting_or_not_the_tokens_are_the_same(options: dict[str, Any]):
    plain, patient = sampler_of(**options), sampler_of(**options)
    generator = torch.Generator().manual_seed(1)
    row, live = torch.tensor([2, 0, 1, 3, 0]), torch.tensor([True, True, True, True, False])
    for _ in range(4):
        logits = torch.randn(5, VOCAB, generator=generator) * 2
        ours = patient.sample(logits, row, waits=False)
        theirs = plain.sample(logits, row, waits=True)
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine, other)
        patient.note(ours, row, live)
        plain.note(theirs, row, live)
        live = patient.goes_on(ours, row, live)


def test_rows_that_count_for_nothing_change_nothing():
    """Another slot of the batch says it is of response 0 as well, and is not live."""
    logits = torch.zeros(2, VOCAB)
    logits[0, 7], logits[1, 11] = 9.0, 9.0
    sampler, row = sampler_of(repetition_penalty=1e6), torch.tensor([0, 0])
    live = torch.tensor([True, False])
    first = sampler.sample(logits, row, waits=False)
    sampler.note(first, row, live)
    assert first.token.tolist() == [7, 11]
    assert sampler.goes_on(first, row, live).tolist() == [True, False]
    second = sampler.sample(logits.flip(0), row, waits=False)
    assert second.place.tolist() == [1, 1]
    assert second.token[0] == 11  # it has not been seen
    assert sampler.sample(logits, row, waits=False).token[0] != 7


def test_a_row_goes_on_until_a_token_ends_it_or_its_limit():
    logits = torch.zeros(4, VOCAB)
    logits[0, 30], logits[1, EOS], logits[2, 7], logits[3, 7] = 99.0, 99.0, 99.0, 99.0
    every = torch.ones(4, dtype=torch.bool)
    sampler, row = sampler_of(), torch.arange(4)
    found = sampler.sample(logits, row, waits=False)
    assert found.token.tolist() == [30, EOS, 7, 7]
    assert sampler.goes_on(found, row, every).tolist() == [False, False, True, False]
