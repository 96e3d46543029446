"""When a run complains that what samples and what trains disagree."""

from __future__ import annotations

import warnings

import pytest
from penstock.configs.schema import MismatchConfig
from penstock.dataflow.runtime.engine import StepResult
from penstock.launch.stages.checks import MismatchGuard


def step(k3: float, lag: int = 0) -> StepResult:
    return StepResult(3, {"actor.train/rollout_k3": k3, "actor.train/loss": 9.0}, (), ((lag, 4),))


def test_it_warns_once() -> None:
    guard = MismatchGuard(MismatchConfig(warn_above=0.01))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guard.check(step(0.005))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        guard.check(step(0.02))
        guard.check(step(0.03))
    assert [str(one.message) for one in told] == [
        "step 3: 'actor.train' and what sampled for it disagree by 0.02 nats per token on the same "
        "weights; mismatch.warn_above is 0.01. Consider algorithm.cfg.correction"
    ]


def test_rollouts_that_ran_ahead_are_not_judged() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MismatchGuard(MismatchConfig(warn_above=0.1)).check(step(0.5, lag=1))


def test_what_is_not_a_number_is_told_of() -> None:
    with pytest.warns(UserWarning, match="disagree by nan nats per token"):
        MismatchGuard(MismatchConfig()).check(step(float("nan")))
