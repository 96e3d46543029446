"""Responses given as they end: bit for bit those of a batch of their own, and cut where one likes.

Numbers are exact where a text is read as before. A response that goes on is read in one forward
instead of token by token, which differs by rounding: its tokens are equal, its log-probabilities
close.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.algorithms.roles import Sampling
from penstock.dataflow.runtime.call_context import CallKey
from penstock.workers.engines.torch_engine.generator import TorchGenerator
from penstock.workers.rollout.generation_engine import BegunRows, EndedRows, Responses, collected
from penstock.workers.rollout.response_sampler import ResponseSampler
from penstock.workers.rollout.sampling import SampleStreams
from torch import Tensor
from torch_models import EOS, PLAIN, TOKENIZER, VOCAB, make_policy, make_prompts


@cache
def network_of(name: str) -> Any:
    policy: Any = make_policy(name)
    return policy.network


def generator(name: str = "qwen2-tied", max_rows: int = 512) -> TorchGenerator:
    return TorchGenerator(network_of(name), [EOS], max_rows, TOKENIZER)


def streams_of(prompt_id: Tensor, sampling: Sampling) -> SampleStreams:
    return SampleStreams(7, "actor", CallKey(4, 1), prompt_id, sampling.num_samples)


def stream(
    engine: TorchGenerator,
    prompts: tuple[Tensor, Tensor],
    sampling: Sampling,
    begun: BegunRows | None = None,
) -> Iterator[EndedRows]:
    prompt, prompt_id = prompts
    return engine.stream(prompt, streams_of(prompt_id, sampling), sampling, begun)


def whole(engine: TorchGenerator, prompts: tuple[Tensor, Tensor], sampling: Sampling) -> Responses:
    rows = len(prompts[0]) * sampling.num_samples
    return collected(stream(engine, prompts, sampling), rows, sampling.max_new_tokens)


def alone(engine: TorchGenerator, prompts: tuple[Tensor, Tensor], sampling: Sampling) -> Responses:
    """Each prompt's samples in a batch of their own."""
    pairs = zip(*(part.split(1) for part in prompts), strict=True)
    each = [whole(engine, pair, sampling) for pair in pairs]
    return Responses(
        torch.cat([one.token for one in each]),
        torch.cat([one.logprob for one in each]),
        torch.cat([one.length for one in each]),
        torch.cat([one.finished for one in each]),
    )


def assert_same(left: Responses, right: Responses, *, tolerance: float = 0) -> None:
    assert left.token.tolist() == right.token.tolist()
    assert left.length.tolist() == right.length.tolist()
    assert left.finished.tolist() == right.finished.tolist()
    torch.testing.assert_close(left.logprob, right.logprob, atol=tolerance, rtol=0)


def check_promises(given_: list[EndedRows], num_rows: int) -> None:
    """Every row once, in order where together, and none shorter than was promised."""
    rows = [row for ended in given_ for row in ended.rows.tolist()]
    assert sorted(rows) == list(range(num_rows))
    for place, ended in enumerate(given_):
        assert ended.rows.tolist() == sorted(ended.rows.tolist())
        for later in given_[place + 1 :]:
            assert int(later.responses.length.min()) >= ended.at_least
            assert later.at_least >= ended.at_least


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 9),
    st.sampled_from([3, 19, 90]),
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(0, 1000),
)
def test_a_response_does_not_depend_on_when_it_entered(
    num_prompts: int, longest: int, num_samples: int, max_new: int, max_rows: int, seed: int
):
    sampling = Sampling(num_samples=num_samples, max_new_tokens=max_new)
    prompts = make_prompts(num_prompts, longest, seed)
    given_ = list(stream(generator(max_rows=max_rows), prompts, sampling))
    rows = num_prompts * num_samples
    check_promises(given_, rows)
    assert_same(collected(given_, rows, max_new), alone(generator(), prompts, sampling))


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_nor_on_how_far_the_longest_row_goes(threads: int):
    """Sums over 192 to 384 positions are where a plain product of float32 depends on it."""
    policy: Any = make_policy("four-queries")
    engine = TorchGenerator(policy.network, [EOS], 512)
    prompt = torch.randint(3, VOCAB, (6, 330), generator=torch.Generator().manual_seed(2))
    for row, length in enumerate((190, 330, 20, 240, 120, 200)):
        prompt[row, length:] = -1
    prompts = prompt, torch.arange(6)
    sampling = Sampling(num_samples=2, max_new_tokens=60)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expected = alone(engine, prompts, sampling)
        for max_rows in (12, 5):
            few = TorchGenerator(policy.network, [EOS], max_rows)
            assert_same(whole(few, prompts, sampling), expected)
    finally:
        torch.set_num_threads(before)


def spied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows are live in each step from now on."""
    counts: list[int] = []
    sample = ResponseSampler.sample

    def spy(
        self: ResponseSampler, logits: Tensor, row: Tensor, live: Tensor
    ) -> tuple[Tensor, Tensor]:
        counts.append(int(live.sum()))
        return sample(self, logits, row, live)

    monkeypatch.setattr(ResponseSampler, "sample", spy)
    return counts


def test_rows_that_wait_enter_as_others_end(monkeypatch: pytest.MonkeyPatch):
    sampling = Sampling(num_samples=4, max_new_tokens=60)
    prompts = make_prompts(16)
    counts = spied(monkeypatch)
    length = whole(generator(max_rows=16), prompts, sampling).length
    assert max(counts) == 16
    assert sum(counts) == int(length.sum())
    in_waves = sum(int(wave.max()) for wave in length.split(16))
    assert len(counts) < 0.8 * in_waves


def test_rows_that_end_together_are_given_together():
    sampling = Sampling(num_samples=3, max_new_tokens=12)
    given_ = list(stream(generator(), make_prompts(6), sampling))
    lengths = [ended.responses.length.unique().tolist() for ended in given_]
    assert all(len(each) == 1 for each in lengths)
    assert lengths == sorted(lengths)
    # Those that go on have as many tokens, and get one more at least.
    assert [ended.at_least for ended in given_[:-1]] == [each[0] + 1 for each in lengths[:-1]]
    assert len(given_) > 3
    barred = Sampling(num_samples=3, max_new_tokens=9, min_new_tokens=9)
    (one,) = stream(generator(), make_prompts(6), barred)
    assert one.rows.tolist() == list(range(18))


# --- responses that go on


def in_segments(
    engine: TorchGenerator, prompts: tuple[Tensor, Tensor], sampling: Sampling, most_new: int
) -> Responses:
    """What calls make of which each adds at most so many tokens to a response."""
    rows = len(prompts[0]) * sampling.num_samples
    made: Responses | None = None
    while made is None or not bool(_is_over(made, prompts[0], sampling).all()):
        if made is None:
            none = torch.full((rows, sampling.max_new_tokens), -1)
            ended = torch.zeros(rows, dtype=torch.bool)
            begun = BegunRows(none, torch.zeros(none.shape), ended, most_new)
        else:
            ended = _is_over(made, prompts[0], sampling)
            begun = BegunRows(made.token, made.logprob, ended, most_new)
        given_ = list(stream(engine, prompts, sampling, begun))
        check_promises(given_, rows)
        if bool(ended.any()):
            assert given_[0].rows.tolist() == torch.nonzero(ended)[:, 0].tolist()
        now = collected(given_, rows, sampling.max_new_tokens)
        grown = now.length - (0 if made is None else made.length)
        assert bool((grown <= most_new).all())
        assert bool((grown[~ended] >= 1).all())
        made = now
    return made


def _is_over(made: Responses, prompt: Tensor, sampling: Sampling) -> Tensor:
    limits = [sampling.longest_response(n) for n in (prompt >= 0).sum(1).tolist()]
    limit = torch.tensor(limits).repeat_interleave(sampling.num_samples)
    return made.finished | (made.length >= limit)


WAYS: dict[str, dict[str, Any]] = {
    "plainly": {},
    "filtered": {"top_p": 0.9, "repetition_penalty": 1.4, "min_new_tokens": 6},
    "to a total": {"max_total_tokens": 28},
    "to a string": {"stop": ("K", "LM", "AB", "PQ"), "stop_token_ids": (9,)},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "most_new",
    [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(30, marks=pytest.mark.slow)],
)
def test_segments_make_what_one_call_makes(way: str, most_new: int):
    sampling = Sampling(num_samples=3, max_new_tokens=17, **WAYS[way])
    prompts = make_prompts(5)
    once = whole(generator(), prompts, sampling)
    assert bool(once.finished.any())
    assert not bool(once.finished.all())
    for max_rows in (512, 4):
        cut = in_segments(generator(max_rows=max_rows), prompts, sampling, most_new)
        assert_same(cut, once, tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "mistral-window"])
def test_segments_go_through_the_hugging_face_forward_too(name: str):
    assert name in PLAIN
    sampling, prompts = Sampling(num_samples=3, max_new_tokens=9), make_prompts(4, longest=4)
    once = whole(generator(name), prompts, sampling)
    for max_rows in (512, 5):
        cut = in_segments(generator(name, max_rows), prompts, sampling, 4)
        assert_same(cut, once, tolerance=1e-5)


@pytest.mark.slow
def test_what_goes_on_does_not_depend_on_its_batch_either():
    sampling = Sampling(num_samples=2, max_new_tokens=30, min_new_tokens=12)
    prompt, prompt_id = make_prompts(9, longest=40)
    first = whole(generator(), (prompt, prompt_id), sampling)
    # Row n goes on after n + 1 tokens.
    kept = torch.arange(30) <= torch.arange(18)[:, None]
    token, logprob = first.token.where(kept, -1), first.logprob.where(kept, 0)
    ended = (token >= 0).sum(1) == first.length
    begun = BegunRows(token, logprob, ended, 30)
    steps = stream(generator(max_rows=5), (prompt, prompt_id), sampling, begun)
    every = collected(steps, 18, 30)
    assert every.token.tolist() == first.token.tolist()
    for at in range(9):
        own = slice(2 * at, 2 * at + 2)
        part = BegunRows(token[own], logprob[own], ended[own], 30)
        pair = prompt[at : at + 1], prompt_id[at : at + 1]
        few = collected(stream(generator(), pair, sampling, part), 2, 30)
        assert few.token.tolist() == every.token[own].tolist()
        assert few.logprob.tolist() == every.logprob[own].tolist()


# --- callers


@pytest.mark.parametrize("name", ["qwen2-tied", "mixtral", "gpt2"])
def test_a_caller_that_stops_leaves_nothing_behind(name: str):
    engine = generator(name, max_rows=3)
    given_ = stream(engine, make_prompts(5), Sampling(num_samples=3, max_new_tokens=8))
    next(given_)
    assert torch.is_grad_enabled()
    module: Any = engine.network.module
    assert module.config._attn_implementation == "sdpa"
    del given_
    assert torch.is_grad_enabled()
    assert_same(*(whole(engine, make_prompts(2), Sampling(max_new_tokens=4)) for _ in range(2)))
