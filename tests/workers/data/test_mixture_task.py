"""Several tasks in one: shares, suites, verifiers, and what does not fit."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from penstock.configs.schema import TaskConfig
from penstock.dataflow.errors import ConfigError
from penstock.launch.inputs.data import task_spec_of
from penstock.workers.data.mixture_task import MixtureTask, MixtureTaskSpec
from penstock.workers.data.orders import Order, step_rows
from penstock.workers.data.row_sources import FileTaskSpec
from penstock.workers.data.sources import PromptSource
from penstock.workers.data.task import Task, fingerprint
from penstock.workers.models.tokenizer import TokenizerSpec


def file_spec(folder: Path, name: str, count: int, **options: Any) -> FileTaskSpec:
    path = folder / f"{name}.jsonl"
    rows = [{"prompt": f"{name}{i}", "answer": str(i), "rate": i / count} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return FileTaskSpec(path=str(path), **options)


def mixture(folder: Path, **weights: float) -> MixtureTask:
    tasks = {
        "a": file_spec(folder, "a", 20, num_held_out=4),
        "b": file_spec(folder, "b", 30, reward="math_verify"),
        "c": file_spec(folder, "c", 10),
    }
    return MixtureTaskSpec(tasks=tasks, weights=weights).build()


def test_every_problem_is_the_one_of_its_task(tmp_path: Path) -> None:
    task = mixture(tmp_path)
    assert isinstance(task, Task)
    assert (len(task.train), len(task.held_out)) == (56, 4)
    assert task.suites() == {"a": range(56, 60)}
    assert task.needs_process  # the second part's reward does
    for index in (*task.train, *task.held_out):
        prompt = task.prompt_text(index)
        assert task.answer_text(index) == prompt[1:]
        assert task.where(index).startswith(f"{prompt[0]}: ")
    assert fingerprint(task) == fingerprint(mixture(tmp_path))


def test_steps_take_of_each_task_what_its_weight_says(tmp_path: Path) -> None:
    task = mixture(tmp_path, a=5, b=2, c=0)
    source = PromptSource(task, TokenizerSpec().build(), batch_size=4, seed=0)
    batches = [source.batch(step).prompt_id.tolist() for step in range(70)]
    assert all(len(set(batch)) == 4 for batch in batches)
    counts = Counter(task.prompt_text(index)[0] for batch in batches for index in batch)
    assert counts == {"a": 200, "b": 80}
    again = PromptSource(task, TokenizerSpec().build(), batch_size=4, seed=0)
    assert again.batch(69).prompt_id.tolist() == batches[69]
    used = {task.prompt_text(index) for batch in batches for index in batch}
    assert len(used) == 46


def section(**options: Any) -> TaskConfig:
    return TaskConfig.model_validate({"kind": "mixture", **options})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tasks": {"s": "chain_sum"}, "weights": {"s": 0}},
     "'task.weights' add up to 0, so no task would be trained on\n    give at least one of them "
     "a weight above 0"),
    ({"tasks": {"sums": "chain_sum"}, "weights": {"sum": 1}},
     "'task.weights.sum': there is no task 'sum'; did you mean 'sums'?\n    tasks are: sums"),
    ({"tasks": {"s": "chain_sum"}, "weights": {"s": -1}},
     "'task.weights.s' is -1\n    give a number that is at least 0"),
    ({"tasks": {}}, "'task.tasks' is empty\n    give at least one: task.tasks={sums: chain_sum}"),
    ({"tasks": {"s": "chain_sun"}},
     "'task.tasks.s': there is no option 'chain_sun' of task=; did you mean 'chain_sum'?\n    "
     "give an option of task=, or keys such as {kind: file, path: problems.jsonl}"),
    ({"tasks": {"s": {"path": "a.jsonl"}}},
     "'task.tasks.s' says no kind of task\n    give an option of task=, or keys such as {kind: "
     "file, path: problems.jsonl}"),
    ({"tasks": {"s": {"kind": "file", "pat": "a.jsonl"}}},
     "'task.tasks.s': a 'file' task has no option 'pat'"),
    ({"tasks": {"s": "cartpole"}},
     "'task.tasks.s' has no problems of its own\n    give a task with prompts"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_what_is_no_mixture_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        task_spec_of(section(**options)).build()
    assert str(caught.value).startswith(said)


def test_what_one_task_holds_out_no_other_trains_on(tmp_path: Path) -> None:
    tasks = {
        "train": file_spec(tmp_path, "a", 6),
        "test": FileTaskSpec(path=str(tmp_path / "a.jsonl"), num_held_out=2),
    }
    task = MixtureTaskSpec(tasks=tasks).build()
    held_out = {task.prompt_text(index) for index in task.held_out}
    assert not held_out & {task.prompt_text(index) for index in task.train}
    assert len(task.train) == 8
    assert task.report.reasons["prompt is held out by another task"] == 2


@pytest.fixture
def rated(tmp_path: Path) -> dict[str, FileTaskSpec]:
    """Tasks whose problem i is solved in i of 20 or 10 tries."""
    lengths = {"a": 20, "b": 10}
    return {n: file_spec(tmp_path, n, k, pass_rate_field="rate") for n, k in lengths.items()}


def steps(task: Task, num_steps: int, batch_size: int = 4, **order: Any) -> list[list[str]]:
    rows = step_rows(
        "prompt", task.train, batch_size=batch_size, seed=3, task=task, order=Order(**order)
    )
    return [[task.prompt_text(index) for index in rows.at(step)] for step in range(num_steps)]


def test_a_curriculum_begins_with_the_easiest_of_each_part(rated: dict[str, FileTaskSpec]) -> None:
    task = MixtureTaskSpec(tasks=rated, weights={"a": 3}).build()
    found = steps(task, 60, kind="curriculum", curriculum_steps=10)
    assert Counter(prompt[0] for step in found for prompt in step) == {"a": 180, "b": 60}
    # A part has room for one item more than its share in a step: the 4 or 2 easiest.
    assert set(found[0]) <= {"a16", "a17", "a18", "a19", "b8", "b9"}
    assert {prompt for step in found[9:] for prompt in step} >= {f"a{i}" for i in range(20)}
    assert found == steps(task, 60, kind="curriculum", curriculum_steps=10)


def test_a_band_of_pass_rates_holds_in_each_part(rated: dict[str, FileTaskSpec]) -> None:
    task = MixtureTaskSpec(tasks=rated).build()
    found = steps(task, 40, batch_size=2, pass_rates=(0.5, 1.0))
    expected = {f"a{i}" for i in range(10, 20)} | {f"b{i}" for i in range(5, 10)}
    assert {prompt for step in found for prompt in step} == expected


def test_only_parts_that_are_trained_on_need_pass_rates(
    rated: dict[str, FileTaskSpec], tmp_path: Path
) -> None:
    tasks = {"a": rated["a"], "b": file_spec(tmp_path, "b", 10)}
    task = MixtureTaskSpec(tasks=tasks, weights={"b": 0}).build()
    assert len(steps(task, 1, kind="priority")[0]) == 4
    with pytest.raises(ConfigError, match="'mixture' does not say how often its problems are"):
        steps(MixtureTaskSpec(tasks=tasks).build(), 1, kind="priority")
