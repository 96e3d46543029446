"""Cutting batches into minibatches and micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock.algorithms.roles import Demonstrations, PreferencePairs
from penstock.workers.training.data_parallel import RankGroup
from penstock.workers.training.microbatch import (
    Minibatches,
    bounded,
    micro_batches,
    take_rows,
)

ALONE = RankGroup(0, 1, torch.device("cpu"))


def batch_of(lengths: list[int], ids: list[int] | None = None) -> PreferencePairs:
    width = max(lengths)
    inside = torch.arange(width) < torch.tensor(lengths)[:, None]
    tokens = torch.arange(len(lengths))[:, None].where(inside, -1)
    return PreferencePairs(
        pair_id=torch.tensor(ids or list(range(len(lengths)))),
        tokens=tokens,
        mask=inside,
        chosen=torch.zeros(len(lengths), dtype=torch.bool),
    )


def test_rows_are_taken_and_trimmed():
    batch = batch_of([5, 2, 3], ids=[7, 8, 9])
    part = take_rows(batch, torch.tensor([2, 1]))
    assert part.pair_id.tolist() == [9, 8]
    assert part.tokens.tolist() == [[2, 2, 2], [1, 1, -1]]
    assert part.mask.tolist() == [[True] * 3, [True, True, False]]
    none = take_rows(batch, torch.zeros(0, dtype=torch.int64))
    assert none.tokens.shape == (0, 0)


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 4)), min_size=1, max_size=30),
    st.integers(1, 80),
    st.booleans(),
    st.sampled_from(["row", "group"]),
)
def test_micro_batches_cover_the_rows_within_the_budget(
    rows: list[tuple[int, int]], budget: int, sort: bool, unit: str
):
    lengths, ids = [length for length, _ in rows], [group for _, group in rows]
    batch = batch_of(lengths, ids)
    kind = "group" if unit == "group" else "row"
    cut = list(micro_batches(batch, torch.arange(len(rows)), kind, budget, sort_by_length=sort))
    assert sorted(torch.cat(cut).tolist()) == list(range(len(rows)))
    for part in cut:
        units = {ids[row] if kind == "group" else row for row in part.tolist()}
        assert sum(lengths[row] for row in part.tolist()) <= budget or len(units) == 1
        if kind == "group":
            assert all((ids[row] in units) == (row in part.tolist()) for row in range(len(rows)))


_ROWS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=30)


@given(_ROWS, st.integers(1, 60), st.booleans())
def test_a_prompt_counts_once_for_rows_that_follow_each_other(
    rows: list[tuple[int, int]], budget: int, in_groups: bool
) -> None:
    prompts = [[], [7, 7], list(range(12))]  # the second ends where the third does not begin
    tokens = torch.full((len(rows), 22), -1)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for at, (number, response) in enumerate(rows):
        text = [5, *prompts[number]]
        tokens[at, : len(text) + response] = torch.tensor(text + [at + 50] * response)
        mask[at, len(text) : len(text) + response] = True
    batch = PreferencePairs(
        pair_id=torch.tensor([number for number, _ in rows]),
        tokens=tokens,
        mask=mask,
        chosen=torch.zeros(len(rows), dtype=torch.bool),
    )
    every, kind = torch.arange(len(rows)), "group" if in_groups else "row"
    parts = list(
        micro_batches(batch, every, kind, budget, sort_by_length=False, shares_prompts=True)
    )
    assert sorted(torch.cat(parts).tolist()) == every.tolist()
    if len(parts) == 1 and not in_groups:
        assert parts[0] is every

    def distinct(part: list[int]) -> int:
        own = [rows[at] for at in part]
        before = [None, *(number for number, _ in own[:-1])]
        again = [number == last for (number, _), last in zip(own, before, strict=True)]
        return sum(
            response + (0 if known else 1 + len(prompts[number]))
            for (number, response), known in zip(own, again, strict=True)
        )

    whole = list(micro_batches(batch, every, kind, budget, sort_by_length=False))
    for part in parts:
        units = {rows[at][0] if in_groups else at for at in part.tolist()}
        assert distinct(part.tolist()) <= budget or len(units) == 1
    assert sum(distinct(part.tolist()) for part in parts) <= sum(
        distinct(part.tolist()) for part in whole
    )


def test_rows_of_a_prompt_stay_together_where_they_fit() -> None:
    def cut(rows: list[int], bound: int) -> list[tuple[int, int]]:
        """Rows of 10 tokens and a prompt of 20 tokens before so many of them."""
        again = [0 if at == 0 else 20 for number in rows for at in range(number)]
        return bounded(range(1, len(again) + 1), [30] * len(again), again, bound)

    assert cut([3, 3], 80) == [(0, 3), (3, 6)]  # instead of four and two: one prompt less
    assert cut([1, 4], 80) == [(0, 4), (4, 5)]  # the first alone would not half fill it
    assert cut([3, 8], 80) == [(0, 4), (4, 10), (10, 11)]  # the rows do not fit whole
    assert cut([2], 5) == [(0, 1), (1, 2)]  # each longer than the bound
    assert cut([], 5) == []


@given(st.integers(1, 40), st.data())
def test_minibatches_are_even_and_cover_every_unit(num_rows: int, data: st.DataObject):
    num = data.draw(st.integers(1, num_rows))
    cut = Minibatches(batch_of([1] * num_rows), "row", num, ALONE)
    parts = [part.tolist() for part in cut.epoch(np.random.default_rng(0))]
    assert sorted(sum(parts, [])) == list(range(num_rows))
    sizes = [len(part) for part in parts]
    assert len(parts) == num
    assert max(sizes) - min(sizes) <= 1
    assert all(part == sorted(part) for part in parts)


def test_groups_are_sampled_whole():
    ids = [3, 8, 3, 5, 8, 5]
    cut = Minibatches(batch_of([1] * 6, ids), "group", 3, ALONE)
    parts = [{ids[row] for row in part.tolist()} for part in cut.epoch(np.random.default_rng(0))]
    assert sorted(len(part) for part in parts) == [1, 1, 1]
    assert set.union(*parts) == {3, 5, 8}


def test_a_group_loss_needs_a_group_column():
    demonstrations = Demonstrations(
        tokens=torch.zeros(2, 3, dtype=torch.int64), mask=torch.ones(2, 3, dtype=torch.bool)
    )
    with pytest.raises(ValueError, match="Demonstrations has no GroupId column"):
        Minibatches(demonstrations, "group", 1, ALONE)
