"""`penstock plan` asked for more: other pins, fewer nodes, better hardware, runs, and costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from penstock.dataflow.runtime.messages import TaskSpan
from penstock.launch.run_dir.step_logs import TraceLog
from penstock.planner.plan.plan import Plan

from ..conftest import Penstock

SMALL = ("algorithm=sft", "model=qwen2.5-1.5b", "cluster=h100")


def asked(penstock: Penstock, *words: str) -> dict[str, Any]:
    said = penstock("plan", "--json", *SMALL, *words)
    assert said.code == 0, said.err
    return json.loads(said.out)


def refused(penstock: Penstock, *words: str) -> str:
    said = penstock("plan", *SMALL, *words)
    assert (said.code, said.out) == (2, ""), said
    return said.err.removeprefix("penstock: ").rstrip("\n")


def test_a_plan_says_what_it_costs(penstock: Penstock) -> None:
    found = asked(penstock, "algorithm.num_steps=50")
    hours = 8 * found["step_time_s"] / 3600
    assert found["device_hours_per_step"] == pytest.approx(hours)
    assert (found["num_steps"], found["device_hours"]) == (50, pytest.approx(50 * hours))


@pytest.mark.slow
def test_other_pins_are_compared_with_the_plan(penstock: Penstock) -> None:
    Path("tp.yaml").write_text("layouts: {actor.train: {tp: 2}}\n")
    Path("stages.yaml").write_text("layouts:\n  actor.train: {pp: 4}\n")
    said = penstock("plan", *SMALL, "plan.compare=[tp.yaml, stages.yaml]", "json=out.json")
    assert said.code == 0, said.err
    found = json.loads(Path("out.json").read_text())
    plans = found["compare"]["plans"]
    assert [one["name"] for one in plans] == ["this plan", "tp.yaml", "stages.yaml"]
    assert plans[0]["step_time_s"] == found["step_time_s"]
    assert min(plans, key=lambda one: one["step_time_s"])["name"] == "this plan"
    below = said.out[said.out.index("what if\n") :]
    assert "\n\nslowest calls that differ\n" in below
    assert ", tp2 " in below
    assert ", pp4 " in below


@pytest.mark.slow
def test_a_file_takes_the_place_of_the_pins(penstock: Penstock) -> None:
    Path("tp.yaml").write_text("layouts: {actor.train: {tp: 2}}\n")
    found = asked(penstock, "plan.pins.layouts.actor.train.pp=4", "plan.compare=[tp.yaml]")
    assert found["nodes"]["actor.train"]["layout"]["pp"] == 4
    alone = asked(penstock, "plan.pins.layouts.actor.train.tp=2")
    assert found["compare"]["plans"][1]["step_time_s"] == alone["step_time_s"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "'plan.compare': 'pins.yaml' cannot be read: No such file or directory"),
        ("",
         "'plan.compare': 'pins.yaml': expected keys of plan.pins, got null\n    its keys are: "
         "together, apart, num_devices, devices, layouts, num_processes, acting"),
        ("a: [",
         "'plan.compare': 'pins.yaml' is no YAML file: while parsing a flow node expected the "
         'node content, but found \'<stream end>\' in "pins.yaml", line 1, column 5'),
        ("layots: {}",
         "'plan.compare': 'pins.yaml':\nthere is no key 'plan.pins.layots'; did you mean "
         "'plan.pins.layouts'?\n    plan.pins has: together, apart, num_devices, devices, layouts, "
         "num_processes, acting"),
        ("together: [[actor, critic]]",
         "'plan.compare': 'pins.yaml':\n'plan.pins.together' names a call group 'critic', which "
         "the step does not have\n    its call groups are: actor"),
        ("together: 2026-01-01",
         "'plan.compare': 'pins.yaml':\n'plan.pins.together': expected a list, got the text "
         "'2026-01-01'\n    together: Lists of call groups that share a group."),
    ],
)  # fmt: skip
def test_a_file_that_has_no_pins(penstock: Penstock, text: str | None, message: str) -> None:
    if text is not None:
        Path("pins.yaml").write_text(text)
    assert refused(penstock, "plan.compare=[pins.yaml]") == message


def test_a_value_inside_itself_is_no_pin(penstock: Penstock) -> None:
    Path("pins.yaml").write_text("together: &a [*a]\n")
    assert refused(penstock, "plan.compare=[pins.yaml]") == (
        "'pins.yaml': a value contains itself; write it out"
    )


def test_a_folder_of_no_run(penstock: Penstock) -> None:
    assert refused(penstock, "plan.compare=[.]") == (
        "'plan.compare': '.' is no folder of a run that followed a plan\n    give runs/ID of a run "
        "with placement=..., or a YAML file with the keys of plan.pins"
    )


def run_of(penstock: Penstock, *, num_steps: int) -> Path:
    """A folder with the plan of a run, and the trace of steps that took twice what it says."""
    said = penstock("plan", *SMALL, "output=plan.json")
    assert said.code == 0, said.err
    folder = Path("run")
    folder.mkdir()
    Path("plan.json").rename(folder / "plan.json")
    prediction = Plan.read(folder / "plan.json").prediction
    assert prediction is not None
    with TraceLog(folder / "trace.json") as trace:
        for step in range(num_steps):
            start_s = 1e9 + 2 * prediction.step_time_s * step
            end_s = start_s + 2 * prediction.step_time_s
            first = TaskSpan("actor.train", step, None, "all", 0, start_s, end_s - 1e-3)
            trace.write([first, replace(first, rank=1, start_s=start_s + 1e-3, end_s=end_s)])
    return folder


@pytest.mark.slow
def test_a_run_is_compared_with_its_plan(penstock: Penstock) -> None:
    folder = run_of(penstock, num_steps=4)
    said = penstock("plan", *SMALL, f"plan.compare=[{folder}]", "json=a.json", "html=a.html")
    assert said.code == 0, said.err
    this, run = json.loads(Path("a.json").read_text())["compare"]["plans"]
    assert run["name"] == "run"
    assert run["step_time_s"] == pytest.approx(2 * this["step_time_s"], rel=1e-5)
    assert run["placement"] == this["placement"]
    page = ElementTree.fromstring(Path("a.html").read_text().partition("\n")[2])
    (chart,) = [e for e in page.iter() if e.get("id") == "gantt-1"]
    (bar,) = [g for g in chart.iter("g") if g.get("data-node") == "actor.train"]
    assert float(bar.attrib["data-end-s"]) == pytest.approx(run["step_time_s"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_steps", "words", "messages"),
    [
        (1, (), ["'run' has made no two steps yet\n    wait for it, or take another run"]),
        (2, ("algorithm=dpo",),
         ["'run':\nthe plan was made for another version of dpo: its graph is "]),
        (2, ("workload.response=7",),
         ["'run' is a run with other rows or tokens: planned for ",
          " + 7 tokens\n    give this step the run's: workload.prompt=..., "]),
    ],
    ids=["hardly begun", "another step", "other sizes"],
)  # fmt: skip
def test_a_run_that_cannot_be_compared(
    penstock: Penstock, num_steps: int, words: tuple[str, ...], messages: list[str]
) -> None:
    folder = run_of(penstock, num_steps=num_steps)
    said = refused(penstock, *words, f"plan.compare=[{folder}]")
    assert said.startswith(f"'plan.compare': {messages[0]}")
    assert messages[-1] in said


def test_pins_under_which_nothing_fits_name_their_file(penstock: Penstock) -> None:
    Path("alone.yaml").write_text("layouts: {actor.train: {dp: 8, zero: 0}}\n")
    said = refused(penstock, "model=llama-34b", "plan.compare=[alone.yaml]", "json=out.json")
    assert said == (
        "'plan.compare': 'alone.yaml':\n'actor' has no legal layout on cluster 'h100': on none of "
        "the 8 meshes that a group can have does the table offer a way to run it that the pins "
        "and the number of rows allow\n    a train call has as many rows on every rank: change the "
        "pins, the devices, or the prompts of a step"
    )
    assert json.loads(Path("out.json").read_text())["reason"] == said


@pytest.mark.slow
def test_the_fewest_nodes_that_are_fast_enough(penstock: Penstock) -> None:
    words = ("cluster.num_nodes=3", "workload.num_prompts=768")
    times = {
        one["name"]: one["step_time_s"]
        for one in asked(penstock, *words, "plan.target_s=1000")["target_s"]["plans"]
    }
    assert list(times) == ["1 node", "2 nodes", "3 nodes"]
    assert times["1 node"] > times["2 nodes"] > times["3 nodes"]
    target_s = (times["1 node"] + times["2 nodes"]) / 2
    found = asked(penstock, *words, f"plan.target_s={target_s}")
    assert found["target_s"]["base"] == "2 nodes"
    assert found["cluster"]["num_devices"] == 16
    assert found["step_time_s"] == times["2 nodes"]
    answer = found["target_s"]["answer"]
    assert answer.startswith("2 nodes (16 devices) is the least of these that makes a step in ")


def test_a_time_that_no_size_reaches(penstock: Penstock) -> None:
    said = penstock("plan", *SMALL, "cluster.num_nodes=2", "plan.target_s=0.001")
    assert said.code == 0, said.err
    assert said.out.startswith("plan of sft on h100: 2 nodes x 8 h100 = 16 devices")
    last = said.out.rstrip("\n").splitlines()[-1]
    assert last.startswith("  none makes a step in 1.00 ms: the fastest, 2 nodes, takes ")


@pytest.mark.slow
def test_sizes_that_are_too_small_say_why(penstock: Penstock) -> None:
    words = ("model=llama-34b", "cluster.num_nodes=2", "cluster.devices_per_node=4")
    said = penstock("plan", *SMALL, *words, "plan.target_s=1000")
    assert said.code == 0, said.err
    assert "  1 node " in said.out
    assert "no plan: 'actor' fits nowhere on cluster 'h100'." in said.out
    said = penstock("plan", *SMALL, "model=llama-70b", "plan.target_s=9")
    assert said.code == 2
    assert "the cheapest change that makes it fit: " in said.err


def test_what_better_hardware_gives(penstock: Penstock) -> None:
    found = asked(penstock, "plan.sensitivity=true")["sensitivity"]
    this, *better = found["plans"]
    assert [one["name"] for one in better] == [
        "2 x device memory", "2 x bandwidth of device memory", "2 x peak flops",
        "2 x bandwidth within nodes", "2 x devices",
    ]  # fmt: skip
    assert all(one["step_time_s"] <= this["step_time_s"] * (1 + 1e-9) for one in better)
    assert found["answer"].startswith("most is gained by 2 x ")


@pytest.mark.slow
def test_all_questions_are_answered_at_once(penstock: Penstock) -> None:
    Path("tp.yaml").write_text("layouts: {actor.train: {tp: 2}}\n")
    words = ("plan.compare=[tp.yaml]", "plan.target_s=1000", "plan.sensitivity=true")
    said = penstock("plan", *SMALL, "cluster.num_nodes=2", *words, "html=plan.html")
    assert said.code == 0, said.err
    titles = ("\nnodes for a step in 1,000 s\n", "\nwhat if\n", "\nwhat better hardware gives\n")
    at = [said.out.index(title) for title in titles]
    assert at == sorted(at)
    page = Path("plan.html").read_text()
    for key in ("target_s", "compare", "sensitivity", "gantt-1"):
        assert f'id="{key}"' in page
