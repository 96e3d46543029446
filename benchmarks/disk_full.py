"""A full disk, a read-only folder or a deleted one at given moments of a run, then `resume=`.

Each trial runs `penstock run` on a small tmpfs of its own. An audit hook in the run's process
notices the moment, such as the opening of a checkpoint's manifest, and then really fills the disk
up, mounts the folder read-only or deletes it: the errors are the kernel's. What is checked: the
exit code; one message that says which file or folder and why; every checkpoint that was complete
still verifies, and none is half written; nothing is left of a run that was refused; once there is
space again, `resume=` comes to the weights of a run that was never disturbed. A checkpoint that
cannot be written ends no run, unless it is the last one.

Mounting takes a namespace of its own, which `unshare` makes, for an ordinary user as well where
the kernel allows it. Where it does not, the script says so and exits with 2.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import parser, report, table
from disk_full_moments import KEEP, MOUNTS, Moment, chosen

_INSIDE = "PENSTOCK_DISK_FULL"
"""Set in the process that has the namespace."""

SIZE_BYTES, NUM_INODES = 64 << 20, 500
LIMIT_S, RAY_LIMIT_S = 60.0, 180.0
SETTINGS = (
    "algorithm.num_steps=6",
    "algorithm.before.sft.num_steps=2",
    "algorithm.per_step.prompts=2",
    "algorithm.before.sft.per_step.demos=2",
    "task.num_train=32",
    "task.num_held_out=4",
    "checkpoint_every=2",
    f"keep_checkpoints={KEEP}",
    "evaluation.num_prompts=4",
    "model.architecture.hidden_size=16",
    "model.architecture.intermediate_size=16",
    "model.architecture.num_hidden_layers=1",
    "model.architecture.num_attention_heads=2",
    "model.architecture.num_key_value_heads=2",
)
HEAVY = (
    "hydra",
    "penstock.launch.cli.carry_out",
    "penstock.launch.inputs.run",
    "penstock.launch.stages.prepare",
    "penstock.launch.stages.report",
    "penstock.launch.stages.run_stage",
    "penstock.algorithms",
    "penstock.workers.data.reasoning_task",
    "penstock.workers.rollout.generator_policy",
    "torch.utils.tensorboard",
    "transformers.models.qwen2.modeling_qwen2",
)
"""Imported once; each command is a fork of this process."""


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, None if it hung, and what it said."""

    code: int | None
    said: str


@dataclass
class Trial:
    """What came of one moment; `faults` is empty if all was as it must be."""

    moment: str
    code: int | None
    said: str
    checkpoints_before: int
    lost: int
    same_weights: bool
    faults: list[str]
    seconds: float = 0.0


def command(words: Sequence[str], folder: Path, moment: Moment | None, log: Path) -> Ended:
    """Run `penstock run WORDS` in a folder, disturbed at the moment."""
    with tempfile.TemporaryFile() as said:
        pid = os.fork()
        if pid == 0:
            become(folder, said.fileno())
            if moment is not None:
                moment.arm(folder, log)
            run_and_exit(["run", *words])
        until_s = time.monotonic() + (RAY_LIMIT_S if "executor=ray" in words else LIMIT_S)
        done, status = 0, 0
        while not done and time.monotonic() < until_s:
            done, status = os.waitpid(pid, os.WNOHANG)
            time.sleep(0.01)
        if not done:
            os.killpg(pid, 9)
            os.waitpid(pid, 0)
        said.seek(0)
        text = said.read().decode(errors="replace")
    return Ended(os.waitstatus_to_exitcode(status) if done else None, text)


def become(folder: Path, said: int) -> None:
    """Be a process of its own session, in a folder, that writes what it says to a descriptor."""
    os.setsid()
    os.chdir(folder)
    for target in (1, 2):
        os.dup2(said, target)


def run_and_exit(words: list[str]) -> None:
    """Run a command in this forked process and end it, as the interpreter would."""
    from penstock.launch.main import main as penstock

    code = 70
    try:
        code = penstock(words)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_folder(folder: Path) -> Path | None:
    """The run below a trial's folder, if it is there."""
    found = sorted(folder.glob("runs/*-seed0"))
    return found[0] if found else None


def weights_of(run: Path | None) -> str | None:
    """The hash of a finished run's weights."""
    file = None if run is None else run / "summary.json"
    if file is None or not file.is_file():
        return None
    return json.loads(file.read_text())["weights_sha256"]


def lost_checkpoints(folder: Path, before: Sequence[str]) -> list[str]:
    """Those that were complete at the moment and are not now, though nothing replaces them."""
    from penstock.launch.run_dir.checkpoint import fault_of

    lost: list[str] = []
    for name in before:
        path = folder / name
        if path.is_dir() and fault_of(path) is None:
            continue
        newer = [one for one in path.parent.glob("step-" + "[0-9]" * 8) if one.name > path.name]
        ended = (path.parents[1] / "summary.json").is_file()
        if not ended and sum(fault_of(one) is None for one in newer) < KEEP:
            lost.append(name)
    return lost


def half_written(folder: Path) -> list[str]:
    """Checkpoints with a complete one's name that do not verify."""
    from penstock.launch.run_dir.checkpoint import fault_of

    named = folder.glob("runs/**/checkpoints/step-" + "[0-9]" * 8)
    return [str(path) for path in named if fault_of(path) is not None]


def faults_of(moment: Moment, ended: Ended, folder: Path) -> list[str]:
    """What is wrong with how a disturbed command ended."""
    faults: list[str] = []
    if ended.code not in moment.codes:
        faults.append(f"exit code {ended.code}, expected {moment.codes}")
    if "Traceback" in ended.said:
        faults.append("a traceback")
    messages = re.findall(r"^penstock: (?!warning: )", ended.said, re.MULTILINE)
    warnings = ended.said.count("penstock: warning: ")
    if len(messages) != (ended.code != 0):
        faults.append(f"{len(messages)} messages")
    if ended.code and not re.search(moment.reason, message_of(ended)):
        faults.append(f"the message does not say '{moment.reason}'")
    if ended.code == 0 and moment.warns and not warnings:
        faults.append("no word of what went wrong")
    on = "to continue: penstock run resume=" if run_folder(folder) else "start a new one"
    if ended.code == 1 and on not in message_of(ended):
        faults.append("the message does not say how to continue")
    if ended.code == 2 and moment.leaves_nothing and (left := sorted(folder.glob("runs/*"))):
        faults.append(f"left behind: {left}")
    return faults


def message_of(ended: Ended) -> str:
    """From the message on; warnings come before it."""
    found = re.search(r"^penstock: (?!warning: ).*", ended.said, re.MULTILINE | re.DOTALL)
    return found[0].strip() if found else ""


def trial(moment: Moment, base: Path, expected: str) -> Trial:
    """Disturb one run, give the space back, and finish it."""
    start_s = time.monotonic()
    folder, log = base / "disk", base / "moment.json"
    log.unlink(missing_ok=True)
    words = [*SETTINGS, *moment.words]
    with MOUNTS.disk(folder, SIZE_BYTES, NUM_INODES):
        if moment.at_start:
            moment.disturb(folder, log)
        ended = command(words, folder, None if moment.at_start else moment, log)
        faults = faults_of(moment, ended, folder)
        happened = json.loads(log.read_text()) if log.is_file() else None
        if happened is None:
            faults.append("the moment did not come")
        before: list[str] = happened["checkpoints"] if happened else []
        lost = lost_checkpoints(folder, before)
        if broken := half_written(folder):
            faults.append(f"half written, with a complete one's name: {broken}")
        moment.undo(folder)
        run = run_folder(folder)
        if ended.code != 0 or weights_of(run) is None:
            resumable = run is not None and (run / "run.json").is_file()
            again = [f"resume={run}", *moment.resume_words] if resumable else words
            second = command(again, folder, None, log)
            if second.code != 0 or "cannot be used" in second.said:
                faults.append(f"resume: exit code {second.code}: {second.said[:600]}")
            run = run_folder(folder)
        weights = weights_of(run)
    return Trial(
        moment.name,
        ended.code,
        message_of(ended),
        len(before),
        len(lost),
        weights == expected,
        faults + [f"lost: {name}" for name in lost],
        round(time.monotonic() - start_s, 2),
    )


def undisturbed(base: Path) -> str:
    """The weights of a run that nothing happens to."""
    folder = base / "whole"
    folder.mkdir()
    ended = command(SETTINGS, folder, None, base / "none")
    weights = weights_of(run_folder(folder))
    if weights is None:
        raise SystemExit(f"the undisturbed run ended with {ended.code}:\n{ended.said}")
    return weights


def within_namespace() -> None:
    """Start again where mounting is allowed and ends with the process; returns if it is."""
    if os.environ.get(_INSIDE):
        return
    unshare = shutil.which("unshare")
    options = ["--mount"] if os.geteuid() == 0 else ["--user", "--map-root-user", "--mount"]
    why = "there is no `unshare`"
    if unshare is not None:
        probe = [unshare, *options, "mount", "-t", "tmpfs", "none", tempfile.gettempdir()]
        why = subprocess.run(probe, capture_output=True, text=True, check=False).stderr.strip()
    if unshare is None or why:
        print(f"a disk cannot be mounted here, so nothing was tried: {why}", file=sys.stderr)
        raise SystemExit(2)
    environment = {**os.environ, _INSIDE: "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    os.execve(unshare, [unshare, *options, sys.executable, *sys.argv], environment)


def main() -> None:
    """Try every moment and print what came of it."""
    options = parser(__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--only", default="", help="moments whose name contains this")
    options.add_argument("--no-ray", action="store_true", help="leave out those on Ray")
    args = options.parse_args()
    within_namespace()
    for name in HEAVY:
        importlib.import_module(name)
    trials: list[Trial] = []
    with tempfile.TemporaryDirectory(prefix="penstock-disk-") as name:
        base = Path(name)
        expected = undisturbed(base)
        for moment in chosen(args.only, with_ray=not args.no_ray):
            came = trial(moment, base, expected)
            trials.append(came)
            verdict = "; ".join(came.faults) or "as it must be"
            print(came.moment, came.code, came.same_weights, verdict, flush=True)
            if args.only or came.faults:
                print(came.said, flush=True)
    _summarize(trials, args.json)


def _summarize(trials: list[Trial], file: Path | None) -> None:
    rows = [
        [one.moment, one.code, one.checkpoints_before, one.lost,
         "same" if one.same_weights else "DIFFERENT", "; ".join(one.faults)[:60] or "-"]
        for one in trials
    ]  # fmt: skip
    print(table(["moment", "code", "checkpoints", "lost", "weights", "faults"], rows))
    total: dict[str, Any] = {
        "tried": len(trials),
        "lost": sum(one.lost for one in trials),
        "same_weights": sum(one.same_weights for one in trials),
        "faulty": sum(bool(one.faults) for one in trials),
    }
    print(*(f"{name}: {value}" for name, value in total.items()), sep=", ")
    report({**total, "trials": [asdict(one) for one in trials]}, file)
    if total["faulty"] or total["same_weights"] != total["tried"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
