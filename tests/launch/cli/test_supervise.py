"""A run that is looked after goes on when its process dies, and ends when it is to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from penstock.launch.cli import run as supervise
from penstock.launch.cli.run import supervise_command
from penstock.launch.run_dir.run_folder import lock_holder
from penstock.launch.run_dir.step_logs import LEDGER, read_ledger

from ..conftest import Penstock
from .test_run import TINY, only_run, summary_of

ONE_STAGE = (
    *TINY,
    "algorithm.per_step.prompts=4",
    "algorithm.cfg.sampling.num_samples=4",
    "algorithm.roles.actor.start=model",
    "algorithm.num_steps=12",
    "checkpoint_every=3",
    "evaluation.num_prompts=0",
)

RAY = (
    "executor=ray",
    "executor.groups={train:1,rollout:1}",
    "executor.nodes={actor.generate:rollout}",
)
LIMIT_S = 240.0
"""A run on Ray starts in half a minute to two, as busy as the machine is."""

PROGRAM = """\
import json, os, signal, sys, time
parent, _, told = os.environ["PENSTOCK_SUPERVISED"].partition(":")
assert parent == str(os.getppid())
with open("starts.jsonl", "a") as starts:
    print(json.dumps(sys.argv[1:]), file=starts)
number = len(open("starts.jsonl").readlines())
def tell(**said):
    os.write(int(told), (json.dumps(said) + "\\n").encode())
def steps(count):
    os.makedirs("runs/it", exist_ok=True)
    with open("runs/it/metrics.jsonl", "w") as metrics:
        for step in range(count):
            print(json.dumps({"step": step, "wall_time_s": 0.0}), file=metrics)
"""
"""What stands in for a run: it says how often it was started, and what it tells its parent."""

FOUND = 'tell(recovery={"pause_s": 0.0, "max_repeats": 2, "max_restarts": 4}, folder="runs/it")\n'
KILLED = "os.kill(os.getpid(), signal.SIGKILL)\n"


@pytest.fixture
def standing_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a program that is run in place of `penstock`."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "program.py"
    monkeypatch.setattr(supervise, "_PROGRAM", (sys.executable, str(file)))
    return file


def starts() -> list[list[str]]:
    return [json.loads(line) for line in Path("starts.jsonl").read_text().splitlines()]


def test_a_run_that_is_killed_goes_on_from_its_folder(
    standing_in: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    standing_in.write_text(f"{PROGRAM}{FOUND}steps(number)\nif number < 3:\n    {KILLED}")
    assert supervise_command(["seed=3"]) == 0
    assert starts() == [["run", "seed=3"], ["run", "resume='runs/it'"], ["run", "resume='runs/it'"]]
    assert capsys.readouterr().err.splitlines() == [
        f"penstock: the run's process was killed by SIGKILL after {number} steps; it goes on from "
        f"its folder runs/it (start {number + 1}, after 0.0 s)"
        for number in (1, 2)
    ]


def test_a_fault_that_comes_again_each_time_ends_it(
    standing_in: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    standing_in.write_text(f"{PROGRAM}{FOUND}steps(5)\n{KILLED}")
    assert supervise_command([]) == 128 + signal.SIGKILL
    assert len(starts()) == 3
    assert capsys.readouterr().err.splitlines()[2:] == [
        "penstock: the run's process was killed by SIGKILL after 5 steps",
        "    that was the death number 3 after step 5 with no step completed in between: starting "
        "again does not fix it (recovery.max_repeats)",
    ]


SAYS_MORE = "if number < 2:\n    tell(may_go_on={})\n    sys.exit(1)\n"
RESUMED = ("resume=runs/it", "algorithm.num_steps=9")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "words", "code", "num_starts"),
    [
        (f"if number < 2:\n    {KILLED}", ("seed=3",), 0, 2),  # it has no folder yet
        (f"{FOUND}if number < 2:\n    {KILLED}", RESUMED, 0, 2),
        *((f"{FOUND}sys.exit({code})\n", (), code, 1) for code in (0, 2, 130, 143)),
        (FOUND + SAYS_MORE.format(True), ("resume=runs/it",), 0, 2),
        (FOUND + SAYS_MORE.format(False), (), 1, 1),
        (f"{FOUND}if number < 2:\n    os._exit(1)\n", ("resume=runs/it",), 0, 2),  # says nothing
        (f"{FOUND}steps(number)\n{KILLED}", ("resume=runs/it",), 128 + signal.SIGKILL, 5),
    ],
)
def test_what_is_started_again_and_in_which_words(
    standing_in: Path, program: str, words: tuple[str, ...], code: int, num_starts: int
) -> None:
    standing_in.write_text(PROGRAM + program)
    assert supervise_command(list(words)) == code
    assert starts() == [["run", *words]] * num_starts


def test_a_run_that_had_finished_is_not_started_again(
    standing_in: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = 'steps(1)\nopen("runs/it/summary.json", "w").write("{}")\n'
    standing_in.write_text(f"{PROGRAM}{FOUND}{finished}{KILLED}")
    assert supervise_command([]) == 0
    assert capsys.readouterr().err == (
        "penstock: the run's process was killed by SIGKILL, but the run had finished: "
        "runs/it/summary.json\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on_once(standing_in: Path, number: signal.Signals) -> None:
    """The run's process is in a group of its own, as what a terminal sends would come twice."""
    standing_in.write_text(
        f"{PROGRAM}heard = []\n"
        f"signal.signal({int(number)}, lambda *_: heard.append(1))\n"
        f"os.killpg(os.getpgid(os.getppid()), {int(number)})\n"
        "end = time.monotonic() + 20\n"
        "while not heard and time.monotonic() < end:\n    time.sleep(0.01)\n"
        "time.sleep(0.2)\nsys.exit(100 + len(heard))\n"
    )
    code = (
        "import sys; from penstock.launch.cli import run as supervise; "
        f"supervise._PROGRAM = (sys.executable, {str(standing_in)!r}); "
        "sys.exit(supervise.supervise_command([]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], timeout=LIMIT_S, start_new_session=True, check=False
    )
    assert ran.returncode == 101


def test_several_runs_are_refused(penstock: Penstock) -> None:
    said = penstock("run", "--supervise", "-m", "seed=0,1")
    assert (said.code, said.err) == (
        2,
        "penstock: --supervise looks after one run, and -m makes several\n"
        "    leave one of them out\n",
    )


@pytest.mark.slow
def test_what_is_refused_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert supervise_command(["recovery.max_repeats=0"]) == 2
    assert capfd.readouterr().err.count("penstock: ") == 1


BESIDE = """\
import sys
from penstock.launch.cli import run as supervise
supervise._PROGRAM = (sys.executable, sys.argv[1])
supervise.supervise_command([])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells of a parent's death there")
def test_a_parent_that_is_killed_ends_the_run_and_leaves_nothing(
    standing_in: Path, tmp_path: Path
) -> None:
    ended = "open('ended', 'w').close(), sys.exit(0)"
    standing_in.write_text(
        f"{PROGRAM}signal.signal(signal.SIGTERM, lambda *_: ({ended}))\n{FOUND}"
        "open('begun', 'w').close()\ntime.sleep(60)\nopen('outlived', 'w').close()\n"
    )
    (tmp_path / "tmp").mkdir()
    parent = subprocess.Popen(
        [sys.executable, "-c", BESIDE, str(standing_in)],
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
    )
    until_there(Path("begun"))
    parent.kill()
    parent.wait()
    until_there(Path("ended"))
    assert [*(tmp_path / "tmp").iterdir()] == []


def until_there(file: Path) -> None:
    end_s = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < end_s, f"{file} is not there"
        time.sleep(0.02)


def killed_once(
    parent: subprocess.Popen[str], runs: Path, num_lines: int, before: set[int]
) -> None:
    """Kill the process of the only run once it has taken so many steps."""
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        assert parent.poll() is None, parent.communicate()[1]
        for lock in runs.glob("*/.lock"):
            metrics = lock.parent / "metrics.jsonl"
            with lock.open("rb") as file:
                pid = lock_holder(file.fileno())
            if not pid or pid in before or not metrics.exists():
                continue
            if metrics.read_bytes().count(b"\n") >= num_lines:
                before.add(pid)
                os.kill(pid, signal.SIGKILL)
                return
        time.sleep(0.02)
    raise TimeoutError(f"the run did not take {num_lines} steps within {LIMIT_S} s")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "at"),
    [
        ((), (5,)),
        pytest.param((), (2, 8), marks=pytest.mark.nightly),
        pytest.param(RAY, (2, 8), marks=[pytest.mark.nightly, pytest.mark.timeout(1200)]),
    ],
    ids=["in_process", "in_process_twice", "ray"],
)
@pytest.mark.usefixtures("penstock")  # whose folder is the one that it runs in
def test_a_run_whose_process_is_killed_ends_with_the_same_weights(
    tmp_path: Path, more: tuple[str, ...], at: tuple[int, ...]
) -> None:
    words = (*ONE_STAGE, *more, "schedule.max_lag=1", "recovery.pause_s=0.1")
    run = [sys.executable, "-m", "penstock.launch.main", "run"]
    # In a process of its own: Ray leaves open files behind.
    whole_run = [*run, *words, "runs=whole"]
    subprocess.run(whole_run, cwd=tmp_path, timeout=LIMIT_S, check=True, capture_output=True)
    command = [*run, "--supervise", *words]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as parent:
        try:
            killed: set[int] = set()
            for num_lines in at:
                killed_once(parent, tmp_path / "runs", num_lines, killed)
            _, said = parent.communicate(timeout=LIMIT_S)
        finally:
            parent.terminate()
    assert parent.returncode == 0, said
    assert said.count("was killed by SIGKILL") == len(at)
    whole, found = summary_of(only_run(Path("whole"))), summary_of(only_run())
    assert found["weights_sha256"] == whole["weights_sha256"]
    assert found["resumed"]
    before = whole["ledger"].partition("; 0 steps computed")[0]
    assert found["ledger"].startswith(before)
    assert found["ledger"].endswith(" steps computed more than once, none counted twice")
    lines = [read_ledger(run / LEDGER) for run in (only_run(), only_run(Path("whole")))]
    assert [replace(line, times=1) for line in lines[0]] == lines[1]
