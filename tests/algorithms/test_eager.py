"""A step function called by hand and the same function run as a graph end with the same bits."""

from __future__ import annotations

import pytest
from penstock.dataflow.eager import run_eagerly
from penstock.dataflow.engine import Engine
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.executor import InProcess, build_role
from penstock.dataflow.placement import one_group
from penstock.dataflow.worker import Trainable, WorkerContext

from . import runs

NUM_STEPS = 3


def weights_of(worker: object) -> dict[str, bytes]:
    assert isinstance(worker, Trainable)
    return {name: t.numpy().tobytes() for name, t in worker.export_weights().items()}


@pytest.mark.parametrize("name", runs.NAMES)
def test_eager_equals_graph_bitwise(name: str) -> None:
    run = runs.make(name)
    executor = InProcess()
    engine = Engine(run.graph, one_group(run.graph), workers=run.workers, executor=executor)
    metrics = [step.metrics for step in engine.run(run.sources, NUM_STEPS)]
    live = {role: build_role(role, spec, WorkerContext(role)) for role, spec in run.workers.items()}
    initial = {role: weights_of(live[role]) for role in run.trained}
    returned = list(run_eagerly(run.step, run.sources, NUM_STEPS, workers=live, cfg=run.cfg))
    assert len(metrics) == len(returned) == NUM_STEPS
    for role in run.trained:
        by_hand = weights_of(live[role])
        assert by_hand == weights_of(executor.role("all", role))
        assert by_hand != initial[role], "nothing was learned, so equality says nothing"


def test_a_parameter_nobody_provides_is_named() -> None:
    run = runs.make("grpo")
    with pytest.raises(ConfigError) as raised:
        next(run_eagerly(run.step, run.sources, 1, workers={}, cfg=run.cfg))
    assert str(raised.value) == (
        "'grpo_step' has a parameter 'actor' that nobody provides; give it as a source, a worker "
        "or a keyword"
    )
