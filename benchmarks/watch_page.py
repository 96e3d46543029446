"""How soon the page of `penstock watch` shows five runs of 100,000 steps, and a new step.

The real server, and a real headless Chromium that opens the page:

- `drawn_s`: from asking for the address until two charts of five runs are drawn. Each run has
  100,000 lines of 1.6 kB in its metrics.jsonl, which the system has read before.
- `updated_s`: from the moment a line is written until the page says its step. The page asks every
  second, and lines are written at evenly spread moments of that second.
- `server_s`: what the server alone takes for one run's curves, for a zoom into 1,000 steps of
  them, and for one step of 1 GB of samples; asked directly, without a browser.
- `whole_s`: reading and parsing all of one such metrics.jsonl, as a page would that did not sample.

A dataset of this size is written to a temporary folder first: 0.8 GB, and 1 GB of samples.
"""

from __future__ import annotations

import gzip
import importlib
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import parser, report, table

TESTS = Path(__file__).parents[1] / "tests" / "launch" / "watch"
NUM_RUNS, NUM_STEPS = 5, 100_000
NUM_NUMBERS = 30
SAMPLES_BYTES = 1 << 30
_METRICS = ("reward.score/reward/mean", "actor.train/loss")
_STATUS = "(document.getElementById('curves-status')?.innerText ?? '')"


def write_runs(runs: Path) -> list[Path]:
    """Runs whose lines are as long as those of GRPO's default run."""
    made: list[Path] = []
    names = [f"actor.train/a_number_of_it_{i}" for i in range(NUM_NUMBERS - len(_METRICS))]
    for index in range(NUM_RUNS):
        home = runs / f"run{index}"
        home.mkdir(parents=True)
        about = {"name": "grpo", "seed": index, "created": "2026-11-24T00:00:00+00:00"}
        code = {"package": "0.1.0", "commit": None, "dirty": False}
        (home / "run.json").write_text(json.dumps({**about, "code": code}))
        draws = random.Random(index)
        rest = ", ".join(f'"{name}": {draws.random()!r}' for name in names)
        with (home / "metrics.jsonl").open("w") as file:
            for step in range(NUM_STEPS):
                own = ", ".join(f'"{name}": {draws.random()!r}' for name in _METRICS)
                file.write(f'{{"step": {step}, "wall_time_s": {1.8e9 + step}, {own}, {rest}}}\n')
        made.append(home)
    return made


def write_samples(home: Path) -> int:
    """Steps of 64 responses of 4 kB until there is 1 GB of them; the number of steps."""
    (home / "samples").mkdir()
    draws, total, step = random.Random(0), 0, 0
    while total < SAMPLES_BYTES:
        rows: list[str] = []
        for number in range(64):
            text = draws.randbytes(2048).hex()
            row = {"step": step, "version": step, "prompt": f"{number}", "response": text}
            rows.append(json.dumps({**row, "length": 4096, "reward": draws.random()}))
        packed = gzip.compress("\n".join([*rows, ""]).encode(), 1)
        (home / "samples" / f"step-{step:06d}.jsonl.gz").write_bytes(packed)
        total, step = total + len(packed), step + 1
    return step


def timed(work: Callable[[], Any], repeats: int) -> float:
    """The median of some repetitions, in seconds."""
    taken: list[float] = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def server_times(pages: Any, num_sampled_steps: int, repeats: int) -> dict[str, float]:
    """What the server takes for what a page asks, in seconds."""
    metrics = "&".join(f"metric={name}" for name in _METRICS)
    step = num_sampled_steps // 2
    asked = {
        "curves of one run": f"api/curve?run=run0&{metrics}",
        "1,000 steps of them": f"api/curve?run=run0&{metrics}&from=50000&to=50999",
        "list of sampled steps": "api/steps?run=run0",
        "best samples of a step": f"api/samples?run=run0&step={step}&sort=reward&limit=20",
    }
    return {
        name: timed(lambda t=target: pages.answer(t), repeats) for name, target in asked.items()
    }


def read_whole(file: Path) -> None:
    """What a page would do that parsed a run's whole file when it is opened."""
    with file.open("rb") as lines:
        for line in lines:
            json.loads(line)


def drawn_s(browser: Any, url: str) -> float:
    """Seconds from asking for the page until all curves are drawn."""
    begin = time.perf_counter()
    browser.open(url)
    ready = (
        f"({_STATUS}.match(/last step {NUM_STEPS - 1}/g) ?? []).length === {NUM_RUNS} && "
        "document.querySelectorAll('canvas').length >= 2"
    )
    browser.until(ready)
    browser.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return time.perf_counter() - begin


def updated_s(browser: Any, home: Path, step: int, after_s: float) -> float:
    """Seconds from writing a step until the page says it.

    Args:
        browser: In which the page is open.
        home: The run's folder.
        step: The one that is written.
        after_s: So long after the step before was seen.
    """
    time.sleep(after_s)
    line = {"step": step, "wall_time_s": 1.8e9 + step, **dict.fromkeys(_METRICS, 0.5)}
    with (home / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    begin = time.perf_counter()
    browser.until(f"{_STATUS}.includes('last step {step} ')")
    return time.perf_counter() - begin


def measure(home: Path, repeats: int) -> dict[str, Any]:
    """Everything, on a folder that this writes."""
    sys.path.insert(0, str(TESTS))
    started = importlib.import_module("browser").started  # the driver of the tests

    from penstock.launch.run_dir.loopback_server import PageServer
    from penstock.launch.watch.pages import KnownRuns, Pages

    folders = write_runs(home / "runs")
    num_sampled_steps = write_samples(folders[0])
    pages = Pages(KnownRuns([], home / "runs"))
    server_s = server_times(pages, num_sampled_steps, repeats)
    file = folders[0] / "metrics.jsonl"
    whole_s = timed(lambda: read_whole(file), 3)
    with PageServer(pages.answer) as server, started(home) as browser:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        drawn = [drawn_s(browser, server.url) for _ in range(repeats)]
        updated = [
            updated_s(browser, folders[-1], NUM_STEPS + i, after_s=1 + i / repeats)
            for i in range(repeats)
        ]
        server.shutdown()
    return {
        "num_runs": NUM_RUNS,
        "num_steps": NUM_STEPS,
        "metrics_bytes_per_run": file.stat().st_size,
        "sampled_steps": num_sampled_steps,
        "repeats": repeats,
        "drawn_s": drawn,
        "updated_s": updated,
        "server_s": server_s,
        "whole_s": whole_s,
    }


def main() -> None:
    """Measure, and print a table of medians and extremes."""
    options = parser(__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--repeats", type=int, default=20)
    args = options.parse_args()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        result = measure(Path(folder), args.repeats)
    rows = [
        [name, *(f"{of(result[key]):.2f} s" for of in (min, statistics.median, max))]
        for name, key in (("five runs drawn", "drawn_s"), ("a new step shown", "updated_s"))
    ]
    print(table(["in the browser", "least", "median", "most"], rows))
    own = [[name, f"{1e3 * seconds:.1f} ms"] for name, seconds in result["server_s"].items()]
    own.append(["all of one metrics.jsonl, parsed", f"{1e3 * result['whole_s']:.1f} ms"])
    print(table(["in the server", "median"], own))
    report(result, args.json)


if __name__ == "__main__":
    main()
