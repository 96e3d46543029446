"""What each view of the page says of real files, of damaged ones, and of files that are gone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from .conftest import Ask
from .folders import add_samples, add_steps, new_run, row, value_at, write_many_steps

HTML = '<script>document.title = "ran"</script><img src=x onerror="alert(1)">&amp;'


def test_a_curve_and_what_is_added_to_it(runs: Path, ask: Ask) -> None:
    run = new_run(runs)
    add_steps(run.path, range(5))
    keys = {"run": run.id, "metric": ["reward/mean", "train/loss"]}
    assert ask("metrics", run=run.id)["metrics"] == ["reward/mean", "run/lag_max", "train/loss"]
    curve = ask("curve", **keys)
    assert curve["steps"] == [0, 1, 2, 3, 4]
    assert curve["columns"]["reward/mean"] == [value_at(step) for step in range(5)]
    seen = {"offset": curve["offset"], "mark": curve["mark"]}
    assert ask("more", **keys, **seen)["steps"] == []
    add_steps(run.path, range(3, 5))
    assert ask("more", **keys, **seen) == {"again": True}
    assert ask("curve", **keys, from_=1, to=3)["steps"] == [1, 2, 3]


def test_a_long_run_is_sampled_and_zoomed_into(runs: Path, ask: Ask) -> None:
    run = new_run(runs)
    write_many_steps(run.path, 10_000)
    curve = ask("curve", run=run.id, metric="reward/mean", points=200)
    assert len(curve["steps"]) <= 201
    assert not curve["is_whole"]
    zoomed = ask("curve", run=run.id, metric="reward/mean", points=200, from_=5000, to=5100)
    assert zoomed["steps"] == list(range(5000, 5101))
    assert zoomed["is_whole"]


def test_a_stage_has_files_of_its_own(runs: Path, ask: Ask) -> None:
    run = new_run(runs)
    run.stage("sft").path.mkdir(parents=True)
    add_steps(run.stage("sft").path, range(2))
    assert ask("curve", run=run.id, stage="sft", metric="train/loss")["steps"] == [0, 1]
    assert ask("curve", run=run.id, metric="train/loss")["error"] == "metrics.jsonl: there is none"


@pytest.mark.parametrize("value", ["-1", "x", "1.5", "9" * 40, "١"])
def test_a_number_that_is_none_is_said(runs: Path, ask: Ask, value: str) -> None:
    run = new_run(runs)
    add_steps(run.path, range(2))
    said = ask("curve", run=run.id, metric="train/loss", from_=value)
    assert said["error"] == "'from': expected a whole number of at least 0"


def test_too_many_keys_are_refused(runs: Path, ask: Ask) -> None:
    run = new_run(runs)
    assert "cannot be read" in ask("curve", run=run.id, metric=["m"] * 100)["error"]


def test_samples_are_found_sorted_and_paged(runs: Path, ask: Ask) -> None:
    run = new_run(runs)
    rows = [row(f"{i}+1=", "x" * i, i / 10, advantage=-i, finished=i < 3) for i in range(5)]
    rows.append({**row("Zebra=", "striped", 0.0), "reward": None})
    add_samples(run.path, 7, rows)
    add_samples(run.path, 3, rows[:1])
    assert ask("steps", run=run.id)["steps"] == [3, 7]

    def rewards(**keys: object) -> list[float | None]:
        return [one["reward"] for one in ask("samples", run=run.id, step=7, **keys)["samples"]]

    assert rewards() == [0.0, 0.1, 0.2, 0.3, 0.4, None]
    assert rewards(sort="reward") == [0.4, 0.3, 0.2, 0.1, 0.0, None]
    assert rewards(sort="reward", worst=1) == [0.0, 0.1, 0.2, 0.3, 0.4, None]
    assert rewards(sort="length", limit=2) == [None, 0.4]
    assert rewards(sort="advantage", skip=1, limit=2) == [0.1, 0.2]
    assert rewards(search="ZEBRA") == [None]
    assert rewards(search="xxx") == [0.3, 0.4]
    assert ask("samples", run=run.id, step=7, search="xxx", limit=1)["num_found"] == 2
    said = ask("samples", run=run.id, step=4)["error"]
    assert "has no samples of step 4; it has some of 2: 3 to 7" in said


def test_text_is_handed_on_as_it_is(runs: Path, ask: Ask) -> None:
    run = new_run(runs)
    turns = [{"said": HTML, "reward": 0.5, "shown": "ok"}, {"said": "b", "reward": 0, "shown": ""}]
    add_samples(run.path, 0, [row(HTML, HTML, 1.0, turns=turns, style=0.25)])
    (sample,) = ask("samples", run=run.id, step=0)["samples"]
    assert (sample["prompt"], sample["response"]) == (HTML, HTML)
    assert [turn["said"] for turn in sample["turns"]] == [HTML, "b"]
    assert sample["parts"] == {"rule.score": 1.0, "style": 0.25}
    assert len(ask("samples", run=run.id, step=0, search="OK")["samples"]) == 1


def test_a_long_response_is_cut_and_says_so(runs: Path, ask: Ask) -> None:
    run = new_run(runs)
    add_samples(run.path, 0, [row("p", "y" * 300_000, 1.0)])
    (sample,) = ask("samples", run=run.id, step=0)["samples"]
    assert sample["response"].endswith("y\n[100000 more characters]")


def test_numbers_that_json_has_no_word_for_are_none(runs: Path, ask: Ask) -> None:
    run = new_run(runs)
    add_samples(run.path, 0, [row("p", "r", float("nan")), row("p", "s", 1.0)])
    found = ask("samples", run=run.id, step=0, sort="reward")["samples"]
    assert [one["reward"] for one in found] == [1.0, None]


def test_a_prompt_is_compared_between_steps_and_runs(runs: Path, ask: Ask) -> None:
    one, other = new_run(runs), new_run(runs, "other")
    add_samples(one.path, 0, [row("q", "the cat sat", 0.0), row("only here", "x", 1.0)])
    add_samples(one.path, 5, [row("q", "the dog sat down", 1.0), row("q", "the", 0.5)])
    add_samples(other.path, 9, [row("q", "the cat sat", 0.0)])
    which = {"run": one.id, "step": 0, "number": 0}
    found = ask("elsewhere", **which)
    assert found == {"steps": [0, 5], "num_read": 2, "num_steps": 2}
    assert ask("elsewhere", **which, run2=other.id)["steps"] == [9]
    said = ask("diff", **which, run2=one.id, step2=5)
    assert said["others"] == [{"number": 0, "reward": 1.0}, {"number": 1, "reward": 0.5}]
    both = ["both", " sat"]
    assert said["segments"] == [
        ["both", "the "], ["left", "cat"], ["right", "dog"], both, ["right", " down"]
    ]  # fmt: skip
    assert ask("diff", **which, run2=one.id, step2=5, number2=1)["right"]["reward"] == 0.5
    assert ask("diff", **which, run2=other.id, step2=9)["segments"] == [["both", "the cat sat"]]
    only = {**which, "number": 1}
    assert (
        ask("diff", **only, run2=one.id, step2=5)["error"] == "step 5 has no sample of this prompt"
    )
    assert ask("diff", **{**which, "number": 9}, run2=one.id, step2=5)["gone"]
    wrong = ask("diff", **only, run2=one.id, step2=0, number2=0)
    assert wrong["error"] == "the two samples answer different prompts"


def test_a_run_without_samples_says_why(runs: Path, ask: Ask) -> None:
    run = new_run(runs)
    assert "samples.max_rows=0" in ask("steps", run=run.id)["error"]


def test_damaged_samples_are_said(runs: Path, ask: Ask) -> None:
    run = new_run(runs)
    add_samples(run.path, 0, [row("p", "r", 1.0)])
    (run.path / "samples" / "step-000000.jsonl.gz").write_bytes(b"no gzip")
    assert "cannot be read (BadGzipFile" in ask("samples", run=run.id, step=0)["error"]
    add_samples(run.path, 0, [{**row("p", "r", 1.0), "parts": {"a": []}}])
    assert "cannot be read" in ask("samples", run=run.id, step=0)["error"]


def test_a_run_that_is_removed_while_it_is_shown_says_so(runs: Path, ask: Ask) -> None:
    run = new_run(runs)
    add_steps(run.path, range(3))
    curve = ask("curve", run=run.id, metric="train/loss")
    shutil.rmtree(run.path)
    for view in ("curve", "more", "overview", "timeline", "steps"):
        said = ask(view, run=run.id, offset=curve["offset"], mark=curve["mark"])
        assert said["error"] == "this run is no longer there: its folder was removed or renamed"
    assert ask("runs")["runs"] == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name",
    [
        *("summary.json", "plan.json", "metrics.jsonl", "trace.json", "events.jsonl", "graph.svg"),
        *("evaluations/step-00000002.json", "samples/step-000000.jsonl.gz", ".lock"),
    ],
)
@pytest.mark.parametrize("kind", ["FIFO", "device"])
def test_no_view_waits_for_what_is_no_file(runs: Path, ask: Ask, name: str, kind: str) -> None:
    bad, good = new_run(runs, "bad"), new_run(runs, "good")
    add_steps(good.path, range(3))
    path = bad.path / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    assert {one["key"] for one in ask("runs")["runs"]} == {bad.id, good.id}
    for view in ("metrics", "curve", "overview", "timeline", "steps", "samples"):
        ask(view, run=bad.id, metric="train/loss", step=0)
    assert ask("curve", run=good.id, metric="train/loss")["steps"] == [0, 1, 2]
