"""Runs from end to end, tiny: what they leave behind, and that stopping them changes nothing."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from penstock.launch.run_dir.provenance import CodeVersion
from penstock.launch.run_dir.run_folder import RunFolder, record_of
from penstock.launch.run_dir.samples import read_samples, sample_steps
from penstock.launch.run_dir.step_logs import read_metrics, read_trace

from ..conftest import Penstock

TINY = (
    "model.architecture.hidden_size=16",
    "model.architecture.intermediate_size=32",
    "model.architecture.num_hidden_layers=1",
    "model.architecture.num_attention_heads=2",
    "model.architecture.num_key_value_heads=1",
    "task.num_train=64",
    "task.num_held_out=8",
    "evaluation.num_prompts=8",
    "algorithm.num_steps=4",
    "checkpoint_every=2",
)
GRPO = (
    *TINY,
    "algorithm.per_step.prompts=4",
    "algorithm.cfg.sampling.num_samples=4",
    "algorithm.before.sft.num_steps=3",
    "algorithm.before.sft.per_step.demos=8",
)

REWARDS = ("algorithm.per_step.pairs=4", "algorithm.optimizer.warmup_calls=0")


def only_run(folder: Path = Path("runs")) -> Path:
    (run,) = folder.iterdir()
    return run


def summary_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def test_grpo_from_nothing(penstock: Penstock) -> None:
    said = penstock("run", *GRPO)
    assert said.code == 0, said.err
    run = only_run()
    summary = summary_of(run)
    assert summary["stages"] == ["sft", "grpo"]
    assert len(summary["weights_sha256"]) == 64
    for key in ("accuracy_before_rl", "accuracy_after_rl"):
        assert 0 <= summary[key] <= 1
    for key in ("samples_per_s", "step_time_s", "peak_memory_bytes", "wall_time_s"):
        assert summary[key] > 0
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [0, 1, 2, 3]
    assert {event["name"] for event in read_trace(run / "trace.json")} >= {"actor.generate"}
    assert (run / "models" / "actor" / "model.safetensors").is_file()
    assert (run / "stages" / "sft" / "models" / "actor" / "tokenizer.json").is_file()
    samples = read_samples(run)
    assert [sample.step for sample in samples] == [step for step in range(4) for _ in range(16)]
    assert all(sample.version == sample.step for sample in samples)
    assert all(sample.reward is not None and 0 <= sample.reward <= 1 for sample in samples)
    assert all(sample.prompt.endswith("=") for sample in samples)
    assert read_samples(run / "stages" / "sft") == []
    assert not (run / "stages" / "sft" / "checkpoints").exists()
    assert list((run / "tensorboard").iterdir())
    assert ElementTree.parse(run / "curve.svg").getroot().tag.endswith("svg")
    assert "accuracy" in said.err.splitlines()[-1]
    assert sorted(path.name for path in Path().iterdir()) == ["runs"]


@pytest.mark.slow
def test_a_trained_model_folder_skips_the_warm_up(penstock: Penstock) -> None:
    assert penstock("run", "algorithm=sft", *TINY, "algorithm.per_step.demos=8").code == 0
    model = only_run() / "models" / "actor"
    words = [word for word in GRPO if not word.startswith(("model.", "algorithm.before"))]
    said = penstock("run", "model=folder", f"model.folder={model}", "runs=second", *words)
    assert said.code == 0, said.err
    summary = summary_of(only_run(Path("second")))
    assert summary["stages"] == ["grpo"]
    assert summary["accuracy_before_rl"] == summary_of(only_run())["accuracy_after_rl"]
    said = penstock("export", f"run={only_run(Path('second'))}", "output=model")
    assert said.code == 0, said.err
    card = Path("model/README.md").read_text().splitlines()
    assert f"| began as | {only_run().name}/models/actor |" in card


@pytest.mark.slow
def test_ppo_trains_its_reward_model_first_and_not_if_a_rule_is_the_reward(
    penstock: Penstock,
) -> None:
    words = (
        "algorithm=ppo",
        *GRPO,
        "algorithm.num_steps=2",
        "algorithm.before.reward_modelling.num_steps=2",
        "algorithm.before.reward_modelling.optimizer.warmup_calls=0",
        "algorithm.before.reward_modelling.per_step.pairs=4",
    )
    said = penstock("run", *words)
    assert said.code == 0, said.err
    summary = summary_of(only_run())
    assert summary["stages"] == ["sft", "reward_modelling", "ppo"]
    assert set(summary["roles_sha256"]) == {"actor", "critic"}
    said = penstock("run", *words, "algorithm.roles.reward.worker=rule", "runs=second")
    assert said.code == 0, said.err
    assert summary_of(only_run(Path("second")))["stages"] == ["sft", "ppo"]


@pytest.mark.slow
def test_reward_modelling_alone(penstock: Penstock) -> None:
    said = penstock("run", "algorithm=reward_modelling", *TINY, *REWARDS)
    assert said.code == 0, said.err
    summary = summary_of(only_run())
    assert summary["accuracy_before_rl"] is None
    assert set(summary["roles_sha256"]) == {"reward"}


@pytest.mark.slow
def test_multirun_makes_a_run_for_each_job(penstock: Penstock) -> None:
    words = ("algorithm=sft", *TINY, "algorithm.per_step.demos=8", "algorithm.num_steps=1")
    said = penstock("run", "--multirun", *words, "seed=0,1")
    assert said.code == 0, said.err
    summaries = [summary_of(run) for run in sorted(Path("runs").glob("[0-9]*"))]
    assert [summary["seed"] for summary in summaries] == [0, 1]
    assert len({summary["weights_sha256"] for summary in summaries}) == 2
    assert sorted(path.name for path in Path().iterdir()) == ["runs"]


@pytest.mark.slow
def test_the_code_is_that_of_the_start(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody may edit the source tree while a run goes on."""
    seen = (CodeVersion("1", "c0ffee", dirty=reading > 0) for reading in count())
    monkeypatch.setattr("penstock.launch.cli.carry_out.code_version", lambda: next(seen))
    words = (*TINY, "algorithm.per_step.demos=8", "algorithm.num_steps=1")
    assert penstock("run", "algorithm=sft", *words).code == 0
    assert summary_of(only_run())["code"] == "1 (c0ffee)"
    assert record_of(RunFolder(only_run())).code == CodeVersion("1", "c0ffee")


@pytest.mark.slow
def test_a_failing_worker_ends_with_code_1_and_a_way_to_continue(
    penstock: Penstock, tmp_path: Path
) -> None:
    (tmp_path / "failing.py").write_text(
        "from penstock.algorithms.roles import Reward\n"
        "class Failing(Reward):\n"
        "    def score(self, tokens, mask, prompt_id):\n"
        "        raise OSError('the judge is not there')\n"
    )
    said = penstock("run", *GRPO, "algorithm.roles.reward.worker=failing:Failing")
    assert said.code == 1
    assert "OSError: the judge is not there" in said.err
    assert f"penstock run resume={only_run()}" in said.err


@pytest.mark.slow
def test_what_is_not_resumed(penstock: Penstock) -> None:
    words = ("algorithm=sft", *TINY, "algorithm.per_step.demos=8", "algorithm.num_steps=1")
    assert penstock("run", *words).code == 0
    run = only_run()

    def refused(*more: str) -> str:
        said = penstock("run", f"resume={run}", *more)
        assert said.code == 2
        return said.err

    assert "has finished; its result is in" in refused()
    (run / "summary.json").unlink()
    assert "comes with seed=4" in refused("seed=4")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("\nmismatch:\n", "\nagreement:\n"))
    assert refused() == (
        "penstock: 'agreement' is now 'mismatch'\n    rename it where it is written: on the command"
        " line, in a YAML file, or in config.yaml of a run that is resumed\n"
    )
    (run / "config.yaml").write_text(config)
    (run / "run.json").write_text("{")
    assert refused().startswith(f"penstock: run '{run.name}': run.json cannot be read (JSONDecode")


def unfinished(penstock: Penstock, *words: str) -> Path:
    """A run that has still to write its summary."""
    tiny = [word for word in TINY if not (words and word.startswith("task."))]
    said = penstock("run", "algorithm=sft", *tiny, "algorithm.per_step.demos=8", *words)
    assert said.code == 0, said.err
    (only_run() / "summary.json").unlink()
    return only_run()


def problem_file(answers: list[str]) -> str:
    rows = [{"prompt": f"{n}+{n}=", "answer": answer} for n, answer in enumerate(answers)]
    Path("problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "problems.jsonl"


@pytest.mark.slow
def test_a_run_is_not_resumed_on_other_data(penstock: Penstock) -> None:
    path = problem_file([str(2 * n) for n in range(24)])
    run = unfinished(penstock, "task=file", f"task.path={path}", "task.num_held_out=8")
    problem_file([*(str(2 * n) for n in range(23)), "64"])
    said = penstock("run", f"resume={run}")
    assert said.code == 2
    before = json.loads((run / "run.json").read_text())["data"]
    assert re.fullmatch(
        f"penstock: run '{run.name}' was started on other problems: the data's fingerprint was "
        f"{before} and is [0-9a-f]{{16}} now\n"
        "    bring the data back as it was, or start a new run\n",
        said.err,
    )


@pytest.mark.slow
def test_a_run_resumed_by_other_code_says_so_and_goes_on(penstock: Penstock) -> None:
    run = unfinished(penstock)
    about = json.loads((run / "run.json").read_text())
    about["code"] = {"package": "0.0.9", "commit": None, "dirty": False}
    (run / "run.json").write_text(json.dumps(about))
    said = penstock("run", f"resume={run}")
    assert said.code == 0
    assert summary_of(run)["first_step"] == 4
    assert f"penstock: warning: run '{run.name}' was started by penstock 0.0.9 and goes" in said.err
    assert summary_of(run)["resumed"]


@pytest.mark.slow
def test_a_run_resumed_with_another_file_of_the_users_says_so_and_goes_on(
    penstock: Penstock,
) -> None:
    Path("mine.py").write_text("def mark(prompt, response, answer):\n    return 0.0\n")
    path = problem_file([str(2 * n) for n in range(24)])
    task = ("task=file", f"task.path={path}", "task.num_held_out=8", "task.reward=mine.py:mark")
    run = unfinished(penstock, *task)
    Path("mine.py").write_text("def mark(prompt, response, answer):\n    return 1.0\n")
    said = penstock("run", f"resume={run}")
    assert said.code == 0, said.err
    warnings = [line for line in said.err.splitlines() if "warning" in line]
    assert warnings == [
        f"penstock: warning: run '{run.name}' was started with another mine.py; what comes out may "
        "differ from a run of either"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("key", ["model.folder", "algorithm.roles.actor.start"])
def test_a_run_is_not_resumed_from_another_model(penstock: Penstock, key: str) -> None:
    first = unfinished(penstock).rename("first")
    model = first / "models" / "actor"
    words = ("algorithm.per_step.demos=8", "runs=second", f"{key}={model}")
    tiny = TINY
    if key == "model.folder":
        words = (*words, "model=folder")
        tiny = tuple(word for word in TINY if not word.startswith("model."))
    said = penstock("run", "algorithm=sft", *tiny, *words)
    assert said.code == 0, said.err
    run = only_run(Path("second"))
    (run / "summary.json").unlink()
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8] + bytes(8))
    said = penstock("run", f"resume={run}")
    assert said.code == 2
    before = json.loads((run / "run.json").read_text())["models"][str(model)]
    assert re.fullmatch(
        f"penstock: run '{run.name}' was started from another model in '{model}': the hash of its "
        f"files was {before} and is [0-9a-f]{{16}} now\n"
        "    bring the folder back as it was when the run began, or start a new run\n",
        said.err,
    )


@pytest.mark.slow
def test_a_verifier_that_fails_on_held_out_problems_is_mentioned(penstock: Penstock) -> None:
    Path("marking.py").write_text(
        "def mark(prompt, response, answer):\n"
        "    if prompt in ('0+0=', '1+1='):\n"
        "        raise ValueError('no such problem')\n"
        "    return 0.0\n"
    )
    task = ["task=file", f"task.path={problem_file([str(2 * n) for n in range(24)])}"]
    task += ["task.reward=marking.py:mark", "task.reward_in_process=true"]
    Path("asked.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}+{n}=", "answer": "0"}) + "\n" for n in range(8))
    )
    tiny = [word for word in TINY if not word.startswith("task.")]
    words = ("algorithm=sft", *tiny, "algorithm.per_step.demos=8", *task)
    said = penstock("run", *words, "task.held_out_path=asked.jsonl")
    assert said.code == 0, said.err
    for when in ("before", "after"):
        assert (
            f"accuracy {when} training: 25.0% of the answers have no score (the verifier failed on "
            "25.0% and ran out of time on 0.0%); they count as wrong\n"
        ) in said.err
    summary = summary_of(only_run())
    assert (summary["verifier_errors"], summary["verifier_timeouts"]) == (0.25, 0.0)


# --- stopping -------------------------------------------------------------------------------------


DEAF = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
from penstock.launch.main import main
sys.exit(main(sys.argv[1:]))
"""
"""Runs a command as a script without job control starts it in the background."""


def start(folder: Path, *words: str, deaf: bool = False) -> subprocess.Popen[str]:
    how = ["-c", DEAF] if deaf else ["-m", "penstock.launch.main"]
    command = [sys.executable, *how, "run", *words]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_step(runs: Path, step: int, *, deadline_s: float = 120.0) -> None:
    """Wait until the main stage has written `step`."""
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        files = list(runs.glob("*/metrics.jsonl"))
        if files and any(row["step"] >= step for row in read_metrics(files[0])):
            return
        time.sleep(0.01)
    raise AssertionError(f"step {step} was not reached within {deadline_s} s")


def wait_for_checkpoint(runs: Path, *, deadline_s: float = 60.0) -> None:
    """Wait until there is one that is complete."""
    until = time.monotonic() + deadline_s
    while not any(name.suffix == "" for name in runs.glob("*/checkpoints/step-*")):
        assert time.monotonic() < until, f"there was no checkpoint within {deadline_s} s"
        time.sleep(0.01)


LONG = (*GRPO, "algorithm.num_steps=12", "checkpoint_every=3")
SAVING = (
    "algorithm=reference_grpo",
    "model.lora.rank=4",
    "engine.options.activation_checkpointing=true",
    "evaluation.every=2",
)
"""Adapters, activations that are computed again, and evaluations on the way."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kill_at", "max_lag", "more"),
    [
        pytest.param(1, 1, (), marks=pytest.mark.nightly),
        (5, 0, SAVING),
        pytest.param(10, 1, (), marks=pytest.mark.nightly),
    ],
)
def test_a_killed_run_resumes_to_the_same_weights(
    penstock: Penstock, tmp_path: Path, max_lag: int, kill_at: int, more: tuple[str, ...]
) -> None:
    words = (*LONG, *more, f"schedule.max_lag={max_lag}")
    assert penstock("run", *words, "runs=whole").code == 0
    process = start(tmp_path, *words)
    try:
        wait_for_step(tmp_path / "runs", kill_at)
        if kill_at > 1:  # it is written while the run goes on
            wait_for_checkpoint(tmp_path / "runs")
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    run = only_run()
    assert not (run / "summary.json").exists()
    said = penstock("run", f"resume={run}")
    assert said.code == 0, said.err
    whole, resumed = summary_of(only_run(Path("whole"))), summary_of(run)
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["accuracy_before_rl"] == whole["accuracy_before_rl"]
    assert resumed["accuracy_after_rl"] == whole["accuracy_after_rl"]
    assert [resumed["resumed"], whole["resumed"]] == [True, False]
    assert whole["first_step"] == 0
    assert resumed["first_step"] > 0 or kill_at == 1, "there was a checkpoint to go on from"
    steps = [row["step"] for row in read_metrics(run / "metrics.jsonl")]
    assert steps == list(range(13 if more else 12))  # what the end is evaluated as has a row
    expected = {step: read_samples(only_run(Path("whole")), [step]) for step in range(12)}
    found = {step: read_samples(run, [step]) for step in sample_steps(run)}
    assert all(expected[step] == samples for step, samples in found.items())
    assert len(found) >= 12 - max_lag, "what was under way at the checkpoint cannot be looked at"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "word", "code", "max_lag"),
    [
        pytest.param(signal.SIGINT, "interrupted", 130, 0, marks=pytest.mark.nightly),
        (signal.SIGTERM, "terminated", 143, 2),
    ],
)
def test_an_interrupted_run_loses_no_step(
    penstock: Penstock, tmp_path: Path, sent: signal.Signals, word: str, code: int, max_lag: int
) -> None:
    words = (*LONG, "checkpoint_every=1000", f"schedule.max_lag={max_lag}")
    assert penstock("run", *words, "runs=whole", "samples.max_rows=0").code == 0
    assert read_samples(only_run(Path("whole"))) == []
    process = start(tmp_path, *words, deaf=sent == signal.SIGTERM)
    wait_for_step(tmp_path / "runs", 2)
    if sent == signal.SIGTERM:
        process.send_signal(signal.SIGINT)
    wait_for_step(tmp_path / "runs", 4)
    process.send_signal(sent)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    run = only_run()
    num_done = len(read_metrics(run / "metrics.jsonl"))
    assert 5 <= num_done < 12
    assert said.endswith(
        "penstock: stopping: what has begun to train is completed and a checkpoint written, within "
        "600 s; interrupt again to stop at once\n"
        f"penstock: {word} after {num_done} of 12 steps, with a checkpoint\n"
        f"    to continue: penstock run resume={os.path.join('runs', run.name)}\n"
    ), said
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{num_done:08d}"]
    resumed = penstock("run", f"resume={run}")
    assert resumed.code == 0, resumed.err
    whole, rest = summary_of(only_run(Path("whole"))), summary_of(run)
    assert rest["first_step"] == num_done
    assert rest["weights_sha256"] == whole["weights_sha256"]
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == list(range(12))


def on_terminal(folder: Path, *words: str, num_columns: int, stop_at: str) -> tuple[int, str]:
    """The exit code and output of a run on a terminal, interrupted once it shows a pattern."""
    terminal, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, num_columns, 0, 0))
    command = [sys.executable, "-m", "penstock.launch.main", "run", *words]
    env = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown, until, asked = b"", time.monotonic() + 120, False
    with suppress(OSError):  # the last process with the terminal open is gone
        while select.select([terminal], [], [], max(0.0, until - time.monotonic()))[0]:
            shown += os.read(terminal, 65536)
            if not asked and re.search(stop_at.encode(), shown):
                process.send_signal(signal.SIGINT)
                asked = True
    os.close(terminal)
    return process.wait(timeout=60), shown.decode()


@pytest.mark.slow
def test_on_a_terminal_one_line_changes(tmp_path: Path) -> None:
    words = (*GRPO, "algorithm.num_steps=200", "samples.show_every=0")
    code, shown = on_terminal(tmp_path, *words, num_columns=80, stop_at="[1-9]/200")
    assert code == 130
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 2, "the cursor is back"
    plain = re.sub(r"\x1b\[[\d;?]*[mhl]", "", shown)
    screen = [line.split("\x1b[2K")[-1].strip("\r") for line in plain.split("\n")]
    live = [line for line in screen if "━" in line]
    # The last two: where the message left the line, and where it was drawn for the last time.
    titles = ["sft (1 of 2)", "grpo (2 of 2)", "grpo (2 of 2)"]
    assert [re.split("[━╸]", line)[0].strip() for line in live] == titles
    assert all(len(line.rstrip()) <= 80 for line in live)
    assert re.search(r" 3/3 .* samples/s  cross_entropy", live[0])
    assert re.search(r"/200 [\d.]+ (min|s) .*left  [\d.]+ samples/s", live[-1])
    stopping = [line.startswith("penstock: stopping: ") for line in screen].index(True)
    assert screen[stopping - 1] == live[1], "the message has a line of its own"


@pytest.mark.slow
def test_a_run_that_nobody_reads_is_stopped_with_a_checkpoint(tmp_path: Path) -> None:
    process = start(tmp_path, *LONG, "checkpoint_every=1000")
    assert process.stderr is not None
    process.stderr.close()
    wait_for_step(tmp_path / "runs", 4)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    run = only_run(tmp_path / "runs")
    num_done = len(read_metrics(run / "metrics.jsonl"))
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{num_done:08d}"]


# --- on Ray ---------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize(
    "more",
    [pytest.param((), id="plain"), pytest.param(SAVING, id="saving")],
)
def test_ray_ends_with_the_weights_of_one_process(
    penstock: Penstock, tmp_path: Path, more: tuple[str, ...]
) -> None:
    pytest.importorskip("ray")
    words = (*GRPO, *more, "algorithm.num_steps=2", "executor.num_threads=1")
    assert penstock("run", *words, "runs=here").code == 0
    process = start(tmp_path, *words, "executor=ray", "executor.groups.all=1", "runs=there")
    _, said = process.communicate(timeout=280)
    assert process.returncode == 0, said
    here, there = (summary_of(only_run(Path(folder))) for folder in ("here", "there"))
    assert there["weights_sha256"] == here["weights_sha256"]
    assert there["accuracy_after_rl"] == here["accuracy_after_rl"]
    assert there["examples_after"] == here["examples_after"]
    assert read_samples(only_run(Path("there"))) == read_samples(only_run(Path("here")))


@pytest.mark.slow
def test_a_run_whose_folder_is_removed_ends(penstock: Penstock) -> None:
    def remove() -> None:
        end_s = time.monotonic() + 100
        while time.monotonic() < end_s:
            for metrics in Path("runs").glob("*/metrics.jsonl"):
                if metrics.read_bytes().count(b"\n") >= 3:
                    while metrics.parent.exists():  # a checkpoint may be renamed meanwhile
                        shutil.rmtree(metrics.parent, ignore_errors=True)
                    return
            time.sleep(0.01)

    removing = threading.Thread(target=remove)
    removing.start()
    words = (*TINY, "algorithm.per_step.demos=8", "algorithm.num_steps=3000", "tracker=none")
    said = penstock("run", "algorithm=sft", *words)
    removing.join()
    assert said.code == 1
    assert "no longer there" in said.err or "No such file or directory" in said.err
    assert "was removed during the run; start a new one" in said.err
    assert [*Path("runs").iterdir()] == []
