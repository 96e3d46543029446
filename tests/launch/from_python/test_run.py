"""Runs and plans from Python: they are those of the commands, and are read as tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from bdb import BdbQuit
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import penstock as package
import pytest
from IPython.core.formatters import DisplayFormatter
from penstock.algorithms.grpo import grpo_step
from penstock.dataflow.errors import ConfigError, WorkerError
from penstock.launch.from_python.handle import RunHandle
from penstock.launch.run_dir.failures import left_debugger
from penstock.launch.run_dir.run_folder import create_run
from penstock.launch.run_dir.step_logs import read_metrics
from penstock.workers.data.reasoning_task import ReasoningTaskSpec

from ..cli.test_run import GRPO, only_run, summary_of
from ..conftest import Penstock

__all__ = ["ReasoningTaskSpec"]

LENGTH = "algorithm.cfg.sampling.max_new_tokens=5"
HTML_MIME, SVG_MIME = "text/html", "image/svg+xml"


def displayed(thing: object) -> dict[str, Any]:
    """What IPython shows of an object, by type."""
    found, _ = DisplayFormatter().format(thing)
    return found


class Tags(HTMLParser):
    """Names of the elements that a page really has."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)


def tags(page: str) -> list[str]:
    reader = Tags()
    reader.feed(page)
    return reader.found


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.mark.slow
def test_a_run_is_that_of_the_command(here: Path, penstock: Penstock) -> None:
    made = package.run(*GRPO, seed=3)
    assert penstock("run", *GRPO, "seed=3", "runs=others").code == 0
    typed = only_run(Path("others"))
    assert made.summary["weights_sha256"] == summary_of(typed)["weights_sha256"]
    assert (made.id, made.state) == (only_run().name, "finished")
    assert made.config["algorithm"] == package.open_run(typed).config["algorithm"]
    assert made.graph.name == "grpo"
    assert made.plan.groups[0].num_ranks == 1

    metrics = made.metrics
    assert list(metrics.index) == [0, 1, 2, 3]
    rows = read_metrics(made.folder / "metrics.jsonl")
    name = "reward.score/reward/mean"
    assert metrics[name].tolist() == [row[name] for row in rows]
    assert made.stage("sft").metrics.shape[0] == 3

    samples = made.samples(step=2)
    assert len(samples) == 16
    assert {"prompt", "response", "reward", "advantage"} <= set(samples.columns)
    assert set(made.samples()["step"]) == {0, 1, 2, 3}

    shown = displayed(made)[HTML_MIME]
    assert made.id in shown
    assert {"table", "svg"} <= set(tags(shown))
    assert ElementTree.fromstring(displayed(made.curve(name))[SVG_MIME]).tag.endswith("svg")
    assert ElementTree.fromstring(displayed(made.graph)[SVG_MIME]).tag.endswith("svg")
    with pytest.raises(ConfigError, match="has no stage 'stf'; did you mean 'sft'"):
        made.stage("stf")

    longer = package.run(resume=made.folder, algorithm={"num_steps": 5})
    assert longer.folder == made.folder
    assert len(longer.metrics) == 5


def own_step(*arguments: Any, **more: Any) -> Any:
    """Replaced by the test: the name is what counts."""


@pytest.mark.slow
def test_a_step_of_the_program_itself_is_run_here_and_refused_elsewhere(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = ModuleType("__main__")  # as a notebook's: without a file
    main.__dict__["own_step"] = grpo_step
    monkeypatch.setitem(sys.modules, "__main__", main)
    words = [word for word in GRPO if "before" not in word]
    own = (
        "algorithm=own",
        "algorithm.step=__main__:own_step",
        "algorithm.roles.actor.start=model",
        LENGTH,
    )
    made = package.run(*own, *words, evaluation={"num_prompts": 0})
    assert made.config["algorithm"]["step"] == "__main__:own_step"
    with pytest.raises(ConfigError) as raised:
        package.run(*own, *words, executor="ray_split")
    assert str(raised.value) == (
        "'algorithm.step': '__main__:own_step' is known to this process alone, and executor=ray "
        "has others compute steps\n    write it into a module, such as own.py, and name "
        "own:own_step; or set executor=in_process"
    )
    with pytest.raises(ConfigError, match="module '__main__' has no 'own_stp'; did you mean"):
        package.run(*own, *words, "algorithm.step=__main__:own_stp")


@pytest.mark.slow
def test_what_fails_while_it_runs_has_the_original_error_and_the_line(here: Path) -> None:
    (here / "failing.py").write_text(
        "from penstock.algorithms.roles import Reward\n"
        "class Failing(Reward):\n"
        "    def score(self, tokens, mask, prompt_id):\n"
        "        raise ZeroDivisionError('on purpose')\n"
    )
    words = [*GRPO, "algorithm.roles.reward.worker=failing:Failing", "evaluation.num_prompts=0"]
    with pytest.raises(WorkerError, match="ZeroDivisionError: on purpose") as raised:
        package.run(*words)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert any("to continue: penstock run resume=" in note for note in raised.value.__notes__)
    sys.modules.pop("failing")


STOPS = """
import penstock
from penstock.algorithms.roles import Reward

class Stops(Reward):
    def score(self, tokens, mask, prompt_id):
        number = len(tokens)
        breakpoint()
        return mask.sum(dim=1).float()

words = {words!r}
roles = {{"reward": {{"worker": Stops}}}}
run = penstock.run(*words, algorithm={{"num_steps": 1, "roles": roles}})
print("steps", len(run.metrics))
"""


def test_leaving_the_debugger_is_an_interrupt(here: Path, penstock: Penstock) -> None:
    (here / "left.py").write_text("import bdb\nraise bdb.BdbQuit\n")
    said = penstock("graph", "algorithm=own", "algorithm.step=left:own_step")
    assert (said.code, said.err) == (130, "penstock: interrupted in the debugger\n")


def test_what_was_raised_by_leaving_the_debugger_is_known() -> None:
    error = WorkerError("'reward.score' failed")
    error.__cause__ = BdbQuit()
    assert left_debugger(error)
    assert not left_debugger(WorkerError("'reward.score' failed"))


@pytest.mark.nightly
def test_a_breakpoint_in_a_worker_of_the_program_stops_there(here: Path) -> None:
    script = here / "stops.py"
    script.write_text(STOPS.format(words=(*GRPO, "evaluation.num_prompts=0")))
    # Ray, which other tests import here, has `breakpoint` of all further processes ask its workers.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONBREAKPOINT"}
    ran, left = (
        subprocess.run(
            [sys.executable, str(script)],
            env=environment,
            input=typed,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        for typed in ("p number\nc\n", "q\n")
    )
    assert ran.returncode == 0, ran.stderr
    assert "stops.py(9)score()" in ran.stdout
    assert "(Pdb) 16\n" in ran.stdout
    assert "steps 1" in ran.stdout
    assert "KeyboardInterrupt: in the debugger\nto continue: penstock run resume=" in left.stderr


def test_a_run_is_refused_outside_the_main_thread() -> None:
    raised: list[str] = []

    def call() -> None:
        try:
            package.run("algorithm=grpo")
        except ConfigError as error:
            raised.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    assert raised == [
        "penstock.run was called in a thread of its own, and a run is interrupted by signals, "
        "which reach the main thread alone\n    call it there, or start `penstock run` as a process"
    ]


def test_a_response_full_of_html_stays_text(tmp_path: Path) -> None:
    import gzip

    folder = create_run(tmp_path, name="<b>x</b>", seed=0, config="{}", data="none")
    (folder.path / "samples").mkdir()
    row = {"step": 0, "version": 0, "prompt": "<img src=x>", "response": "<script>1</script>"}
    file = folder.path / "samples" / "step-000000.jsonl.gz"
    file.write_bytes(gzip.compress(json.dumps({**row, "length": 3, "judge.<i>": 1.0}).encode()))
    (folder.path / "metrics.jsonl").write_text(
        '{"step": 0, "a<script>/loss": 1.0}\n{"step": 1, "a<script>/loss": null}\n'
    )
    made = RunHandle(folder)
    shown = displayed(made.samples())[HTML_MIME]
    assert "&lt;script&gt;1&lt;/script&gt;" in shown
    for page in (shown, displayed(made)[HTML_MIME], displayed(made.metrics)[HTML_MIME]):
        assert not {"script", "img", "i", "b"} & set(tags(page)) - {"b"}
    assert made.metrics["a<script>/loss"].isna().tolist() == [False, True]
    assert made.state == "not running"
    assert made.summary == {}


def test_a_run_before_its_first_step_has_no_curve(tmp_path: Path) -> None:
    made = RunHandle(create_run(tmp_path, name="grpo", seed=0, config="{}", data="none"))
    (made.folder / "metrics.jsonl").write_text("")
    shown = displayed(made)[HTML_MIME]
    assert made.id in shown
    assert "svg" not in tags(shown)
    assert made.metrics.empty
    for wrong, name in ((made.stage, None), (made.stage, 5), (made.curve, 5)):
        with pytest.raises(ConfigError, match=f"has no (stage|metric) '?{name}"):
            wrong(name)  # pyright: ignore[reportArgumentType] - a user's mistake


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        package.open_run(tmp_path)
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        package.open_run("a\0b")
    for wrong in (None, 3):
        with pytest.raises(ConfigError, match=r"penstock\.open_run: expected a folder, got"):
            package.open_run(wrong)  # pyright: ignore[reportArgumentType] - a user's mistake


SMALL = ("algorithm=grpo", "cluster=h100")


@pytest.mark.slow
def test_a_plan_is_that_of_the_command(here: Path, penstock: Penstock) -> None:
    planned = package.plan(*SMALL, cluster={"num_nodes": 2}, plan={"sensitivity": True})
    words = ("cluster.num_nodes=2", "plan.sensitivity=true", "output=typed.json")
    assert penstock("plan", *SMALL, *words).code == 0
    planned.write("made.json")
    made, typed = (json.loads(Path(name).read_text()) for name in ("made.json", "typed.json"))
    for one in (made, typed):
        one["prediction"].pop("search_time_s")
    assert made == typed
    assert planned.table("sensitivity").index[0] == "this plan"
    assert str(planned).startswith("plan of grpo on h100")
    assert repr(planned).startswith("<plan of grpo: ")

    page = displayed(planned)[HTML_MIME]
    assert tags(page) == ["iframe"]
    table = displayed(planned.plan)[HTML_MIME]
    assert {"table", "svg"} <= set(tags(table))
    assert all(name in table for name in planned.plan.layouts)
    with pytest.raises(ConfigError, match="there is no table 'sensitivty' in this plan; did you"):
        planned.table("sensitivty")
    with pytest.raises(ConfigError, match="'html' names a file, and what comes out is an object"):
        package.plan(*SMALL, html="plan.html")


def test_importing_penstock_costs_nothing_and_lists_what_it_has() -> None:
    code = (
        "import sys, penstock\n"
        "print(sorted({'torch', 'hydra', 'pandas', 'numpy'} & set(sys.modules)))\n"
        "print(sorted({'run', 'open_run', 'plan'} - set(dir(penstock))))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=False
    )
    assert (ran.stdout, ran.stderr) == ("[]\n[]\n", "")
    with pytest.raises(AttributeError, match="module 'penstock' has no attribute 'rum'"):
        _ = package.rum  # pyright: ignore[reportAttributeAccessIssue]
