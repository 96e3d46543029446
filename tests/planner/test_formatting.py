"""Numbers, devices and tables as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.planner.formatting import (
    aligned,
    bytes_of,
    bytes_text,
    change_text,
    hours_text,
    percent_text,
    ranges_text,
    seconds_text,
)
from penstock.planner.inputs.calls import Lengths, Workload
from penstock.planner.report.plan_texts import (
    cluster_text,
    lengths_text,
    placement_text,
    workload_text,
)

from .hand_made import h100, ppo, split_plan

TEXTS: dict[Callable[[Any], object], dict[Any, object]] = {
    seconds_text: {
        1234.5: "1,234 s", 123.4: "123 s", 12.34: "12.3 s", 1.0: "1.00 s", 0.9996: "1.00 s",
        0.4567: "457 ms", 0.00123: "1.23 ms", 4.5e-6: "4.50 us", 0.0: "0 s", 99.97: "100 s",
    },
    bytes_text: {0: "0 B", 1023: "1023 B", 1536: "1.50 KiB", 77 * 10**9: "71.7 GiB",
                 2**41: "2.00 TiB"},
    percent_text: {0.0: "0 %", 0.0321: "3.2 %", 0.0996: "10 %", 0.5: "50 %", 1: "100 %"},
    hours_text: {0.0: "0.00", 1e-5: "<0.001", 0.01234: "0.0123", 4.8: "4.80", 1234.4: "1,234"},
    change_text: {0.0004: "same", 0.2: "+20 %", -0.5: "-50 %", -0.0321: "-3.2 %"},
    bytes_of: {"6GiB": 6 * 2**30, "512 MiB": 2**29, "1.5TiB": 3 * 2**39},
}  # fmt: skip


@pytest.mark.parametrize(
    ("function", "given", "expected"),
    [(function, *case) for function, cases in TEXTS.items() for case in cases.items()],
)
def test_numbers_and_their_texts(
    function: Callable[[Any], object], given: Any, expected: object
) -> None:
    assert function(given) == expected


def test_a_column_of_bytes_has_one_unit() -> None:
    assert bytes_text(2**29, like=2**30) == "0.50 GiB"
    assert bytes_text(2**29, like=2**30, unit=False) == "0.50"


@given(devices=st.sets(st.integers(0, 60)))
def test_ranges_name_every_device_once(devices: set[int]) -> None:
    named: list[int] = []
    for piece in filter(None, ranges_text(tuple(devices)).split(", ")):
        first, _, last = piece.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(devices)


def test_neighbors_stand_together() -> None:
    assert ranges_text([0, 1, 2, 3, 7, 9, 10]) == "0-3, 7, 9-10"


def test_lengths_and_workloads() -> None:
    spread = Lengths(tokens=(30, 1000), weights=(3, 1))
    assert lengths_text(spread) == "30 to 1,000 tokens (mean 272)"
    workload = Workload(num_prompts=64, samples_per_prompt=8, prompt=Lengths.constant(128),
                        response=spread, updates_per_train=4)  # fmt: skip
    assert workload_text(workload) == (
        "64 prompts x 8 responses; prompt 128 tokens, response 30 to 1,000 tokens (mean 272), "
        "4 updates"
    )


def test_clusters() -> None:
    assert cluster_text(h100(16)) == "h100: 16 nodes x 8 h100 = 128 devices"
    assert cluster_text(h100(1)) == "h100: 1 node x 8 h100 = 8 devices"
    assert cluster_text("mine") == "mine"


def test_placements() -> None:
    assert placement_text(ppo(), split_plan()) == "{actor, ref} on 8, {critic, reward} on 8"


def test_columns_stand_under_each_other() -> None:
    assert aligned([["a", "1"], ["bcd", "20"]], right=[1]) == ["a     1", "bcd  20"]


@pytest.mark.parametrize("text", ["6", "6GB", "-1GiB", "", "infGiB", "9" * 400 + "GiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="^expected a size such as 6GiB or 512MiB, got"):
        bytes_of(text)
