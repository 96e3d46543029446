"""Columns that a run hands out with each step: which, of which step, and what refuses a name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from penstock.algorithms.roles import Rollout
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.checkpoint import Interval, Pauses
from penstock.dataflow.runtime.engine import Engine, StepResult
from penstock.dataflow.runtime.executor import Program
from penstock.dataflow.runtime.placement import one_group
from penstock.dataflow.runtime.run import EngineRun
from penstock.launch.run_dir.checkpoint import CheckpointStore

from ...algorithms import runs
from ..counter import COUNT, LOOK, SOURCES, apart, engine

SAMPLED = "model.sample"


def watched(max_lag: int = 0, num_chunks: int = 2) -> Engine:
    look = Program(LOOK, apart(LOOK, model__sample="rollout"))
    placement = apart(COUNT, num_chunks=num_chunks, model__sample="rollout")
    return engine(placement, max_lag=max_lag, also={"look": look})


def sampled(steps: Sequence[StepResult]) -> list[list[float]]:
    return [step.kept[SAMPLED].tolist() for step in steps]


@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_each_step_has_its_own_column_with_its_chunks_in_order(max_lag: int) -> None:
    with watched(max_lag) as one:
        steps = list(one.run(SOURCES, 5, keep=[SAMPLED, "keys.key"]))
    assert sampled(steps) == [[float(max(0, step - max_lag))] * 4 for step in range(5)]
    assert all(step.kept["keys.key"].tolist() == [0, 1, 2, 3] for step in steps)
    assert [sorted(step.kept) for step in steps] == [["keys.key", SAMPLED]] * 5


def test_a_run_that_is_asked_for_nothing_keeps_nothing() -> None:
    with watched() as one:
        (step,) = one.run(SOURCES, 1)
    assert step.kept == {}


def test_what_is_kept_is_forgotten_once_it_has_been_handed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many outputs are stored at the end of each step as without."""
    stored: dict[bool, list[int]] = {True: [], False: []}
    # What a run stores is seen nowhere else.
    result = EngineRun._result  # pyright: ignore[reportPrivateUsage]

    for keeps in (True, False):

        def counted(run: EngineRun, completed: object, keeps: bool = keeps) -> StepResult:
            made = result(run, completed)  # pyright: ignore[reportArgumentType]
            stored[keeps].append(len(run._store))  # pyright: ignore[reportPrivateUsage]
            return made

        monkeypatch.setattr(EngineRun, "_result", counted)
        with watched(max_lag=1) as one:
            list(one.run(SOURCES, 6, keep=[SAMPLED] if keeps else []))
    assert stored[True] == stored[False]
    assert len(stored[True]) == 6


@pytest.mark.parametrize("max_lag", [0, 2])
def test_a_pause_loses_nothing_of_what_is_kept(max_lag: int) -> None:
    with watched(max_lag) as one:

        def looked(_: Interval) -> bool:
            (step,) = one.run(SOURCES, 1, program="look", keep=[SAMPLED])
            return bool(step.kept[SAMPLED].numel() == 0)

        pauses = Pauses(frozenset({2, 3}), looked)
        steps = list(one.run(SOURCES, 6, pauses=pauses, keep=[SAMPLED, "keys"]))
    assert sampled(steps) == [[float(max(0, step - max_lag))] * 4 for step in range(6)]
    assert all(step.kept["keys"].key.tolist() == [0, 1, 2, 3] for step in steps)


def test_a_resumed_run_keeps_what_is_made_since(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with watched(max_lag=1) as one:
        for step in one.run(SOURCES, 5, checkpoint_every=2, checkpoints=store):
            if step.step == 2:
                break
    with watched(max_lag=1) as one:
        steps = list(one.run(SOURCES, 5, checkpoint_every=2, checkpoints=store, keep=[SAMPLED]))
    assert [step.step for step in steps] == [2, 3, 4]
    assert sampled(steps) == [[1.0] * 4, [2.0] * 4, [3.0] * 4]


def test_ragged_columns_and_tables_come_as_the_step_has_them() -> None:
    run = runs.make("grpo")
    names = ["reward.score", "actor.generate", "actor.generate.tokens"]
    with Engine(run.graph, one_group(run.graph), workers=run.workers) as one:
        (step,) = one.run(run.sources, 1, keep=names)
    roll = step.kept["actor.generate"]
    assert isinstance(roll, Rollout)
    assert torch.equal(roll.tokens, step.kept["actor.generate.tokens"])
    assert roll.tokens.shape == roll.mask.shape
    assert len(step.kept["reward.score"]) == len(roll.tokens)
    assert len(roll.tokens) == step.num_rows["actor.generate"]
    assert "tensor" not in repr(step), "a step that is printed stays short"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.smaple",
         "keep: graph 'count_step' makes no 'model.smaple'; did you mean 'model.sample'?\n    it "
         "makes: keys, model.sample; of a table one column is NODE.COLUMN"),
        ("keys.kee",
         "keep: graph 'count_step' makes no 'keys.kee'; did you mean 'keys.key'?\n    it makes: "
         "keys, model.sample; of a table one column is NODE.COLUMN"),
        ("model.train",
         "keep: 'model.train' makes no columns; what it reports is in StepResult.metrics, as "
         "'model.train/...'"),
    ],
)  # fmt: skip
def test_a_name_of_which_nothing_is_made_is_refused_at_once(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        engine().run(SOURCES, 3, keep=[name])
    assert str(raised.value) == said
