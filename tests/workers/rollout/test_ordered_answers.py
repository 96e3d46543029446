"""Answers leave in the order of (size, call), all of them, and none later than it must."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.workers.rollout.generate_calls import OrderedAnswers

Place = tuple[int, int]


@dataclass(frozen=True)
class Step:
    """What an engine tells at once: rows that have ended, and what the others reach at least."""

    rows: list[int]
    at_least: int


@dataclass(frozen=True)
class History:
    """Calls, and how their responses end: with how many tokens, of which so many are not new."""

    num_rows: list[int]
    begun: list[int]
    lengths: list[int]
    steps: list[Step]

    def added(self, row: int) -> int:
        return self.lengths[row] - self.begun[row]

    def places(self) -> list[Place]:
        """(size, call) of each call."""
        bounds = pairwise(accumulate(self.num_rows, initial=0))
        sizes = [max(map(self.added, range(*own)), default=0) for own in bounds]
        return [(size, call) for call, size in enumerate(sizes)]

    def answers(self) -> list[list[Place]]:
        """What is answered before the first step and at each."""
        order = OrderedAnswers(self.num_rows, self.begun)
        told = [order.ended([], [], 0)]
        for step in self.steps:
            lengths = [self.lengths[row] for row in step.rows]
            told.append(order.ended(step.rows, lengths, step.at_least))
        assert order.num_missing == 0
        return told


NUM_ROWS = st.lists(st.integers(0, 4), max_size=6)


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Responses end in any order, one or several at once; bounds are anything that is true."""
    num_rows = draw(NUM_ROWS)
    total = sum(num_rows)
    begun = draw(st.lists(st.integers(0, 4), min_size=total, max_size=total) | st.just([0] * total))
    lengths = [before + draw(st.integers(0, 4)) for before in begun]
    left = draw(st.permutations(range(total)))
    steps: list[Step] = []
    while left:
        taken = draw(st.integers(0 if len(steps) < 20 else 1, len(left)))
        rows, left = left[:taken], left[taken:]
        steps.append(Step(rows, draw(st.integers(0, min((lengths[r] for r in left), default=4)))))
    return History(num_rows, begun, lengths, steps)


@pytest.mark.slow
@settings(max_examples=300)
@given(histories())
def test_answers_are_ordered_by_size_and_none_is_lost(history: History):
    given_out = [place for places in history.answers() for place in places]
    assert given_out == sorted(history.places())


@given(histories())
def test_an_answer_waits_only_for_one_that_may_come_before_it(history: History):
    """Whatever is held back, some call could still end so that its place is before it."""
    bounds = list(pairwise(accumulate(history.num_rows, initial=0)))
    places = history.places()
    has_ended: set[int] = set()
    answered: set[Place] = set()
    steps = [Step([], 0), *history.steps]
    for step, told in zip(steps, history.answers(), strict=True):
        has_ended |= set(step.rows)
        answered |= set(told)
        least: list[Place] = []  # where the others would be if each ended as early as it can
        for call, (begin, end) in enumerate(bounds):
            known = [history.added(row) for row in range(begin, end) if row in has_ended]
            if len(known) < end - begin:
                left = [history.begun[row] for row in range(begin, end) if row not in has_ended]
                least.append((max([0, step.at_least - min(left), *known]), call))
        for call, (begin, end) in enumerate(bounds):
            if places[call] not in answered and has_ended.issuperset(range(begin, end)):
                assert min(least) < places[call]


@given(st.lists(st.integers(1, 4), max_size=6), st.data())
def test_rows_in_lockstep_hold_nothing_back(num_rows: list[int], data: st.DataObject):
    """Rows that grow together leave with the last token of their call's longest response."""
    total = sum(num_rows)
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=total, max_size=total))
    steps = [Step([row for row in range(total) if lengths[row] == t], t + 1) for t in range(1, 10)]
    history = History(num_rows, [0] * total, lengths, steps)
    for t, told in enumerate(history.answers()):
        assert told == [place for place in sorted(history.places()) if place[0] == t]


def test_a_short_call_passes_a_long_one_once_the_others_are_known_to_be_longer():
    order = OrderedAnswers([2, 1, 1])
    assert order.ended([3], [4], at_least=3) == []  # calls 0 and 1 may still have 3 tokens
    assert order.ended([], [], at_least=4) == []  # or 4, and come before it by their number
    assert order.ended([0], [9], at_least=4) == []  # call 0 cannot any more, call 1 can
    assert order.ended([], [], at_least=5) == [(4, 2)]
    assert order.ended([1, 2], [6, 6], at_least=0) == [(6, 1), (9, 0)]


def test_tokens_that_were_there_before_do_not_count():
    order = OrderedAnswers([1, 2, 1], begun=[7, 9, 0, 0])
    assert order.ended([0], [10], at_least=0) == []  # 3 more, and the others may get fewer
    assert order.ended([1], [9], at_least=2) == []  # call 1 gets 2 at least, by its other response
    assert order.ended([3], [3], at_least=4) == [(3, 0), (3, 2)]
    assert order.ended([2], [4], at_least=0) == [(4, 1)]


def test_a_response_that_ends_twice_is_refused():
    order = OrderedAnswers([2])
    order.ended([1], [3], at_least=0)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text follows
        order.ended([1], [4], at_least=0)
    assert str(error.value) == "response 1 ended twice; an engine gives every response once"
