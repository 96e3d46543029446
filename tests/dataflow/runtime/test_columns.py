"""Packed columns: nothing that is within a row is lost, nothing outside it survives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock.dataflow.errors import WorkerError
from penstock.dataflow.graph.axes import Axis, DType, Spec, boolean, f32, i64
from penstock.dataflow.runtime.columns import Packed, concatenate, lengths_of, pack, split, unpack
from torch import Tensor

SAMPLE = Axis("sample")
TOKEN = Axis("token", ragged=True)
FEATURE = Axis("feature")

SPECS = (
    f32(SAMPLE, TOKEN),
    i64(SAMPLE, TOKEN),
    boolean(SAMPLE, TOKEN),
    f32(SAMPLE, TOKEN, FEATURE),
)

row_lengths = st.lists(st.integers(0, 6), min_size=1, max_size=8)


def dense_column(spec: Spec, lengths: list[int], extra_width: int = 0) -> Tensor:
    """A column whose valid entries are 1, 2, 3...; padded positions hold what the spec says."""
    width = max(lengths) + extra_width
    shape = (len(lengths), width, *([2] if FEATURE in spec.axes else []))
    column = torch.full(shape, spec.dtype.padding, dtype=spec.dtype.torch)
    count = 0
    for row, length in enumerate(lengths):
        for position in range(length):
            count += 1
            column[row, position] = count % 2 if spec.dtype is DType.BOOL else count
    return column


@given(spec=st.sampled_from(SPECS), lengths=row_lengths, extra_width=st.integers(0, 3))
def test_unpack_undoes_pack(spec: Spec, lengths: list[int], extra_width: int) -> None:
    column = dense_column(spec, lengths, extra_width)
    packed = pack("c", column, spec, torch.tensor(lengths))
    assert packed.num_rows == len(lengths)
    assert len(packed.values) == sum(lengths)
    assert torch.equal(unpack(packed, spec.dtype), column[:, : max(lengths)])


@given(spec=st.sampled_from(SPECS), lengths=row_lengths, extra_width=st.integers(1, 3))
def test_what_stands_in_the_padding_is_dropped(
    spec: Spec, lengths: list[int], extra_width: int
) -> None:
    clean = dense_column(spec, lengths, extra_width)
    dirty = clean.clone()
    for row, length in enumerate(lengths):
        dirty[row, length:] = 1 if spec.dtype is not DType.F32 else float("nan")
    packed = pack("c", dirty, spec, torch.tensor(lengths))
    assert torch.equal(unpack(packed, spec.dtype), clean[:, : max(lengths)])


@given(spec=st.sampled_from(SPECS), pieces=st.lists(row_lengths, min_size=1, max_size=4))
def test_split_undoes_concatenate(spec: Spec, pieces: list[list[int]]) -> None:
    packed = [pack("c", dense_column(spec, rows), spec, torch.tensor(rows)) for rows in pieces]
    whole = concatenate(packed)
    assert whole.num_rows == sum(len(rows) for rows in pieces)
    for before, after in zip(packed, split(whole, [len(rows) for rows in pieces]), strict=True):
        assert before.lengths is not None
        assert after.lengths is not None
        assert torch.equal(before.values, after.values)
        assert torch.equal(before.lengths, after.lengths)


@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_columns_that_are_not_ragged_split_and_concatenate_too(sizes: list[int]) -> None:
    column = torch.arange(3.0 * sum(sizes)).reshape(-1, 3)
    pieces = split(Packed(column), sizes)
    assert [piece.num_rows for piece in pieces] == sizes
    assert all(piece.lengths is None for piece in pieces)
    assert torch.equal(concatenate(pieces).values, column)


def test_rows_of_no_length_and_no_rows_at_all_survive() -> None:
    spec = i64(SAMPLE, TOKEN)
    empty_row = pack("c", torch.tensor([[-1, -1], [5, -1]]), spec, torch.tensor([0, 1]))
    assert torch.equal(unpack(empty_row, spec.dtype), torch.tensor([[-1], [5]]))
    no_rows = pack("c", torch.zeros(0, 4, dtype=torch.int64), spec, torch.zeros(0).long())
    assert unpack(no_rows, spec.dtype).shape == (0, 0)


def test_lengths_come_from_the_padding_of_ids() -> None:
    ids = torch.tensor([[7, 0, 3], [0, -1, -1], [-1, -1, -1]])
    assert lengths_of(ids).tolist() == [3, 1, 0]


def test_a_single_piece_is_not_copied() -> None:
    piece = Packed(torch.zeros(2))
    assert concatenate([piece]) is piece


def test_packing_detaches_and_counts_bytes() -> None:
    column = torch.ones(2, 3, requires_grad=True)
    packed = pack("c", column, f32(SAMPLE, TOKEN), torch.tensor([1, 3]))
    assert not packed.values.requires_grad
    assert packed.num_bytes == 4 * 4 + 2 * 8
    assert Packed(torch.tensor(1.0)).num_rows == 1
    assert Packed(torch.zeros(3, 2)).num_bytes == 24


@pytest.mark.parametrize(
    ("column", "spec", "lengths"),
    [
        (torch.tensor([1.0, 2.0]), f32(SAMPLE), None),
        (torch.tensor(1.0), f32(), None),
        (torch.tensor([[1.0, 0.0], [2.0, 3.0]]), f32(SAMPLE, TOKEN), [1, 2]),
    ],
    ids=["rows", "scalar", "ragged"],
)
def test_no_tensor_shares_memory_with_what_is_stored(
    column: Tensor, spec: Spec, lengths: list[int] | None
) -> None:
    before = column.clone()
    packed = pack("c", column, spec, None if lengths is None else torch.tensor(lengths))
    column += 10
    unpack(packed, spec.dtype).add_(10)
    assert torch.equal(unpack(packed, spec.dtype), before)


@pytest.mark.parametrize(
    ("column", "lengths", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.float64), [3, 3],
         "'gae.advantage' should be f32[sample, token~], but the call returned float64[2, 3]; "
         "make it torch.float32 with 2 axes"),
        (torch.zeros(2), [3, 3],
         "'gae.advantage' should be f32[sample, token~], but the call returned float32[2]; make "
         "it torch.float32 with 2 axes"),
        (torch.zeros(2, 3), None,
         "'gae.advantage' is f32[sample, token~], but nothing says how long its rows are; return "
         "an i64 column over the same axes beside it, padded with -1"),
        (torch.zeros(2, 3), [4, 1],
         "'gae.advantage' is f32[sample, token~], with 2 rows of up to 4 tokens, but the call "
         "returned float32[2, 3]"),
        (torch.zeros(3, 4), [4, 1],
         "'gae.advantage' is f32[sample, token~], with 2 rows of up to 4 tokens, but the call "
         "returned float32[3, 4]; an op that drops or adds rows says @op(..., makes_rows=True)"),
    ],
    ids=["dtype", "axes", "lengths", "width", "rows"],
)  # fmt: skip
def test_a_column_that_contradicts_its_spec_is_refused(
    column: Tensor, lengths: list[int] | None, message: str
) -> None:
    given = None if lengths is None else torch.tensor(lengths)
    with pytest.raises(WorkerError) as caught:
        pack("gae.advantage", column, f32(SAMPLE, TOKEN), given)
    assert str(caught.value) == message
