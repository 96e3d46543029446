"""The order in which a step's chunks are trained on, whatever the timing."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.dataflow.errors import StateError
from penstock.dataflow.scheduler.steps import Consumption

SIZES = st.lists(st.integers(0, 4), min_size=1, max_size=12)


def expected(sizes: list[int], answered: set[int], num_ranks: int) -> list[int]:
    """The longest beginning of the final order that nothing still to come can change.

    A rank that has not answered all of its chunks may answer anything that sorts after its last.
    """
    order = sorted(range(len(sizes)), key=lambda chunk: (sizes[chunk], chunk))
    lasts: list[tuple[int, int]] = []
    for rank in range(num_ranks):
        own = set(range(rank, len(sizes), num_ranks))
        if own - answered:
            lasts.append(max(((sizes[c], c) for c in own & answered), default=(-1, -1)))
    known = min(lasts, default=(len(sizes) + 10, 0))
    return [chunk for chunk in order if chunk in answered and (sizes[chunk], chunk) <= known]


@given(SIZES, st.integers(1, 5), st.data())
def test_a_chunk_has_its_place_as_soon_as_it_can(
    sizes: list[int], num_ranks: int, data: st.DataObject
) -> None:
    consumption = Consumption(len(sizes), num_ranks)
    queues = [
        sorted(range(rank, len(sizes), num_ranks), key=lambda chunk: (sizes[chunk], chunk))
        for rank in range(num_ranks)
    ]
    answered: set[int] = set()
    while any(queues):
        rank = data.draw(st.sampled_from([r for r, queue in enumerate(queues) if queue]))
        chunk = queues[rank].pop(0)
        before = list(consumption.order)
        consumption.answered(chunk, sizes[chunk])
        answered.add(chunk)
        assert consumption.order == expected(sizes, answered, num_ranks)
        assert consumption.order[: len(before)] == before  # a place is final
    assert consumption.order == sorted(range(len(sizes)), key=lambda c: (sizes[c], c))
    assert consumption.sizes == dict(enumerate(sizes))


@pytest.mark.parametrize(
    ("first", "second"), [((2, 5), (0, 4)), ((2, 5), (0, 5)), ((0, 5), (0, 5))]
)
def test_an_answer_out_of_order_is_refused(first: tuple[int, int], second: tuple[int, int]) -> None:
    consumption = Consumption(num_chunks=4, num_ranks=2)
    consumption.answered(*first)
    message = (
        f"chunk {second[0]} of size {second[1]} was answered after chunk {first[0]} of size "
        f"{first[1]}; a rank answers by (size, chunk)"
    )
    with pytest.raises(StateError, match=f"^{re.escape(message)}"):
        consumption.answered(*second)
