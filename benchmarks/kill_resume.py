"""Kill -9 at random moments, resume, and compare the final weights with a run never stopped.

Each trial starts `penstock run` as a process of its own, kills it after a random time, lets
`resume=` finish it, and compares `weights_sha256` with that of an uninterrupted run. Moments are
uniform over the uninterrupted run's whole wall time, so they fall into start-up, warm-up, rollouts,
training and checkpoint writing alike. Trials alternate between schedules of max_lag 0 and 1.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import parser, report, table

LIMIT_S = 300.0
SETTINGS = (
    "tracker=none",
    "evaluation.num_prompts=16",
    "checkpoint_every=3",
    "task.num_train=200",
    "task.num_held_out=16",
    "model.architecture.hidden_size=32",
    "model.architecture.intermediate_size=64",
    "algorithm.num_steps=16",
    "algorithm.per_step.prompts=16",
    "algorithm.before.sft.num_steps=12",
)


def command(folder: Path, max_lag: int) -> list[str]:
    """The run as a person would start it."""
    entry = [sys.executable, "-m", "penstock.launch.main", "run"]
    return [*entry, f"runs={folder}", f"schedule.max_lag={max_lag}", *SETTINGS]


def finish(words: list[str]) -> float:
    """Run to the end and return the wall time in seconds."""
    start = time.monotonic()
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr}")
    return time.monotonic() - start


def run_folder(folder: Path) -> Path | None:
    """The run in a trial's folder, if it got as far as making one."""
    found = sorted(folder.glob("*/config.yaml"))
    return found[0].parent if found else None


def weights(folder: Path) -> str:
    """The hash in the summary of the only run in `folder`."""
    made = run_folder(folder)
    if made is None:
        raise SystemExit(f"{folder} has no run")
    return json.loads((made / "summary.json").read_text())["weights_sha256"]


def trial(folder: Path, max_lag: int, kill_after_s: float) -> dict[str, Any]:
    """Kill one run, finish it, and say how far it had come and what it ended with."""
    process = subprocess.Popen(
        command(folder, max_lag), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        process.wait(timeout=kill_after_s)
        killed = False
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=LIMIT_S)
        killed = True
    made = run_folder(folder)
    checkpoints = sorted(p.name for p in made.rglob("step-*") if p.is_dir()) if made else []
    if made is None:
        finish(command(folder, max_lag))
    elif killed:
        words = [sys.executable, "-m", "penstock.launch.main", "run", f"resume={made}"]
        finish(words)
    return {
        "max_lag": max_lag,
        "killed_after_s": round(kill_after_s, 2),
        "killed": killed,
        "checkpoints_then": checkpoints[-1:],
        "weights_sha256": weights(folder),
    }


def main() -> None:
    """Run the trials and print how many ended with the expected weights."""
    options = parser(__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--kills", type=int, default=20)
    options.add_argument("--seed", type=int, default=0, help="of the moments")
    args = options.parse_args()
    moments = random.Random(args.seed)
    rows: list[list[object]] = []
    trials: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="penstock-kill-") as name:
        base = Path(name)
        whole_s: dict[int, float] = {}
        expected: dict[int, str] = {}
        for max_lag in (0, 1):
            whole_s[max_lag] = finish(command(base / f"whole-{max_lag}", max_lag))
            expected[max_lag] = weights(base / f"whole-{max_lag}")
        for index in range(args.kills):
            max_lag = index % 2
            after_s = moments.uniform(0, whole_s[max_lag])
            outcome = trial(base / f"trial-{index}", max_lag, after_s)
            outcome["same"] = outcome["weights_sha256"] == expected[max_lag]
            trials.append(outcome)
            rows.append([index, max_lag, f"{after_s:.1f} of {whole_s[max_lag]:.1f} s",
                         *(outcome["checkpoints_then"] or ["none"]),
                         "same" if outcome["same"] else "DIFFERENT"])  # fmt: skip
            print(*rows[-1], flush=True)
    same = sum(outcome["same"] for outcome in trials)
    print(table(["trial", "max_lag", "killed after", "newest checkpoint", "weights"], rows))
    print(f"{same} of {len(trials)} ended with the weights of the run that was never stopped")
    report({"kills": len(trials), "same": same, "trials": trials}, args.json)
    if same != len(trials):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
