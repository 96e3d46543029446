"""Layouts that somebody fixes in part."""

from __future__ import annotations

from penstock.planner.inputs.layout import Layout, pinned_layout


def test_fields_that_are_fixed_one_by_one_make_a_layout() -> None:
    """What a field needs beside itself and nobody has fixed may still be there."""
    assert pinned_layout({"ep": 2}) == Layout(ep=2, dp=2)
    assert pinned_layout({"ep": 2, "dp": 4}) == Layout(ep=2, dp=4)
    assert pinned_layout({"sequence_parallel": True}) == Layout()
    both = {"tp": 2, "sequence_parallel": True}
    assert pinned_layout(both) == Layout(tp=2, sequence_parallel=True)
