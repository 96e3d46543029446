"""What the device knows of responses while they are sampled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from penstock.algorithms.roles import Sampling
from penstock.workers.rollout.token_sampler import TokenSampler, tokens_of

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
        ours = patient.sample(logits, row, live, waits=False)
        theirs = plain.sample(logits, row, live, waits=True)
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine, other)
        live = ours.goes_on


def test_rows_that_count_for_nothing_change_nothing():
    """Another slot of the batch says it is of response 0 as well, and is not live."""
    logits = torch.zeros(2, VOCAB)
    logits[0, 7], logits[1, 11] = 9.0, 9.0
    sampler, row = sampler_of(repetition_penalty=1e6), torch.tensor([0, 0])
    options: Any = {"live": torch.tensor([True, False]), "waits": False}
    first = sampler.sample(logits, row, **options)
    assert first.token[0] == 7
    assert first.goes_on.tolist() == [True, False]
    second = sampler.sample(logits.flip(0), row, **options)
    assert second.token[0] == 11  # so 11 was not seen
    assert sampler.sample(logits, row, **options).token[0] not in (7, 11)


def test_a_row_goes_on_until_a_token_ends_it_or_its_limit():
    logits = torch.zeros(4, VOCAB)
    logits[0, 30], logits[1, EOS], logits[2, 7], logits[3, 7] = 99.0, 99.0, 99.0, 99.0
    every = torch.ones(4, dtype=torch.bool)
    found = sampler_of().sample(logits, torch.arange(4), every, waits=False)
    assert found.token.tolist() == [30, EOS, 7, 7]
    assert found.goes_on.tolist() == [False, False, True, False]
