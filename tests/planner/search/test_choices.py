"""Combinations of options that fit together, against looking at all of them."""

from __future__ import annotations

import random
from itertools import product
from math import inf

import pytest
from penstock.planner.search import choices
from penstock.planner.search.choices import CallGroupOption, fitting, least_work, unbeaten, work_s
from penstock.planner.search.options import Option
from penstock.planner.search.search import search

from .graphs import PPO
from .tables import RandomTable, cluster_of, device

Chosen = tuple[CallGroupOption, ...]


def random_pools(rng: random.Random) -> list[list[CallGroupOption]]:
    nothing = Option({}, 0, {}, {})
    return [
        [
            CallGroupOption(
                tuple(rng.random() for _ in range(calls)),
                rng.randint(0, 8),
                rng.randint(0, 8),
                nothing,
            )
            for _ in range(rng.randint(1, 5))
        ]
        for calls in rng.choices([1, 2], k=rng.randint(1, 4))
    ]


def fits(chosen: Chosen, memory: int) -> bool:
    largest = max(option.transient_bytes for option in chosen)
    return sum(option.resident_bytes for option in chosen) + largest <= memory


def test_fitting_and_least_work_equal_looking_at_everything() -> None:
    rng, feasible = random.Random(1), 0
    for _ in range(300):
        pools, memory = random_pools(rng), rng.randint(4, 25)
        below_s = rng.choice([inf, 2.0, 3.0])
        every = [chosen for chosen in product(*pools) if fits(chosen, memory)]
        expected = [chosen for chosen in every if work_s(chosen) < below_s]
        assert fitting(pools, memory, below_s) == (expected, True)
        least = least_work(pools, memory, below_s)
        assert (least is not None) == bool(expected)
        if least is not None:
            feasible += 1
            assert fits(least, memory)
            assert work_s(least) == pytest.approx(min(map(work_s, expected)), rel=1e-12)
    assert feasible > 100


def test_unbeaten_keeps_what_nothing_equals_or_beats_in_every_call() -> None:
    rng = random.Random(2)
    for _ in range(100):
        combined = list(product(*random_pools(rng)))

        def seconds(chosen: Chosen) -> list[float]:
            return [s for option in chosen for s in option.durations_s]

        def beaten(chosen: Chosen, others: list[Chosen] = combined) -> bool:
            return any(
                other != chosen
                and all(a <= b for a, b in zip(seconds(other), seconds(chosen), strict=True))
                for other in others
            )

        kept = {id(chosen) for chosen in unbeaten(combined)}
        assert kept == {id(chosen) for chosen in combined if not beaten(chosen)}


@pytest.mark.slow
def test_too_many_choices_leave_a_gap_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = cluster_of((3, 2, device("a", 24)))
    table = RandomTable(PPO, 11, max_options=12, missing=0.0)
    full = search(PPO, table, cluster, max_lag=1)
    assert full.num_cut_short == 0
    for module in ("choices", "partition_search"):
        monkeypatch.setattr(f"penstock.planner.search.{module}.MOST_COMBINED", 1)
    assert choices.MOST_COMBINED == 1
    short = search(PPO, table, cluster, max_lag=1)
    assert short.num_cut_short > 0
    assert not short.stopped_at_deadline
    assert short.lower_bound_s <= full.step_time_s * (1 + 1e-12)
    assert full.step_time_s <= short.step_time_s
