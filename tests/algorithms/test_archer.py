"""ArCHer's options, its rounds, and its slower copy."""

from __future__ import annotations

import pytest
from penstock.algorithms.losses import ClippedValueLoss
from penstock.algorithms.papers.archer import ArCHer, archer_step
from penstock.algorithms.roles import Sampling
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.placement import one_group

from .configured import configured
from .eager import weights_of


def test_each_round_asks_trains_and_moves_the_slower_copy() -> None:
    graph = build(archer_step, cfg=ArCHer(critic_rounds=3))
    assert dict(graph.trains_per_step) == {"actor": 1, "critic": 3, "target": 3}
    assert graph.learning_roles == {"actor", "critic"}
    order = [node.name for node in graph.nodes if node.role in ("critic", "target", "actor")]
    assert order[0] == "actor.converse"
    assert [name.split("#")[0] for name in order[1:-2]] == [
        "target.value", "critic.train", "target.follow",
    ] * 3  # fmt: skip
    assert order[-2:] == ["critic.value", "actor.train"]


def test_a_slower_copy_that_goes_all_the_way_is_the_critic() -> None:
    run = configured("archer", "algorithm.cfg.target_share=1.0", "algorithm.cfg.critic_rounds=1")
    executor = InProcess()
    with Engine(run.graph, one_group(run.graph), workers=run.workers, executor=executor) as engine:
        metrics = [step.metrics for step in engine.run(run.sources, 1)]
        critic, target = (executor.role("all", role) for role in ("critic", "target"))
        assert weights_of(critic) == weights_of(target)
    assert metrics[0]["target.follow/followed"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"critic_rounds": 0}, "critic_rounds is 0"),
        ({"target_share": 0.0}, "target_share is 0.0"),
        ({"discount": 1.5}, "discount is 1.5"),
        ({"sampling": Sampling(temperature=0)}, "nothing to learn from"),
        ({"value_loss": ClippedValueLoss()}, "value_loss.eps is 0.2.*leave eps null"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ArCHer(**options)  # pyright: ignore[reportArgumentType]
