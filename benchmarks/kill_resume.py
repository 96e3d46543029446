"""Kill -9 at random moments, resume, and compare the final weights with a run never stopped.

Each trial starts `penstock run` as a process of its own, kills it, lets `resume=` finish it, and
compares `weights_sha256` with that of an uninterrupted run. The moment is a random part of a step
after a random step of the main stage, from its first checkpoint on: so there is a checkpoint to
resume from, however fast the machine is at that moment, and kills fall into rollouts, training and
checkpoint writing alike. At least 90 % of the trials must have gone on from a checkpoint. Trials
alternate between schedules of max_lag 0 and 1.
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
POLL_S = 0.005
LEAST_RESUMED = 0.9
NUM_STEPS, CHECKPOINT_EVERY = 40, 2
SETTINGS = (
    "tracker=none",
    "evaluation.num_prompts=16",
    f"checkpoint_every={CHECKPOINT_EVERY}",
    "task.num_train=200",
    "task.num_held_out=16",
    "model.architecture.hidden_size=32",
    "model.architecture.intermediate_size=64",
    f"algorithm.num_steps={NUM_STEPS}",
    "algorithm.per_step.prompts=8",
    "algorithm.before.sft.num_steps=2",
)


def command(folder: Path, max_lag: int, words: list[str]) -> list[str]:
    """The run as a person would start it."""
    entry = [sys.executable, "-m", "penstock.launch.main", "run"]
    return [*entry, f"runs={folder}", f"schedule.max_lag={max_lag}", *SETTINGS, *words]


def finish(words: list[str]) -> None:
    """Run to the end."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr}")


def run_folder(folder: Path) -> Path | None:
    """The run in a trial's folder, if it got as far as making one."""
    found = sorted(folder.glob("*/config.yaml"))
    return found[0].parent if found else None


def summary(folder: Path) -> dict[str, Any]:
    """The summary of the only run in `folder`."""
    made = run_folder(folder)
    if made is None:
        raise SystemExit(f"{folder} has no run")
    return json.loads((made / "summary.json").read_text())


def num_steps_taken(folder: Path) -> int:
    """Steps of the main stage that the run in `folder` has written down."""
    made = run_folder(folder)
    metrics = None if made is None else made / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics and metrics.is_file() else 0


def wait_for_step(folder: Path, process: subprocess.Popen[bytes], num_steps: int) -> None:
    """Wait until the main stage has taken so many steps and has a checkpoint."""
    until = time.monotonic() + LIMIT_S
    while num_steps_taken(folder) < num_steps or not list(folder.glob("*/checkpoints/step-*[0-9]")):
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"the run in {folder} ended or stood still before step {num_steps}")
        time.sleep(POLL_S)


def trial(folder: Path, max_lag: int, after_steps: float, words: list[str]) -> dict[str, Any]:
    """Kill one run after so many steps, finish it, and say how it went on."""
    process = subprocess.Popen(
        command(folder, max_lag, words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for_step(folder, process, CHECKPOINT_EVERY)
        since_s = time.monotonic()
        wait_for_step(folder, process, int(after_steps))
        step_s = (time.monotonic() - since_s) / max(1, int(after_steps) - CHECKPOINT_EVERY)
        time.sleep(step_s * (after_steps % 1))
    finally:
        process.kill()
        process.wait(timeout=LIMIT_S)
    made = run_folder(folder)
    if made is not None and not (made / "summary.json").is_file():
        finish([sys.executable, "-m", "penstock.launch.main", "run", f"resume={made}"])
    came_to = summary(folder)
    return {
        "max_lag": max_lag,
        "killed_after_steps": round(after_steps, 2),
        "resumed_from_step": came_to["first_step"] if came_to["resumed"] else None,
        "weights_sha256": came_to["weights_sha256"],
    }


def main() -> None:
    """Run the trials and print how many ended with the expected weights."""
    options = parser(__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--kills", type=int, default=20)
    options.add_argument("--seed", type=int, default=0, help="of the moments")
    options.add_argument("words", nargs="*", help="further keys of all runs")
    args = options.parse_args()
    moments = random.Random(args.seed)
    rows: list[list[object]] = []
    trials: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="penstock-kill-") as name:
        base = Path(name)
        expected: dict[int, str] = {}
        for max_lag in (0, 1):
            finish(command(base / f"whole-{max_lag}", max_lag, args.words))
            expected[max_lag] = summary(base / f"whole-{max_lag}")["weights_sha256"]
        for index in range(args.kills):
            max_lag = index % 2
            after_steps = moments.uniform(CHECKPOINT_EVERY, NUM_STEPS)
            outcome = trial(base / f"trial-{index}", max_lag, after_steps, args.words)
            outcome["same"] = outcome["weights_sha256"] == expected[max_lag]
            trials.append(outcome)
            rows.append([index, max_lag, outcome["killed_after_steps"],
                         outcome["resumed_from_step"],
                         "same" if outcome["same"] else "DIFFERENT"])  # fmt: skip
            print(*rows[-1], flush=True)
    same = sum(outcome["same"] for outcome in trials)
    resumed = sum(bool(outcome["resumed_from_step"]) for outcome in trials)
    print(table(["trial", "max_lag", "killed after steps", "resumed from step", "weights"], rows))
    print(f"{resumed} of {len(trials)} were resumed from a checkpoint of the main stage")
    print(f"{same} of {len(trials)} ended with the weights of the run that was never stopped")
    report({"kills": len(trials), "resumed": resumed, "same": same, "trials": trials}, args.json)
    if same != len(trials) or resumed < LEAST_RESUMED * len(trials):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
