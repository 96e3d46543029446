"""How surely `penstock runs regress` tells a run that is worse from one that is not.

    python benchmarks/regressions.py --json benchmarks/results/regressions_cpu.json

A reference is written of three seeds of a short run. Then, ten times each, one more run is held
against the reference of its own seed: unchanged; with an accuracy that is three points lower (the
figure in its summary.json is lowered); in a process that holds 15 % more memory; and with another
epsilon in the optimizer, which changes the hash of the weights and little else. Each run is a
`penstock run` in a process of its own.

For speed, ten times each, a run is run in turns by this source tree and by one whose steps take
none or a quarter longer, which is held against this one; `--pairs` runs of each make a case.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from bench import parser, report, table
from slow_checkout import slow_checkout

WORDS = (
    "algorithm=sft",
    "algorithm.num_steps=40",
    "algorithm.per_step.demos=32",
    "evaluation.num_prompts=256",
    "executor.num_threads=1",
    "tracker=none",
)
DEADLINE_S = 300.0
NUM_CASES = 10
SEEDS = (0, 1, 2)
SLOWER = (0.0, 0.25)
ROOT = Path(__file__).parents[1]

_RUN = """
import sys
import numpy
held = numpy.ones(int(sys.argv[1]), dtype=numpy.uint8)
from penstock.launch.main import main
sys.exit(main(sys.argv[2:]))
"""


def run(home: Path, seed: int, *more: str, held_bytes: int = 0) -> Path:
    """One run; its folder."""
    before = {*home.iterdir()} if home.is_dir() else set[Path]()
    words = ["run", *WORDS, f"seed={seed}", f"runs={home}", *more]
    command = [sys.executable, "-c", _RUN, str(held_bytes), *words]
    subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S)
    (folder,) = {*home.iterdir()} - before
    return folder


def regress(folder: Path, *words: str, python: str = sys.executable, pairs: int = 1) -> int:
    """The exit code of the command for one run."""
    command = [python, "-m", "penstock.launch.main", "runs", "regress", str(folder), *words]
    command, limit_s = [*command, f"runs={folder.parent}"], 60 + 2 * pairs * DEADLINE_S
    ran = subprocess.run(command, capture_output=True, timeout=limit_s)
    if ran.returncode not in (0, 1) or not ran.stdout:
        raise RuntimeError(ran.stderr.decode())
    return ran.returncode


def lowered(folder: Path) -> Path:
    """The run with an accuracy that is three points lower."""
    path = folder / "summary.json"
    summary = json.loads(path.read_text())
    path.write_text(
        json.dumps({**summary, "accuracy_after_rl": summary["accuracy_after_rl"] - 0.03})
    )
    return folder


def figures(home: Path, place: Path) -> dict[str, int]:
    """How often runs were called worse that are not, or by their accuracy, memory or hash."""
    first = {seed: run(home, seed) for seed in SEEDS}
    for seed, folder in first.items():
        regress(folder, f"write={place}/{seed}.json")
    peak = json.loads((first[0] / "summary.json").read_text())["peak_memory_bytes"]
    cases: Mapping[str, Callable[[int], Path]] = {
        "unchanged": lambda seed: run(home, seed),
        "accuracy 3 points lower": lambda seed: lowered(run(home, seed)),
        "peak memory 15 % higher": lambda seed: run(home, seed, held_bytes=int(0.15 * peak)),
        "another hash": lambda seed: run(home, seed, "algorithm.optimizer.eps=1.1e-08"),
    }
    return {
        name: sum(
            regress(make(number % 3), f"reference={place}/{number % 3}.json")
            for number in range(NUM_CASES)
        )
        for name, make in cases.items()
    }


def races(place: Path, pairs: int) -> dict[str, int]:
    """How often a tree that is so much slower than this one was called slower."""
    folder = run(place / "races", 0, "evaluation.num_prompts=0")
    words = (f"checkout={ROOT}", f"pairs={pairs}")
    found: dict[str, int] = {}
    trees = {slower: slow_checkout(place / f"slower-{slower}", slower) for slower in SLOWER}
    for number in range(NUM_CASES):
        for slower, tree in trees.items():  # in turns, as a machine's speed changes
            name = f"steps {slower:.0%} longer"
            python = str(tree / ".venv" / "bin" / "python")
            worse = regress(folder, *words, python=python, pairs=pairs)
            found[name] = found.get(name, 0) + worse
        print(f"{number + 1} of {NUM_CASES} cases of speed: {found}", flush=True)
    return found


def main() -> None:
    """Run the cases and print how many were found."""
    made = parser(__doc__ or "")
    made.add_argument("--pairs", type=int, default=5, help="runs of each tree in a case of speed")
    made.add_argument("--speed", action="store_true", help="the cases of speed alone")
    options = made.parse_args()
    with tempfile.TemporaryDirectory() as place:
        found = {} if options.speed else figures(Path(place, "runs"), Path(place))
        found |= races(Path(place), options.pairs)
    print(table(["case", f"called worse, of {NUM_CASES}"], [*found.items()]))
    result = {"num_cases": NUM_CASES, "num_pairs": options.pairs, "called_worse": found}
    report(result, options.json)


if __name__ == "__main__":
    main()
