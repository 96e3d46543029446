"""Attention over packed rows: what torch's gives sequence by sequence, however it is cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.workers.engines.torch_engine import attention
from penstock.workers.engines.torch_engine.packing import pack_rows
from penstock.workers.engines.torch_engine.varlen import attend_sequences
from torch import Tensor
from varlen_reference import use_reference


@settings(max_examples=40, deadline=None)
@given(
    num_prompts=st.integers(1, 3),
    num_samples=st.integers(1, 4),
    prompt_length=st.integers(1, 9),
    longest=st.integers(1, 21),
    group=st.sampled_from([1, 3]),
    at_once=st.sampled_from([1, 300, 1 << 20]),
    shared=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_outputs_and_gradients_are_those_of_torch(
    num_prompts: int,
    num_samples: int,
    prompt_length: int,
    longest: int,
    group: int,
    at_once: int,
    shared: bool,
    seed: int,
) -> None:
    random = torch.Generator().manual_seed(seed)
    rows = num_prompts * num_samples
    lengths = prompt_length + torch.randint(1, longest + 1, (rows,), generator=random)
    tokens = torch.randint(3, 50, (rows, int(lengths.max())), generator=random)
    prompts = torch.randint(3, 50, (num_prompts, prompt_length), generator=random)
    tokens[:, :prompt_length] = prompts.repeat_interleave(num_samples, 0)
    place = torch.arange(tokens.shape[1])
    tokens[place >= lengths[:, None]] = -1
    reads = (place >= prompt_length - 1) & (place < lengths[:, None])
    if num_samples > 1:  # the last prompt has one less
        tokens, reads = tokens[:-1], reads[:-1]
    prompt = torch.full((len(tokens),), prompt_length)
    pack = pack_rows(tokens, reads, prompt if shared else None)

    def numbers(heads: int) -> Tensor:
        return torch.randn(len(pack.tokens), heads, 4, generator=random).requires_grad_()

    query, key, value = numbers(2 * group), numbers(2), numbers(2)
    upstream = torch.randn(len(pack.tokens), 8 * group, generator=random)
    upstream[-1] = 0  # of the last spare token nothing is ever wanted

    def found(mixed: Tensor) -> list[Tensor]:
        gradients = torch.autograd.grad(mixed, (query, key, value), upstream)
        return [part[:-1] for part in (mixed, *gradients)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MOST_SCORES", at_once)
        patch.setattr(attention, "_LEAST_QUERIES", 2)
        ours = found(attention.attend_packed(query, key, value, pack, 0.5))
    with pytest.MonkeyPatch.context() as patch:
        use_reference(patch)
        torchs = found(attend_sequences(query, key, value, pack.places, 0.5))
    for one, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 7])
def test_a_row_does_not_see_how_long_the_cache_is(heads: int, dtype: torch.dtype) -> None:
    """Bit for bit, wherever torch's own product would add up in other parts."""
    random = torch.Generator().manual_seed(0)
    query = torch.randn(16, 8 * heads, 64, generator=random).to(dtype)
    cache = torch.randn(16, 8, 1424, 64, generator=random).to(dtype)
    for length in (1, 120, 200, 300, 500, 1000):
        least = -(-length // 16) * 16
        seen: list[Tensor] = []
        for span in (least, least + 16, least + 192, least + 400):
            bias = torch.zeros(16, 1, span)
            bias[:, :, length:] = -torch.inf
            some = cache[:, :, :span]
            seen.append(attention.attend_cache(query, some, some, bias, 0.125))
        assert all(torch.equal(seen[0], other) for other in seen), length
        grouped, inside = query.float().view(16, 8, heads, 64), cache[:, :, :length].float()
        expected = ((grouped @ inside.mT * 0.125).softmax(-1) @ inside).view(16, -1)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(seen[0].float(), expected, atol=tolerance, rtol=tolerance)


def test_a_few_short_rows_are_not_padded_to_a_long_one() -> None:
    def widths(*lengths: int) -> list[tuple[int, int]]:
        tokens = torch.full((len(lengths), max(lengths)), -1)
        for row, length in enumerate(lengths):
            tokens[row, :length] = 5
        pack = pack_rows(tokens, tokens >= 0)
        return sorted((block.query.shape[0], block.query.shape[1]) for block in pack.blocks)

    # The spare tokens, up to 16, are a sequence as well.
    assert widths(20, 24, 400, 30) == [(1, 400), (4, 32)]
    assert widths(20, 24, 40, 30) == [(5, 48)]
