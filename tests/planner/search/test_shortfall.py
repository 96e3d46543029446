"""What the search says when there is no plan."""

from __future__ import annotations

import random
from collections.abc import Sequence
from inspect import cleandoc

import pytest
from penstock.dataflow.errors import PlanError
from penstock.planner.inputs.cluster import Mesh
from penstock.planner.inputs.layout import Layout
from penstock.planner.search.options import CallNode, Option
from penstock.planner.search.pins import Pins
from penstock.planner.search.search import search

from .tables import cluster_of, device

Sizes = dict[tuple[str, int], tuple[int, int]]
"""Call group and device count -> resident and transient bytes; nothing runs elsewhere."""

PAIR = (CallNode("big", "big", (), "big"), CallNode("small", "small", (), "small"))
FOUR = cluster_of((2, 2, device("a", 1000)))
"""Two nodes of two: a group has 1, 2 or 4 devices."""


class Fixed:
    """A table of given sizes; every call takes a second."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes

    def options(
        self, call_group: str, mesh: Mesh, *, beside: tuple[str, ...] = (), lagged: bool = False
    ) -> Sequence[Option]:
        if (call_group, mesh.num_devices) not in self._sizes:
            return ()
        resident, transient = self._sizes[call_group, mesh.num_devices]
        layout = Layout(dp=mesh.num_devices)
        return [Option({call_group: 1.0}, resident, {call_group: transient}, {call_group: layout})]


def refusal(sizes: Sizes, pins: Pins | None = None) -> str:
    with pytest.raises(PlanError) as caught:
        search(PAIR, Fixed(sizes), FOUR, max_lag=0, pins=pins)
    return str(caught.value)


def test_a_unit_that_runs_nowhere() -> None:
    assert refusal({("small", n): (1, 1) for n in (1, 2, 4)}) == (
        "'big' has no legal layout on cluster 'made-up': on none of the 3 meshes that a group can "
        "have does the table offer a way to run it that the pins and the number of rows allow\n"
        "    a train call has as many rows on every rank: change the pins, the devices, or the "
        "prompts of a step"
    )


def test_a_unit_that_fits_nowhere() -> None:
    sizes = {("small", 2): (1, 1), ("big", 2): (900, 300), ("big", 4): (800, 250)}
    assert refusal(sizes) == (
        "'big' fits nowhere on cluster 'made-up'. At best: 'big' alone on 4 x a: 1.03 KiB per "
        "device are needed, 1000 B are there, 50 B are lacking"
    )


def test_units_that_do_not_fit_beside_each_other() -> None:
    sizes = {("small", 2): (500, 1), ("big", 2): (1001, 300), ("big", 4): (800, 200)}
    assert refusal(sizes) == (
        "the call groups do not fit together on cluster 'made-up'. At best: 'big' alone on 2 x a: "
        "1.27 KiB per device are needed, 1000 B are there, 301 B are lacking"
    )


def test_units_that_do_not_fit_in_one_group() -> None:
    sizes = {("small", 4): (200, 100), ("big", 4): (800, 150), ("small", 1): (9, 9)}
    assert refusal(sizes) == (
        "the call groups do not fit together on cluster 'made-up'. At best: big, small on 4 x a: "
        "1.12 KiB per device are needed, 1000 B are there, 150 B are lacking"
    )


def test_device_counts_that_do_not_add_up() -> None:
    sizes = {("small", 1): (1, 1), ("big", 1): (1, 1), ("big", 2): (1, 1)}
    assert refusal(sizes) == cleandoc(
        """
        no way to divide the 4 devices of cluster 'made-up' gives every call group a number of devices on which it has a layout:
            'big' has one on 1, 2
            'small' has one on 1
        """  # noqa: E501
    )


def test_pins_that_leave_nothing() -> None:
    sizes = {(call_group, n): (1, 1) for call_group in ("big", "small") for n in (1, 2, 4)}
    pins = Pins(together=(("big", "small"),), apart=(("small", "big"),))
    assert refusal(sizes, pins) == (
        "the pins contradict each other: which calls share a group cannot be as all of these say\n"
        "    drop one of together=[big, small], apart=[small, big]"
    )
    assert refusal(sizes, Pins(layouts={"big": {"dp": 3}})).startswith("'big' has no legal layout")


def test_the_lack_told_is_the_least() -> None:
    rng, told = random.Random(5), 0
    for _ in range(60):
        sizes = {
            (call_group, n): (rng.randint(400, 800), rng.randint(150, 400))
            for call_group in ("big", "small")
            for n in (1, 2, 4)
        }
        alone = [
            min(sum(sizes[call_group, n]) for n in (1, 2, 4)) for call_group in ("big", "small")
        ]
        together = (sizes["big", 4], sizes["small", 4])
        needed = min(
            sum(resident for resident, _ in together) + max(moving for _, moving in together),
            max(sum(sizes["big", 2]), sum(sizes["small", 2])),
        )
        if max(alone) <= 1000 < needed:
            told += 1
            assert refusal(sizes).endswith(f", {needed - 1000} B are lacking")
    assert told > 5
