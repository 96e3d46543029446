"""What steps wait for, from when their tasks ran."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.dataflow.runtime.engine import StepResult
from penstock.dataflow.runtime.messages import TaskSpan
from penstock.launch.stages.observers import Waits, union_s

from .test_headline import stage


def span(node: str, start_s: float, end_s: float, rank: int = 0) -> TaskSpan:
    return TaskSpan(node, 3, None, "all", rank, start_s, end_s)


def test_time_goes_to_what_was_at_work() -> None:
    waits = Waits(stage("algorithm=ppo").graph)
    spans = (
        span("actor.generate", 99.0, 104.0),  # one second of it before the step: ahead of time
        span("actor.generate", 101.0, 105.0, rank=1),
        span("reward.score", 105.0, 106.0),
        span("ref.logprob", 105.0, 105.5),
        span("actor.train", 107.0, 109.0),
    )
    result = StepResult(3, {}, spans, weights_s=((106.0, 106.5),))
    assert waits.of(result, 100.0, 110.0) == pytest.approx(
        {
            "generation": 5.0,
            "reward": 1.0,
            "forward passes": 0.5,
            "training": 2.0,
            "weights": 0.5,
            "other": 1.5,
        }
    )


def test_acting_in_environments_is_no_generation() -> None:
    waits = Waits(stage("algorithm=env_ppo", "task=cartpole", "model=mlp").graph)
    found = waits.of(StepResult(3, {}, (span("env.rollout", 0.0, 2.0),)), 0.0, 2.0)
    assert found == {"environments": 2.0, "other": 0.0}


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8))
def test_a_union_counts_every_second_once(spans: list[tuple[int, int]]) -> None:
    seconds = {s for start, end in spans for s in range(start, end) if 5 <= s < 25}
    assert union_s(spans, 5, 25) == len(seconds)
