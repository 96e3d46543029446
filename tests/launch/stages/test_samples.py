"""Which columns are kept of the recipes' graphs."""

from __future__ import annotations

import pytest
from penstock.dataflow.graph.graph import Graph
from penstock.launch.cli.hydra_app import compose
from penstock.launch.inputs.run import resolved
from penstock.launch.stages.observers import sample_columns, sample_node

ROWS, SCORE = "tokens mask prompt_id finished", "reward.score reward"
COLUMNS = {
    "grpo": f"{ROWS} {SCORE} group_advantage version advantage",
    "ppo": f"{ROWS} {SCORE} version advantage",
    "rloo": f"{ROWS} {SCORE} response_kl kl_penalized_score leave_one_out version advantage",
    "online_dpo": "tokens mask prompt_id best_and_worst.score reward",
}


ACTING = ["task=cartpole", "model=mlp"]


def graph_of(algorithm: str, *words: str) -> Graph:
    composed = compose("run", [f"algorithm={algorithm}", *words])
    composed.pop("resume")
    return resolved(composed).main.graph


@pytest.mark.parametrize("algorithm", COLUMNS)
def test_the_trained_rows_are_kept_with_what_is_said_of_each(algorithm: str) -> None:
    graph = graph_of(algorithm)
    trained = sample_node(graph)
    assert trained is not None
    assert " ".join(sample_columns(graph, trained)) == COLUMNS[algorithm]


@pytest.mark.parametrize(("algorithm", "words"), [("sft", []), ("dpo", []), ("env_ppo", ACTING)])
def test_where_no_response_is_sampled_none_is_kept(algorithm: str, words: list[str]) -> None:
    assert sample_node(graph_of(algorithm, *words)) is None
