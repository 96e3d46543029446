"""Set partitions: each once, and only those the pins allow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.planner.search.options import partitions

from .brute_force import set_partitions


@pytest.mark.parametrize(("count", "bell"), [(1, 1), (2, 2), (3, 5), (4, 15), (5, 52), (6, 203)])
def test_as_many_as_the_bell_numbers(count: int, bell: int) -> None:
    found = list(partitions([f"u{i}" for i in range(count)]))
    assert len(found) == len(set(found)) == bell
    assert len(found[0]) == 1
    assert len(found[-1]) == count


@given(st.data())
def test_pins_keep_just_what_they_allow(data: st.DataObject) -> None:
    call_groups = ["a", "b", "c", "d", "e"]
    some = st.lists(
        st.lists(st.sampled_from(call_groups), min_size=2, max_size=3, unique=True), max_size=2
    )
    together, apart = data.draw(some), data.draw(some)

    def allowed(groups: list[list[str]]) -> bool:
        return all(any(set(s) <= set(g) for g in groups) for s in together) and not any(
            len(set(s) & set(g)) > 1 for s in apart for g in groups
        )

    found = {frozenset(map(frozenset, p)) for p in partitions(call_groups, together, apart)}
    expected = {frozenset(map(frozenset, p)) for p in set_partitions(call_groups) if allowed(p)}
    assert found == expected


def test_groups_and_units_keep_their_order() -> None:
    assert list(partitions(["a", "b", "c"], apart=[("a", "b")])) == [
        (("a", "c"), ("b",)),
        (("a",), ("b", "c")),
        (("a",), ("b",), ("c",)),
    ]
