"""Tell whether this source tree is slower than another one: both run a run again, in turns.

    python benchmarks/race.py runs/20261123-143515-grpo-seed0 ../penstock-before --json FILE

A shared machine's speed changes from minute to minute, so a time that was written down says little
later. Here a run of each checkout makes a pair, and the one that goes first changes from pair to
pair. Every run takes the same steps, so of each step the fastest run of a checkout counts: whatever
else the machine does makes a step slower, never faster. Take a run of the older tree, which does
not know keys that came later, with `tracker=none`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import parser, report, table
from penstock.launch.runs.values import History

DEADLINE_S = 1800.0


def run_again(run: Path, python: Path) -> tuple[tuple[float, ...], str]:
    """Return the seconds of each step of a run by one checkout, and the hash of its weights."""
    command = [str(python), "-m", "penstock.launch.main", "runs", "reproduce", str(run)]
    with tempfile.TemporaryDirectory(prefix="penstock-") as place:
        words = [f"into={place}", f"runs={run.parent}"]
        ran = subprocess.run([*command, *words], capture_output=True, text=True, timeout=DEADLINE_S)
        finished = [*Path(place).glob("*/summary.json")]
        if len(finished) != 1:
            raise RuntimeError(f"{python} could not run it again\n{ran.stderr[-2000:]}")
        summary = json.loads(finished[0].read_text())
        steps_s = History(finished[0].parent).series("run/step_time_s").ys
        return steps_s, summary["weights_sha256"]


def main() -> None:
    """Run the pairs and print the seconds per step of both checkouts."""
    made = parser(__doc__ or "")
    made.add_argument("run", type=Path, help="folder of a run that has finished")
    made.add_argument("checkout", type=Path, help="the other source tree, after `make setup`")
    made.add_argument("--pairs", type=int, default=5, help="runs of each")
    options = made.parse_args()
    # Not resolved: the link is what names the checkout's packages.
    other = options.checkout.absolute() / ".venv" / "bin" / "python"
    pythons = {"other": other, "this": Path(sys.executable)}
    took_s: dict[str, list[tuple[float, ...]]] = {name: [] for name in pythons}
    weights: set[str] = set()
    for pair in range(options.pairs):
        for name in [*pythons] if pair % 2 == 0 else [*reversed(pythons)]:
            steps_s, sha256 = run_again(options.run.absolute(), pythons[name])
            took_s[name].append(steps_s)
            weights.add(sha256)
    # A run may end early, when it no longer improves; then the weights differ as well.
    num_steps = min(len(steps_s) for runs in took_s.values() for steps_s in runs)
    found = {
        name: statistics.fmean(min(run[step] for run in runs) for step in range(num_steps))
        for name, runs in took_s.items()
    }
    print(table(["checkout", "s per step"], [(name, f"{s:.4g}") for name, s in found.items()]))
    print(f"this one takes {found['this'] / found['other']:.3f} times the other's seconds")
    if len(weights) > 1:
        print("the runs came to different weights: what they did may not be the same work")
    report({"num_pairs": options.pairs, "step_time_s": found}, options.json)


if __name__ == "__main__":
    main()
