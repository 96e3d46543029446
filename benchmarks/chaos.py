"""SIGKILL for any process of a run, at random moments; it must end as if nothing had happened.

Each case is a `penstock run --supervise` on Ray, of a small model, whose nodes are spread over
groups of processes. One run of each is left alone. Others have processes killed, one after another:
a kind is drawn among those that run at that moment (the controller, ranks that train, generate,
score, act or serve, and the children of these), then one of its processes, then the moment. The
next one is killed once a further step is complete, so that no fault repeats. A kill has survived if
its run ends by itself, with the weights of the one left alone and a clean ledger.

A pause is the time from a kill to the first step that is complete afterwards and was not before.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from bench import parser, report, table
from chaos_cases import CASES, Case

LIMIT_S = 1500.0
"""A run that takes longer hangs."""

POLL_S = 0.1
_RANK = re.compile(r"ray::([^\[]+)\[\d+\]")
_NO_CHILD = ("ray::", "raylet", "gcs_server", "forkserver", "resource_tracker")
"""Children of ranks that only clean up behind them, or start others."""


@dataclass
class Kill:
    """One process that was killed.

    Attributes:
        kind: What it was: "controller", "rank of train", "child of acting".
        after: Steps that were complete.
        pause_s: See above; None if no further step came.
    """

    kind: str
    after: int
    pause_s: float | None = None


def victims(parent: psutil.Process) -> dict[str, list[psutil.Process]]:
    """Kind -> the processes of a supervised run that are of it."""
    found: dict[str, list[psutil.Process]] = {}
    for controller in parent.children():
        found.setdefault("controller", []).append(controller)
        for kind, some in rank_processes(controller).items():
            found.setdefault(kind, []).extend(some)
    return found


def rank_processes(controller: psutil.Process) -> dict[str, list[psutil.Process]]:
    """Kind -> the processes of a run's ranks, and the children of these."""
    found: dict[str, list[psutil.Process]] = {}
    for process in controller.children(recursive=True):
        if (rank := _RANK.match(_title(process))) is None:
            continue
        found.setdefault(f"rank of {rank[1]}", []).append(process)
        children = [one for one in process.children() if _counts(one)]
        if children:
            found.setdefault(f"child of {rank[1]}", []).extend(children)
    return found


def _title(process: psutil.Process) -> str:
    try:
        return (process.cmdline() or [""])[0]
    except psutil.Error:
        return ""


def _counts(process: psutil.Process) -> bool:
    try:
        words = " ".join(process.cmdline())
        return bool(words) and not any(name in words for name in _NO_CHILD)
    except psutil.Error:
        return False


def kill_one(parent: psutil.Process, draw: random.Random, after: int) -> Kill | None:
    """Kill a process of a run; None if it has none at this moment."""
    try:
        found = victims(parent)
    except psutil.Error:
        return None
    if "controller" not in found or len(found) == 1:
        return None  # it is being started
    kind = draw.choice(sorted(found))
    victim = draw.choice(found[kind])
    try:
        os.kill(victim.pid, signal.SIGKILL)
    except ProcessLookupError:
        return None
    return Kill(kind, after)


def steps_of(folder: Path, num_steps: int) -> int:
    """Steps of the main stage that are complete, as its metrics say; `num_steps` at the end."""
    for file in folder.glob("*/metrics.jsonl"):
        if (file.parent / "summary.json").exists():
            return num_steps
        lines = file.read_text(errors="replace").splitlines()
        return sum('"step"' in line for line in lines)
    return 0


def carried_out(case: Case, folder: Path, num_kills: int, draw: random.Random) -> dict[str, Any]:
    """One run of a case, and what came of it."""
    words = [sys.executable, "-m", "penstock.launch.main", "run", "--supervise"]
    words += [*case.words, f"runs={folder}"]
    kills: list[Kill] = []
    since_s = time.monotonic()
    with (folder / "said").open("w") as said:
        run = subprocess.Popen(words, stdout=said, stderr=said, start_new_session=True)
    parent = psutil.Process(run.pid)
    killed_s, next_s, step = 0.0, since_s, 0
    while run.poll() is None and time.monotonic() < since_s + LIMIT_S:
        time.sleep(POLL_S)
        step, now_s = steps_of(folder, case.num_steps), time.monotonic()
        last = kills[-1] if kills else None
        if last is not None and last.pause_s is None and step > last.after:
            last.pause_s = round(now_s - killed_s, 2)
            next_s = now_s + draw.uniform(0.0, case.gap_s)
        is_due = last is None or last.pause_s is not None
        if not (step and is_due and now_s >= next_s and len(kills) < num_kills):
            continue
        if (kill := kill_one(parent, draw, step)) is not None:
            kills.append(kill)
            killed_s = now_s
    ended = run.poll()
    if ended is None:
        os.killpg(run.pid, signal.SIGKILL)
    summaries = list(folder.glob("*/summary.json"))
    summary = json.loads(summaries[0].read_text()) if summaries else {}
    return {
        "kills": [vars(kill) for kill in kills],
        "exit_code": ended,
        "weights_sha256": summary.get("weights_sha256"),
        "ledger": summary.get("ledger"),
        "took_s": round(time.monotonic() - since_s, 1),
        "said": (folder / "said").read_text()[-6000:] if ended != 0 else "",
    }


def tried(
    case: Case, folder: Path, num_kills: int, per_run: int, seed: int, until_s: float
) -> dict[str, Any]:
    """Kill so many processes of a case, in as many runs as that takes."""
    draw, runs = random.Random(seed), list[dict[str, Any]]()
    name = re.sub(r"\W+", "-", case.name)
    alone = folder / f"{name}-alone"
    alone.mkdir()
    expected = carried_out(case, alone, 0, draw)
    left = num_kills
    if expected["exit_code"] != 0:
        print(f"{case.name} does not even end undisturbed:\n{expected['said']}", flush=True)
        left = 0  # the other cases are tried all the same
    while left > 0 and len(runs) < 2 * num_kills and time.monotonic() < until_s:
        own = folder / f"{name}-{len(runs)}"
        own.mkdir()
        found = carried_out(case, own, min(per_run, left), draw)
        found["same"] = found["weights_sha256"] == expected["weights_sha256"]
        left -= len(found["kills"])
        runs.append(found)
        print(case.name, found["same"], found["took_s"], found["ledger"], *found["kills"],
              flush=True)  # fmt: skip
        if not found["same"] or found["exit_code"]:
            print(found["said"], flush=True)
    return {"case": case.name, "words": case.words, "alone": expected, "runs": runs}


def main() -> None:
    """Kill, and print what has survived."""
    options = parser(__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--kills", type=int, default=50, help="over all cases")
    options.add_argument("--per-run", type=int, default=10)
    options.add_argument("--minutes", type=float, default=600.0, help="no run begins after that")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    args = options.parse_args()
    shares = [args.kills * (i + 1) // len(args.cases) - args.kills * i // len(args.cases)
              for i in range(len(args.cases))]  # fmt: skip
    until_s = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory(prefix="penstock-chaos-") as name:
        cases = [
            tried(CASES[one], Path(name), share, args.per_run, args.seed + number, until_s)
            for number, (one, share) in enumerate(zip(args.cases, shares, strict=True))
            if time.monotonic() < until_s
        ]
    runs = [run for case in cases for run in case["runs"]]
    kinds, survived = Counter[str](), Counter[str]()
    pauses: dict[str, list[float]] = {}
    for run in runs:
        for kill in run["kills"]:
            kinds[kill["kind"]] += 1
            survived[kill["kind"]] += run["same"] and run["exit_code"] == 0
            if kill["pause_s"] is not None:
                pauses.setdefault(kill["kind"], []).append(kill["pause_s"])
    rows = [[kind, count, survived[kind], *(
        [f"{statistics.median(pauses[kind]):.1f} s", f"{max(pauses[kind]):.1f} s"]
        if kind in pauses else ["", ""])] for kind, count in sorted(kinds.items())]  # fmt: skip
    print(table(["killed", "tried", "survived", "pause (median)", "longest"], rows))
    every = [pause for some in pauses.values() for pause in some]
    total = {
        "tried": sum(kinds.values()),
        "survived": sum(survived.values()),
        "longest_pause_s": max(every, default=None),
        "median_pause_s": statistics.median(every) if every else None,
    }
    print(", ".join(f"{key}: {value}" for key, value in total.items()))
    report({**total, "kinds": dict(kinds), "cases": cases}, args.json)


if __name__ == "__main__":
    main()
