from __future__ import annotations

import pytest
from penstock.planner.inputs.layout import Layout
from penstock.planner.resharding.sharding import shard
from penstock.workers.weight_sync.packets import HeldWeights, WeightsError

from ...planner.transfers import TINY


def refusal(held: HeldWeights, version: int) -> str:
    with pytest.raises(WeightsError) as caught:
        held.check(version)
    return str(caught.value)


def test_a_parameter_counts_when_all_of_it_is_there():
    held = HeldWeights({"a": 6, "b": 2, "elsewhere": 0}, device=4)
    assert refusal(held, 1) == (
        "cannot use the weights on device 4: parameter 'a' was never received; version 1 is "
        "expected. Transfer version 1 to it, whole"
    )
    held.wrote("a", ((0, 2), (0, 3)), 1)
    held.wrote("b", ((0, 1),), 1)
    held.wrote("b", ((0, 1),), 1)  # The same again is no second half.
    assert refusal(held, 1) == (
        "cannot use the weights on device 4: parameter 'b' has only 1 of its 2 elements of version "
        "1; version 1 is expected. Transfer version 1 to it, whole"
    )
    held.wrote("b", ((1, 2),), 1)
    held.check(1)


def test_overwriting_makes_a_parameter_partial_and_leaves_the_others_stale():
    held = HeldWeights({"a": 2, "b": 2}, device=0)
    for name in "ab":
        held.wrote(name, ((0, 2),), 1)
    held.check(1)
    held.wrote("a", ((0, 2),), 2)
    assert "parameter 'b' is of version 1; version 2 is expected" in refusal(held, 2)
    held.writing("b", ((0, 1),), 2)
    assert "parameter 'b' has only 0 of its 2 elements of version 2" in refusal(held, 2)
    assert "parameter 'a' is of version 2; version 1 is expected" in refusal(held, 1)
    held.wrote("b", ((0, 2),), 2)
    held.check(2)
    with pytest.raises(WeightsError, match="device 0 needs nothing of parameter 'c'"):
        held.wrote("c", ((0, 1),), 2)


def test_what_is_overwritten_with_the_same_version_does_not_count_until_it_is_there_again():
    held = HeldWeights({"a": 6}, device=0)
    halves = ((0, 1), (0, 3)), ((1, 2), (0, 3))
    for half in halves:
        held.wrote("a", half, 1)
    held.check(1)
    held.writing("a", halves[1], 1)
    assert "parameter 'a' has only 3 of its 6 elements of version 1" in refusal(held, 1)
    held.wrote("a", ((1, 2), (0, 2)), 1)
    assert "parameter 'a' has only 5 of its 6 elements of version 1" in refusal(held, 1)
    held.wrote("a", halves[1], 1)
    held.check(1)


def test_a_device_needs_what_its_sharding_gives_it():
    sharding = shard(TINY, Layout(tp=2, pp=2), [0, 1, 2, 3])
    for device in sharding.devices:
        held = HeldWeights.of(sharding, device)
        for param in sharding.params:
            for piece in sharding.patterns[param.pattern]:
                if piece.device == device:
                    held.wrote(param.name, piece.box, 5)
        held.check(5)
    with pytest.raises(WeightsError, match="needs nothing of parameter 'model.norm.weight'"):
        HeldWeights.of(sharding, 0).writing("model.norm.weight", ((0, 6),), 5)
