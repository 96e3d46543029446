"""Observers: what steps wait for, which responses are shown and kept, what is known before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.dataflow.graph.graph import Graph
from penstock.dataflow.runtime.engine import StepResult
from penstock.dataflow.runtime.messages import TaskSpan
from penstock.launch.cli.hydra_app import compose
from penstock.launch.inputs.run import resolved
from penstock.launch.run_dir.progress import StagePlan
from penstock.launch.stages.observers import (
    Waits,
    is_shown,
    sample_columns,
    sample_node,
    stage_plans,
    union_s,
)
from penstock.launch.stages.prepare import prepare

from .test_stage_result import stage

ROWS, SCORE = "tokens mask prompt_id finished", "reward.score reward"
COLUMNS = {
    "grpo": f"{ROWS} {SCORE} group_advantage version advantage",
    "ppo": f"{ROWS} {SCORE} version advantage",
    "rloo": f"{ROWS} {SCORE} response_kl kl_penalized_score leave_one_out version advantage",
    "online_dpo": "tokens mask prompt_id best_and_worst.score reward",
}


ACTING = ["task=cartpole", "model=mlp"]


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


@pytest.mark.parametrize(
    ("every", "live", "steps"),
    [(None, True, [1, 10, 100, 250]), (None, False, []), (0, True, []), (100, False, [100, 200])],
)
def test_responses_are_shown_now_and_then(every: int | None, live: bool, steps: list[int]) -> None:
    shown = [step + 1 for step in range(250) if is_shown(step, 250, every, live=live)]
    assert shown == steps


def test_what_is_to_be_done_is_known_before_the_first_step() -> None:
    words = ["algorithm.num_steps=50", "evaluation.every=20", "task.num_train=200"]
    composed = compose("run", [*words, "task.num_held_out=8", "evaluation.num_prompts=8"])
    composed.pop("resume")
    assert stage_plans(prepare(resolved(composed))) == [
        StagePlan("sft", 150),
        StagePlan("grpo", 50, evaluated_after=(0, 20, 40, 50)),
    ]


def graph_of(algorithm: str, *words: str) -> Graph:
    composed = compose("run", [f"algorithm={algorithm}", *words])
    composed.pop("resume")
    return resolved(composed).main.graph


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", COLUMNS)
def test_the_trained_rows_are_kept_with_what_is_said_of_each(algorithm: str) -> None:
    graph = graph_of(algorithm)
    trained = sample_node(graph)
    assert trained is not None
    assert " ".join(sample_columns(graph, trained)) == COLUMNS[algorithm]


@pytest.mark.parametrize(("algorithm", "words"), [("sft", []), ("dpo", []), ("env_ppo", ACTING)])
def test_where_no_response_is_sampled_none_is_kept(algorithm: str, words: list[str]) -> None:
    assert sample_node(graph_of(algorithm, *words)) is None
