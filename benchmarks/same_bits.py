"""Show that a change of the code changes nothing that runs compute: record, change, compare.

    python benchmarks/same_bits.py --json before.json
    (the change)
    python benchmarks/same_bits.py --compare before.json --json after.json

The cases are the default run of seed 0 (`make run`) and those of `same_bits_cases.py`: a short run
for each algorithm, from a model that the first case trains; and short runs for engines, executors,
schedules, tasks, rewards, adapters, resuming, exporting and evaluating. Each gives the hash of all
trained weights, the scores before and after, and hashes of what was sampled, evaluated and
reported but for times and bytes. A case that only one of both sides has counts as a difference.
`--only` takes some of them, and `--model FOLDER` the first one's model, trained before.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from bench import parser, report, table
from penstock.launch.main import main as penstock
from same_bits_cases import BASE, case_names, commands_of
from same_bits_parts import judge, rows

LIMIT_S = 1800.0
"""Seconds for a case; one that takes longer has failed."""
SCORES = ("accuracy", "episode_return", "reward", "loss")
TIMED = re.compile(
    r"(_s|_bytes|_utilization|/date|predicted.*|memory.*)$|^(run/|time/)|waits|usage"
)
"""Metrics that differ between two runs of the same code."""


def untimed(thing: Any) -> Any:
    """Leave out what `TIMED` names, however deep it stands."""
    if isinstance(thing, dict):
        found = cast("dict[str, Any]", thing)
        return {key: untimed(value) for key, value in found.items() if not TIMED.search(key)}
    return [untimed(one) for one in cast("list[Any]", thing)] if isinstance(thing, list) else thing


def digest(things: Iterable[Any]) -> str:
    """Hash things as JSON."""
    found = hashlib.sha256()
    for thing in things:
        found.update(json.dumps(untimed(thing), sort_keys=True).encode() + b"\n")
    return found.hexdigest()[:16]


def read(run: Path, output: Path) -> dict[str, Any]:
    """Give what is compared of a finished run, and of what other commands made of it."""
    summary = json.loads((run / "summary.json").read_text())
    scores = {f"{name}_{when}" for name in SCORES for when in ("before", "after")}
    scores |= {f"{name}_{when}_rl" for name in SCORES for when in ("before", "after")}
    metrics = [
        json.loads(line)
        for file in sorted(run.rglob("metrics.jsonl"))
        for line in file.read_text().splitlines()
    ]
    sampled = [gzip.decompress(file.read_bytes()).decode() for file in run.rglob("*.jsonl.gz")]
    evaluated = [json.loads(file.read_text()) for file in sorted(run.glob("evaluations/*.json"))]
    weights = [file for file in sorted(output.rglob("*.safetensors"))]
    evals = [json.loads(file.read_text())["suites"] for file in output.glob("*.json")]
    return {
        "weights_sha256": summary["weights_sha256"],
        **{key: summary[key] for key in sorted(scores & set(summary)) if summary[key]},
        "metrics": digest(metrics),
        "samples": digest(sorted(sampled)),
        "evaluations": digest(evaluated),
        **{f"{file.parent.name}_weights": _of_file(file) for file in weights},
        **({"eval": digest(evals)} if evals else {}),
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Name what differs from a record of a case; what an older one lacks is not compared."""
    return ", ".join(key for key in before or now if before.get(key) != now.get(key))


def _of_file(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def carry_out(name: str, root: Path, model: Path | None) -> None:
    """Run a case in this process, a session of its own, and write what it gave."""
    os.setsid()
    os.chdir(Path(__file__).parent)  # where modules of a user's own are found
    runs, output, data = root / "runs", root / "output", root / "data"
    for folder in (output, data):
        folder.mkdir(parents=True)
    for file in ("sums.jsonl", "calls.jsonl"):
        (data / file).write_text("".join(json.dumps(row) + "\n" for row in rows(file)))
    with judge() as url:
        for words in commands_of(name):
            run = max(runs.glob("[0-9]*"), default="", key=os.path.getmtime)
            places = {"model": model, "run": run, "output": output, "data": data, "judge": url}
            starts = words[0] == "run" and "resume={run}" not in words
            filled = [*words, *[f"runs={runs}"] * starts]
            for place, value in places.items():
                filled = [word.replace(f"{{{place}}}", str(value)) for word in filled]
            print(f"{name}: penstock {' '.join(filled)}", file=sys.stderr, flush=True)
            if penstock(filled) != 0:
                raise SystemExit(1)
    run = max(runs.glob("[0-9]*"), key=os.path.getmtime)
    (root / "found.json").write_text(json.dumps(read(run, output)))


def measured(name: str, root: Path, model: Path | None) -> dict[str, Any]:
    """Give what a case comes to, within a deadline; of one that failed, that it did."""
    context = multiprocessing.get_context("forkserver")
    child = context.Process(target=carry_out, args=(name, root, model))
    child.start()
    child.join(LIMIT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid or 0, signal.SIGKILL)
    child.join()
    if not (root / "found.json").is_file():
        return {"weights_sha256": "failed"}
    return json.loads((root / "found.json").read_text())


def main() -> None:
    """Record, and compare if asked."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--compare", type=Path, metavar="FILE", help="a record to compare with")
    arguments.add_argument("--only", nargs="*", default=[], metavar="CASE", help="these cases")
    arguments.add_argument("--model", type=Path, metavar="FOLDER", help="that of the first case")
    arguments.add_argument("--jobs", type=int, default=1, help="cases at a time")
    given = arguments.parse_args()
    names = case_names()
    if unknown := set(given.only) - set(names):
        raise SystemExit(f"no such case: {', '.join(unknown)}; there are {', '.join(names)}")
    wanted = {BASE, *given.only} if given.only else {*names}
    wanted -= {BASE} if given.model else set()
    multiprocessing.set_forkserver_preload(["transformers", "penstock.launch.cli.carry_out"])
    model: Path | None = given.model and given.model.resolve()
    now: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(given.jobs) as pool:

        def note(name: str) -> None:
            start_s = time.monotonic()
            now[name] = measured(name, Path(made, str(names.index(name))), model)
            seconds[name] = round(time.monotonic() - start_s, 1)
            print(f"{seconds[name]:7.1f} s  {name}: {now[name]['weights_sha256'][:16]}", flush=True)
            if given.json is not None:  # what there is, should this be stopped
                given.json.write_text(json.dumps({"cases": now, "seconds": seconds}))

        if BASE in wanted:
            note(BASE)
            (model,) = Path(made, "0", "runs").glob("*/models/actor")
        list(pool.map(note, [name for name in names if name in wanted - {BASE}]))
    failed = [name for name, case in now.items() if case["weights_sha256"] == "failed"]
    before = now if given.compare is None else json.loads(given.compare.read_text())["cases"]
    names = [name for name in dict.fromkeys([*before, *now]) if name in wanted or not given.only]
    differ = {name: differences(before.get(name, {}), now.get(name, {})) for name in names}
    if given.compare is not None:
        print(table(["case", "compared"], [(name, differ[name] or "same") for name in names]))
    same = {name: not differ[name] for name in names}
    report({"cases": now, "same": same, "seconds": seconds}, given.json)
    if failed:
        raise SystemExit(f"these runs failed: {', '.join(failed)}")
    if not all(same.values()):
        raise SystemExit(f"{sum(not s for s in same.values())} of {len(names)} cases differ")


if __name__ == "__main__":
    main()
