"""Masked statistics and the aggregation modes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock.algorithms.ops.reductions import (
    Aggregation,
    aggregate,
    aggregation_totals,
    masked_mean,
    masked_variance,
)

from ..tensors import f64, mask_of

MODES: tuple[Aggregation, ...] = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "constant",
)


X = f64([[1, 2, 3], [4, 5, 99]])
X_MASK = mask_of([[1, 1, 1], [1, 1, 0]])

LOSS = f64([[1, 2, 7, 7], [4, 4, 4, 4]])
LOSS_MASK = mask_of([[1, 1, 0, 0], [1, 1, 1, 1]])


def test_masked_moments() -> None:
    assert masked_mean(X, X_MASK).item() == pytest.approx(3, abs=1e-12)
    assert masked_variance(X, X_MASK, variance="biased").item() == pytest.approx(2, abs=1e-12)
    assert masked_variance(X, X_MASK, variance="unbiased").item() == pytest.approx(2.5, abs=1e-12)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 3.166667),
        ("seq-mean-token-sum", 9.5),
        ("seq-mean-token-mean", 2.75),
        ("constant", 2.375),
    ],
)
def test_aggregation_modes(mode: Aggregation, expected: float) -> None:
    value = aggregate(LOSS, LOSS_MASK, mode=mode, length=4)
    assert value.item() == pytest.approx(expected, abs=1e-6)


def test_rows_without_tokens_do_not_count_unless_asked() -> None:
    loss = torch.cat([LOSS, f64([[9, 9, 9, 9]])])
    mask = torch.cat([LOSS_MASK, mask_of([[0, 0, 0, 0]])])
    for mode in MODES:
        expected = aggregate(LOSS, LOSS_MASK, mode=mode, length=4).item()
        assert aggregate(loss, mask, mode=mode, length=4).item() == pytest.approx(expected)
        counted = aggregate(loss, mask, mode=mode, length=4, count_empty_rows=True).item()
        shrink = 1 if mode == "token-mean" else 2 / 3
        assert counted == pytest.approx(expected * shrink)


def test_nothing_to_train_on_is_zero_with_zero_gradient() -> None:
    loss = LOSS.clone().requires_grad_()
    for mode in MODES:
        value = aggregate(loss, torch.zeros_like(LOSS_MASK), mode=mode, length=4)
        (gradient,) = torch.autograd.grad(value, loss)
        assert value.item() == 0
        assert not gradient.any()


def test_infinities_behind_the_mask_leak_neither_into_value_nor_gradient() -> None:
    loss = torch.where(LOSS_MASK, LOSS, torch.inf).requires_grad_()
    value = aggregate(loss, LOSS_MASK)
    (gradient,) = torch.autograd.grad(value, loss)
    assert value.item() == pytest.approx(3.166667, abs=1e-6)
    assert torch.equal(gradient, LOSS_MASK.double() / 6)


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 6), max_size=3),
    padding=st.integers(0, 3),
    seed=st.integers(0, 2**16),
)
def test_any_split_any_padding_same_value(
    lengths: list[int], cuts: list[int], padding: int, seed: int
) -> None:
    rows = len(lengths)
    generator = torch.Generator().manual_seed(seed)
    loss = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    mask = mask[:, torch.randperm(5, generator=generator)]
    wide_loss = torch.cat([loss, torch.full((rows, padding), torch.nan).double()], dim=1)
    wide_mask = torch.cat([mask, torch.zeros(rows, padding).bool()], dim=1)
    edges = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    totals = aggregation_totals(mask)
    parts = [aggregation_totals(mask[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    assert torch.equal(torch.stack(parts).sum(0), totals)
    for mode in MODES:
        whole = aggregate(loss, mask, mode=mode, length=7)
        shares = [
            aggregate(wide_loss[a:b], wide_mask[a:b], mode=mode, length=7, totals=totals)
            for a, b in zip(edges, edges[1:], strict=False)
        ]
        assert torch.stack(shares).sum().item() == pytest.approx(whole.item(), abs=1e-12)


def test_messages() -> None:
    with pytest.raises(
        ValueError, match=r"mask must be bool\[rows, T\], got int64\[2, 3\]; .*mask"
    ):
        masked_mean(X, X_MASK.long())
    with pytest.raises(ValueError, match=r"x must be a floating .*\[2, 3\], got float64\[2, 2\]"):
        masked_mean(X[:, :2], X_MASK)
    with pytest.raises(
        ValueError, match=r"False on all of its \[2, 3\] positions; .* at least one"
    ):
        masked_mean(X, torch.zeros_like(X_MASK))
    one = mask_of([[1, 0, 0], [0, 0, 0]])
    with pytest.raises(ValueError, match="single masked token does not exist; pass variance='bia"):
        masked_variance(X, one, variance="unbiased")
    assert masked_variance(X, one, variance="biased").item() == 0
    with pytest.raises(ValueError, match="needs length >= 1, got None; pass the longest response"):
        aggregate(LOSS, LOSS_MASK, mode="constant")
    with pytest.raises(ValueError, match="mode 'mean' is unknown; choose 'token-mean'"):
        aggregate(LOSS, LOSS_MASK, mode="mean")  # pyright: ignore[reportArgumentType]
