"""The loss on held-out demonstrations and pairs: its value, when there is one, and what follows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.placement import one_group
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.launch.cli.hydra_app import compose
from penstock.launch.inputs.run import Run, resolved
from penstock.launch.main import main
from penstock.launch.run_dir.evaluations import WHOLE, Evaluations, Measured
from penstock.launch.stages.evaluation import Evaluator, HeldOutLoss, held_out_losses
from penstock.launch.stages.prepare import prepare
from penstock.launch.stages.report import first_notes, measured_text, statistics
from penstock.launch.stages.worker_specs import worker_specs
from penstock.workers.executors.on_ray.executor import connect_ray, shutdown_ray
from torch.nn.functional import logsigmoid

FILE = ["task=file", "task.answer_field=null", "task.num_held_out=12"]
PAIRS = ["task.path=pairs.jsonl", "task.chosen_field=chosen", "task.rejected_field=rejected"]
KINDS: dict[str, list[str]] = {
    "sft": ["task.path=chats.jsonl", "task.response_field=reply", "algorithm.per_step.demos=16"],
    "dpo": ["~algorithm.before", *PAIRS, "algorithm.per_step.pairs=16"],
    "reward_modelling": [*PAIRS, "algorithm.per_step.pairs=16"],
}


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{i}+1=", "reply": str(i + 1)} for i in range(9, 60)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": str(i)} for i in range(9, 60)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def made_ready(kind: str, *words: str) -> Run:
    of_file = KINDS[kind] if "task=file" in words else ()
    composed = compose("run", [f"algorithm={kind}", *of_file, *words])
    composed.pop("resume")
    return prepare(resolved(composed))


def by_hand(job: Run, workers: dict[str, Any]) -> float:
    """Return the mean over tokens, or pairs, of the paper's loss, computed row by row."""
    rows: Any = job.held_out_rows
    (table,) = rows.tables.values()
    role = workers[rows.train.role]
    if rows.train.role == "reward":
        score = role.score(table.tokens, table.mask, table.pair_id).double()
        return float(-logsigmoid(score[0::2] - score[1::2]).mean())
    logprob = role.logprob(table.tokens, table.mask).double()
    if "ref" not in workers:
        return float(-logprob.sum() / table.mask.sum())
    ratio = (logprob - workers["ref"].logprob(table.tokens, table.mask)).sum(1)
    return float(-logsigmoid(0.1 * (ratio[0::2] - ratio[1::2])).mean())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_all_held_out_rows_whatever_fits_at_once(kind: str) -> None:
    job = made_ready(kind, *FILE)
    rows, specs = job.held_out_rows, dict[str, Any](worker_specs(job.main, job, {}))
    assert rows is not None
    assert job.suites == (), "without answers there is nothing else to measure"
    (table,) = rows.tables.values()
    assert len(table.tokens) == (12 if kind == "sft" else 24)
    for tokens in (4096, 10):
        built = {
            role: replace(spec, micro_batch_tokens=tokens).build(WorkerContext(role))
            for role, spec in specs.items()
        }
        # A reference begins as the policy does: with other weights there is something to compare.
        for number, worker in enumerate(built.values()):
            worker.load_weights(
                {n: w * (1 + number / 4) for n, w in worker.export_weights().items()}
            )
        losses = held_out_losses(rows, built, device="cpu", seed=0, deadline_s=None)
        assert losses["loss"] == pytest.approx(by_hand(job, built), abs=1e-6)
        assert list(losses) == (["loss"] if kind == "sft" else ["loss", "loss/accuracy"])


ANSWERED = ["task=chain_sum", "task.num_train=200", "task.num_held_out=8"]


@pytest.mark.slow
def test_the_loss_is_measured_beside_accuracy(tmp_path: Path) -> None:
    job = made_ready("sft", *ANSWERED, "algorithm.per_step.demos=16")
    assert [suite.name for suite in job.suites] == [WHOLE]
    assert "evaluations ask" not in str(statistics(job))
    inner = Evaluator(job.suites, 4, tmp_path, job.main)
    assert job.held_out_rows is not None
    evaluator = HeldOutLoss(job.held_out_rows, inner, one_group(job.held_out_rows.graph))
    workers = {**worker_specs(job.main, job, {}), **inner.workers}
    graph = job.main.graph
    with Engine(graph, one_group(graph), workers=workers, also=evaluator.programs) as engine:
        found = evaluator.measure(engine)[WHOLE]
    assert [*found.values] == ["accuracy", "loss"]
    assert found.values["loss"] == pytest.approx(2.9, abs=0.5)


@pytest.mark.parametrize(
    "words",
    [["algorithm=grpo", *ANSWERED], ["algorithm=sft", *KINDS["sft"], *FILE, "task.num_held_out=0"]],
)
def test_where_there_is_nothing_held_out_to_learn_from_there_is_no_loss(words: list[str]) -> None:
    composed = compose("run", words)
    composed.pop("resume")
    assert prepare(resolved(composed)).held_out_rows is None


@pytest.mark.slow
def test_the_lowest_loss_is_the_best_one(tmp_path: Path) -> None:
    kept = Evaluations(tmp_path)
    for step, loss in enumerate([3.0, 2.0, 1.0, 1.5, 1.25]):
        kept.write(step, {WHOLE: Measured({}, losses={"loss": loss, "loss/accuracy": 0.5})})
    assert (kept.best("loss"), kept.without_improvement("loss")) == (2, 2)
    assert measured_text(WHOLE, kept.read(2)[WHOLE]) == "held out: loss 1, loss/accuracy 0.5"
    made_ready("sft", *FILE, "evaluation.every=1", "evaluation.keep_best=loss")
    with pytest.raises(ConfigError, match="what is: loss"):
        made_ready("sft", *FILE, "evaluation.every=1", "evaluation.keep_best=accuracy")


@pytest.mark.slow
def test_rows_that_do_not_fill_a_step_and_problems_not_asked_are_said() -> None:
    job = made_ready("sft", *FILE)
    (note,) = [note for report in job.reports for note in report.notes]
    assert note == (
        "demonstrations of task 'chats': an epoch trains on 32 of 39 demonstrations; the other 7 "
        "do not fill a step, and each epoch leaves out others"
    )
    assert first_notes(job) == [
        "evaluations measure the loss alone, and no accuracy: reward 'exact_match' compares with "
        "the answer, but 'chats.jsonl' is read without one",
        note,
    ]
    assert first_notes(made_ready("sft", *FILE, "evaluation.num_prompts=0")) == [note]
    (line,) = statistics(job)
    assert line.startswith("demonstrations of task 'chats': 51 rows (12 held out), 0.0% left out;")
    job = made_ready("sft", *ANSWERED, "evaluation.num_prompts=3")
    assert (
        statistics(job)[-1] == "evaluations ask 3 of 8 held-out problems (evaluation.num_prompts)"
    )


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    connect_ray()
    yield
    shutdown_ray()


@pytest.mark.nightly
@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize(
    "words",
    [
        ["engine=fsdp", "rollout=torch", "executor=ray", "executor.groups.all=2"],
        ["engine=megatron", "rollout=torch", "executor=ray", "executor.groups.all=2"],
        ["executor=ray", "executor.groups.all=2"],
    ],
    ids=["fsdp", "megatron", "torch"],
)
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_every_engine_and_number_of_ranks_measures_the_same_loss(
    kind: str, words: list[str], tmp_path: Path
) -> None:
    common = ["run", f"algorithm={kind}", *KINDS[kind], *FILE, "algorithm.num_steps=2"]
    found: list[list[float]] = []
    for number, others in enumerate(([], words)):
        runs = tmp_path / str(number)  # Ray's processes have another working directory
        assert main([*common, f"runs={runs}", "tracker=none", *others]) == 0
        (folder,) = runs.iterdir()
        found.append([*Evaluations(folder).curve("loss").values()])
    assert len(found[0]) == 2
    assert found[0] == pytest.approx(found[1], abs=2e-4)


@pytest.mark.slow
def test_a_policy_that_is_its_reference_tells_no_pair_apart() -> None:
    job = made_ready("dpo", *FILE)
    rows, specs = job.held_out_rows, dict[str, Any](worker_specs(job.main, job, {}))
    assert rows is not None
    # Two ways of batching round differently.
    specs["ref"] = replace(specs["ref"], micro_batch_tokens=10)
    built = {role: spec.build(WorkerContext(role)) for role, spec in specs.items()}
    losses = held_out_losses(rows, built, device="cpu", seed=0, deadline_s=None)
    assert losses["loss/accuracy"] == 0
