"""What the page says of real files, of damaged ones, and of files and runs that are gone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.launch.run_dir.run_folder import RunFolder, record_of, state_of
from penstock.launch.run_dir.samples import SaidTurn, Sample
from penstock.launch.run_dir.step_logs import EVENTS, EventLog
from penstock.launch.watch.log_files import Gone
from penstock.launch.watch.pages import KnownRuns, differing, home_of, spoken

from .conftest import Ask
from .folders import add_samples, add_steps, new_run, row, value_at, write_many_steps

HTML = '<script>document.title = "ran"</script><img src=x onerror="alert(1)">&amp;'


def test_a_curve_and_what_is_added_to_it(runs: Path, ask: Ask) -> None:
    run = new_run(runs)
    add_steps(run.path, range(5))
    keys = {"run": run.id, "metric": ["reward/mean", "train/loss"]}
    named = ask("metrics", run=[new_run(runs, "empty").id, run.id])
    assert named["titles"] == {
        "reward/mean": "Reward", "run/lag_max": "Lag max", "train/loss": "Loss: train"
    }  # fmt: skip
    assert named["topics"] == [
        {"title": "Reward", "lines": {"reward/mean": ""}},
        {"title": "Loss", "lines": {"train/loss": "train"}},
    ]
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
    for view in ("curve", "more", "run", "timeline", "steps"):
        said = ask(view, run=run.id, offset=curve["offset"], mark=curve["mark"])
        assert said["error"] == "this run is no longer there: its folder was removed or renamed"
    assert ask("runs")["runs"] == []


@pytest.mark.slow
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
    for view in ("metrics", "curve", "run", "timeline", "steps", "samples"):
        ask(view, run=bad.id, metric="train/loss", step=0)
    assert ask("curve", run=good.id, metric="train/loss")["steps"] == [0, 1, 2]


_HOLD = """
import sys
from pathlib import Path
from penstock.launch.run_dir.run_folder import RunFolder
with RunFolder(Path(sys.argv[1])).locked():
    print("held", flush=True)
    sys.stdin.read()
"""


def states(runs: Path) -> dict[str, str]:
    return {line["key"]: line["state"] for line in KnownRuns([], runs).listed()}


def test_a_run_goes_on_as_long_as_its_lock_is_held(runs: Path) -> None:
    run = new_run(runs)
    assert state_of(record_of(run)) == "not running"
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(run.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert [state_of(record_of(run)) for _ in range(3)] == ["running"] * 3
        process.kill()
    assert state_of(record_of(run)) == "not running"
    with run.locked():  # asking has left nothing that is in a run's way
        pass


def test_how_a_run_ended(runs: Path) -> None:
    done, ended, damaged = (new_run(runs, name) for name in ("done", "ended", "damaged"))
    done.write_summary({"num_steps": 3})
    ended.write_summary({"stopped": "accuracy did not improve"})
    damaged.about.write_text("{")
    assert states(runs) == {done.id: "finished", ended.id: "stopped", damaged.id: "damaged"}
    done.set_summary_aside()  # as a resumed run does
    assert states(runs)[done.id] == "not running"


def test_every_state_has_a_reason(runs: Path, ask: Ask) -> None:
    run = new_run(runs)
    (line,) = ask("runs")["runs"]
    assert (line["key"], line["name"], line["seed"], line["stages"]) == (run.id, "grpo", 3, [])
    assert line["why"].endswith("penstock run resume=FOLDER goes on with it")
    run.about.write_text("[]")
    (line,) = ask("runs")["runs"]
    assert line["why"].startswith("run.json cannot be read")


def test_given_runs_are_kept_when_they_are_gone_and_all_others_are_not_shown(runs: Path) -> None:
    run, _ = new_run(runs), new_run(runs, "other")
    known = KnownRuns([run.path], runs)
    assert [line["key"] for line in known.listed()] == [run.id]
    shutil.rmtree(run.path)
    assert [line["state"] for line in known.listed()] == ["gone"]
    with pytest.raises(Gone, match="no longer there"):
        known.folder(run.id)


def test_runs_that_come_and_go_are_seen(runs: Path) -> None:
    known = KnownRuns([], runs)
    assert known.listed() == []
    run = new_run(runs)
    assert list(known.found()) == [run.id]
    shutil.rmtree(runs)
    assert known.listed() == []


def test_two_runs_of_one_name_have_two_keys(tmp_path: Path) -> None:
    folders = [RunFolder(tmp_path / name / "one").path for name in ("a", "b")]
    assert list(KnownRuns(folders, tmp_path).found()) == ["one", "one (2)"]


def test_a_run_is_read_again_only_when_it_has_changed(runs: Path) -> None:
    run, known = new_run(runs), KnownRuns([], runs)
    assert known.record(run) is known.record(run)
    before = known.record(run)
    run.write_summary({"num_steps": 1})
    assert before.summary is None
    assert known.record(run).summary == {"num_steps": 1}


@pytest.mark.parametrize("stage", ["..", "../..", "sft/..", "/etc", ".", "other", "\0"])
def test_a_stage_is_one_of_the_runs_own(runs: Path, stage: str) -> None:
    run = new_run(runs)
    run.stage("sft").path.mkdir(parents=True)
    assert run.stage_names == ["sft"]
    assert home_of(run, "sft") == run.path / "stages" / "sft"
    with pytest.raises(Gone, match="no such stage"):
        home_of(run, stage)


@pytest.mark.parametrize("key", ["..", "../runs", ".", "", "/", "x" * 300, "a\0b", "%2e%2e"])
def test_a_key_is_never_a_path(runs: Path, ask: Ask, key: str) -> None:
    run = new_run(runs)
    add_steps(run.path, range(3))
    for view in ("curve", "metrics", "more", "steps", "samples", "run", "timeline"):
        said = ask(view, run=key, metric="reward/mean")
        assert said["gone"]
        assert "no longer there" in said["error"]


def test_a_run_that_has_not_begun_says_what_is_missing(runs: Path, ask: Ask) -> None:
    run = new_run(runs, plan={"groups": [{"name": "all"}]})
    said = ask("run", run=run.id)
    assert said["about"]["state"] == "not running"
    assert (said["about"]["seed"], said["about"]["code"]) == (3, "0.1.0 (abc)")
    absent = {name: part["absent"] for name, part in said.items() if "absent" in part}
    assert absent == {
        "results": "there is no summary.json: it is written at the end",
        "suites": "they are compared at the end",
        "warnings": "it has warned of nothing",
        "memory": "its plan was not predicted, and what was used is written at the end",
    }


def test_everything_its_files_hold(runs: Path, ask: Ask) -> None:
    run = new_run(runs)
    add_steps(run.path, range(3))
    suites = {"": {"before": {"accuracy": 0.25}, "after": {"accuracy": 0.5}}}
    run.write_summary({"num_steps": 3, "suites": suites, "peak_memory_bytes": 600, "resumed": True})
    said = ask("run", run=run.id)
    assert said["placement"]["groups"] == [{"name": "all"}]
    assert said["suites"] == suites
    assert said["events"]["resumed"] is True
    assert said["results"] == {"num_steps": 3, "peak_memory_bytes": 600, "resumed": True}
    assert said["memory"]["peak_memory_bytes"] == 600
    group = said["memory"]["groups"]["all"]
    assert (group["peak_bytes"], group["capacity_bytes"]) == (350, 1000)
    assert group["resident_bytes"] == {"actor": 300}


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"x"', "[" * 10_000])
@pytest.mark.parametrize("name", ["plan.json", "summary.json", "run.json", "metrics.jsonl"])
def test_no_damaged_file_ends_the_page(runs: Path, ask: Ask, name: str, text: str) -> None:
    run = new_run(runs)
    (run.path / name).write_text(text)
    for view in ("run", "timeline", "runs", "metrics"):
        assert isinstance(ask(view, run=run.id), dict)


@pytest.mark.parametrize(
    "plan",
    [
        {"prediction": 3},
        {"prediction": {"memory": 3, "nodes": [], "step_time_s": "x"}},
        {"prediction": {"memory": {"all": None}, "nodes": {"a": 3}}},
        {"prediction": {"memory": {"all": {"resident_bytes": {"a": 3}}}}},
        {"groups": 3, "nodes": 3},
    ],
)
def test_no_damaged_plan_ends_the_page(runs: Path, ask: Ask, plan: dict[str, Any]) -> None:
    run = new_run(runs)
    run.plan.write_text(json.dumps(plan))
    said = ask("run", run=run.id)
    assert said["about"]["name"] == "grpo"
    assert isinstance(ask("timeline", run=run.id), dict)


def test_what_a_run_warned_of_comes_with_what_to_do(runs: Path, ask: Ask) -> None:
    run = new_run(runs)
    assert ask("run", run=run.id)["warnings"] == {"absent": "it has warned of nothing"}
    sign = {"kind": "cut_off", "node": "a.b", "seen": "all", "means": "bad", "remedy": "more"}
    log = EventLog(run.path / EVENTS)
    for step in range(60):
        log.write({**sign, "first_step": step - 2, "step": step})
    said = ask("run", run=run.id)["warnings"]
    assert (len(said["rows"]), said["num_warnings"]) == (50, 60)
    assert said["rows"][-1] == {
        "stage": "",
        "node": "a.b",
        "seen": "all",
        "means": "bad",
        "remedy": "more",
        "first_step": 57,
        "step": 59,
    }
    (run.path / EVENTS).write_text("{\n")
    assert "expected a JSON object" in ask("run", run=run.id)["warnings"]["absent"]


TEXTS = st.text(alphabet=st.sampled_from("ab \n.<>é"), max_size=60)


@given(TEXTS, TEXTS)
def test_the_pieces_make_both_texts(left: str, right: str) -> None:
    pieces = differing(left, right)
    assert "".join(text for who, text in pieces if who != "right") == left
    assert "".join(text for who, text in pieces if who != "left") == right
    assert all(text for _, text in pieces)


def test_equal_texts_are_one_piece() -> None:
    assert differing("a b\n", "a b\n") == [("both", "a b\n")]
    assert differing("", "") == []


def test_long_texts_are_compared_by_lines() -> None:
    left = "".join(f"line {i} of it\n" for i in range(1500))
    pieces = differing(left, left.replace("line 700 ", "row 700 "))
    assert [who for who, _ in pieces] == ["both", "left", "right", "both"]
    assert [text for who, text in pieces if who != "both"] == [
        "line 700 of it\n",
        "row 700 of it\n",
    ]


def test_a_conversation_is_what_was_said_and_shown() -> None:
    turns = (SaidTurn("ask", 0.0, "answer\n"), SaidTurn("end", 1.0, ""))
    assert spoken(Sample(0, 0, "p", "r", 1, turns=turns)) == "ask\nanswer\nend"
    assert spoken(Sample(0, 0, "p", "r", 1)) == "r"
