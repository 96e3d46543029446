"""A model that follows another: a moving average of its weights, or a copy now and then."""

from __future__ import annotations

import pytest
import torch
from penstock.algorithms.roles import Policy
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.call_context import step_scope
from penstock.workers.engines.roles import PolicyWorker
from torch_models import make_batch, make_policy


def pair(family: str = "qwen2-tied", dtype: str = "float32") -> tuple[PolicyWorker, PolicyWorker]:
    """A follower, and a leader with other weights."""
    follower, leader = make_policy(dtype=dtype), make_policy(family, spread=0.3, dtype=dtype)
    return follower, leader


def test_it_goes_its_share_of_the_way() -> None:
    follower, leader = pair()
    before, target = follower.export_weights(), leader.export_weights()
    (metric,) = follower.follow(leader, share=0.125).metrics.items()
    assert (metric[0], metric[1].value) == ("followed", 1.0)
    for name, weight in follower.export_weights().items():
        torch.testing.assert_close(weight, before[name] + 0.125 * (target[name] - before[name]))
    assert leader.export_weights().keys() == target.keys()
    assert all(torch.equal(target[name], w) for name, w in leader.export_weights().items())


def test_a_whole_share_is_a_copy_and_the_model_computes_with_it() -> None:
    follower, leader = pair()
    follower.follow(leader)
    assert follower.weights_sha256() == leader.weights_sha256()
    batch = make_batch(leader)
    found, expected = (one.logprob(batch.tokens, batch.mask) for one in (follower, leader))
    assert torch.equal(found, expected)


def test_between_two_times_nothing_moves() -> None:
    follower, leader = pair()
    moved: list[bool] = []
    for step in range(5):
        before = follower.weights_sha256()
        with step_scope(step):
            (metric,) = follower.follow(leader, share=0.5, every=3).metrics.values()
        moved.append(follower.weights_sha256() != before)
        assert metric.value == moved[-1]
    assert moved == [True, False, False, True, False]


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    follower, leader = pair()
    with pytest.raises(ConfigError) as refused:
        follower.follow(leader, share=share)
    assert str(refused.value) == f"role 'actor' follows with share={share}; expected in (0, 1]"


@pytest.mark.parametrize("every", [0, -2])
def test_an_interval_that_is_none_is_refused(every: int) -> None:
    follower, leader = pair()
    with pytest.raises(ConfigError) as refused:
        follower.follow(leader, every=every)
    assert str(refused.value) == f"role 'actor' follows with every={every}; expected at least 1"


def test_a_leader_of_another_kind_is_refused_and_nothing_moves() -> None:
    follower, _ = pair()
    before = follower.weights_sha256()
    for leader in (make_policy("llama"), Policy()):
        with pytest.raises(ConfigError) as refused:
            follower.follow(leader)
        assert str(refused.value) == (
            "role 'actor' is to follow a model that is not the same in the same layout here\n"
            "    give both roles one model, and put them on one group with one engine"
        )
    assert follower.weights_sha256() == before


def test_weights_of_16_bits_are_copied_but_not_averaged() -> None:
    follower, leader = pair(dtype="bfloat16")
    with pytest.raises(ConfigError) as refused:
        follower.follow(leader, share=0.01)
    assert str(refused.value) == (
        "role 'actor' follows with share=0.01, and its weights have 16 bits, which cannot hold a "
        "change smaller than 1/256 of a weight\n"
        "    set model.dtype=float32, or copy now and then: share=1.0, every=N"
    )
    follower.follow(leader)
    assert follower.weights_sha256() == leader.weights_sha256()
