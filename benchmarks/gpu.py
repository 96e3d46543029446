"""All figures that one GPU can give, in at most 25 minutes.

    python benchmarks/gpu.py --json FILE

Each stage runs in a process of its own and writes its figures to FILE as it finds them. A second
call goes on where the first ended: what FILE has is not measured again, unless `--again` says so.
A stage that fails, is not there in time or lacks something is left open by name, with the reason.

Every figure stands beside what it is a share of, measured in the same process: products, copies, a
data sheet, a prediction. `--tiny` runs every stage on a CPU, on a model that means nothing, in one
process: it shows that the script works where there is no GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench import machine, parser, table
from gpu_ablation import ablation
from gpu_case import Bench, Figure, scale
from gpu_commands import agents, paths, plan, runs
from gpu_compute import engines, inventory, logprobs, train
from gpu_generate import adapters, decode, determinism
from gpu_kernels import kernels
from gpu_run import in_place, smollm2, step
from gpu_transfer import sleep, weights

LIMIT_S = 1500.0


@dataclass(frozen=True)
class Stage:
    """Some figures.

    Attributes:
        measure: Finds them, one after another.
        limit_s: How long it may take; a stage is not begun if less time is left.
    """

    measure: Callable[[Bench], Iterator[Figure]]
    limit_s: float


STAGES: Mapping[str, Stage] = {
    "inventory": Stage(inventory, 60),
    "kernels": Stage(kernels, 120),
    "train": Stage(train, 90),
    "ablation": Stage(ablation, 150),
    "decode": Stage(decode, 150),
    "logprobs": Stage(logprobs, 90),
    "determinism": Stage(determinism, 90),
    "paths": Stage(paths, 240),
    "runs": Stage(runs, 120),
    "in_place": Stage(in_place, 150),
    "plan": Stage(plan, 300),
    "step": Stage(step, 150),
    "adapters": Stage(adapters, 120),
    "agents": Stage(agents, 180),
    "smollm2": Stage(smollm2, 570),
    "sleep": Stage(sleep, 120),
    "weights": Stage(weights, 180),
    "engines": Stage(engines, 180),
}
"""Name -> stage, in the order in which they run: what is worth most first, then what is known."""

NEEDS_MORE = {
    "decoding with vLLM, share of the bandwidth": ("vLLM", 0.60),
    "weights of a 7B to a colocated vLLM": ("vLLM", 1.0),
    "weights over NCCL": ("several GPUs", None),
    "training with Megatron and Transformer Engine": ("Transformer Engine", None),
    "GRPO over TRL's with its own generation": ("TRL, and a script for its side", 3.0),
}
"""Figure -> what it needs that this script does without, and the goal."""


class Results:
    """The file of results: stages with their figures, and the machine.

    Args:
        file: Where it is, or will be.
        tiny: Whether it is of a demonstration.
    """

    def __init__(self, file: Path, *, tiny: bool) -> None:
        self._file = file
        here = {"is_tiny": tiny, "device": _device(tiny=tiny)}
        self.data: dict[str, Any] = {**here, "stages": {}, "machine": machine()}
        if not file.exists():
            return
        found: dict[str, Any] = json.loads(file.read_text())
        there = {key: found.get(key) for key in here}
        if there != here:
            raise SystemExit(
                f"{file} is of {there}, and this is {here}\n    give another --json FILE"
            )
        self.data = found

    def has(self, stage: str) -> bool:
        """Whether a stage is complete."""
        return bool(self.data["stages"].get(stage, {}).get("is_complete"))

    def write(self, stage: str, found: Mapping[str, Any]) -> None:
        """Put what is known of a stage in the file; a reader sees all of it or nothing."""
        self.data["stages"][stage] = dict(found)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(self.data, indent=2) + "\n")
        part.rename(self._file)

    def reread(self) -> None:
        """Take over what another process has written."""
        if self._file.exists():
            self.data = json.loads(self._file.read_text())


def _device(*, tiny: bool) -> str:
    return "cpu" if tiny else torch.cuda.get_device_name()


def run_stage(name: str, bench: Bench, results: Results) -> None:
    """Measure a stage in this process; each figure is in the file as soon as it is found."""
    began_s = time.perf_counter()
    found: dict[str, Any] = {"is_complete": False, "figures": []}
    results.write(name, found)
    try:
        for figure in STAGES[name].measure(bench):
            found["figures"].append(figure.as_data())
            results.write(name, found)
        found["is_complete"] = True
    except Exception as error:  # the other stages are measured all the same
        found["failed"] = f"{type(error).__name__}: {str(error)[:1000]}"
    found["seconds"] = time.perf_counter() - began_s
    results.write(name, found)
    gc.collect()


def run_apart(name: str, words: list[str], results: Results, limit_s: float) -> None:
    """Measure a stage in a process of its own; nothing of it is left when its time is over."""
    words = [*words, "--stage", name, "--here", "--again", "--limit-s", str(limit_s)]
    command = [sys.executable, str(Path(__file__).resolve()), *words]
    child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        child.wait(limit_s)
        ended = f"its process ended with {child.returncode}"
    except subprocess.TimeoutExpired:
        ended = f"it took more than {limit_s:.0f} s"
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    results.reread()
    found = results.data["stages"].setdefault(name, {"is_complete": False, "figures": []})
    if not found["is_complete"] and "failed" not in found:
        results.write(name, {**found, "failed": ended})


def main() -> int:
    """Measure what is missing, and print all there is."""
    args = _arguments()
    with tempfile.TemporaryDirectory() as scratch:
        file = args.json or Path(scratch) / "gpu.json"
        results = Results(file, tiny=args.tiny)
        bench = Bench(scale(tiny=args.tiny), args.smollm2, args.runs, args.limit_s)
        words = ["--json", str(file)]
        words += ["--smollm2", str(args.smollm2)] if args.smollm2 else []
        words += ["--runs", str(args.runs)] if args.runs else []
        began_s = time.monotonic()
        for name in args.stage or STAGES:
            left_s = args.limit_s - (time.monotonic() - began_s)
            if results.has(name) and not args.again:
                continue
            if args.here:
                run_stage(name, bench, results)
            elif left_s < min(STAGES[name].limit_s, args.limit_s) / 2:
                results.write(name, {"is_complete": False, "figures": [],
                                     "failed": f"not begun: {left_s:.0f} s were left"})  # fmt: skip
            else:
                run_apart(name, words, results, min(left_s, STAGES[name].limit_s))
            print(f"{name}: {_outcome(results.data['stages'][name])}", flush=True)
        print(text_of(results.data))
    return int(any("failed" in found for found in results.data["stages"].values()))


def _arguments() -> argparse.Namespace:
    options = parser((__doc__ or "").splitlines()[0])
    options.add_argument("--stage", nargs="+", choices=list(STAGES), help="these stages only")
    options.add_argument("--again", action="store_true", help="also what the file has already")
    options.add_argument("--limit-s", type=float, default=LIMIT_S, help="for all stages together")
    options.add_argument("--smollm2", type=Path, help="a folder with SmolLM2-135M-Instruct")
    options.add_argument("--runs", type=Path, help="where runs and a profile are kept")
    options.add_argument("--here", action="store_true", help="stages in this process")
    options.add_argument("--tiny", action="store_true", help="a demonstration on the CPU")
    args = options.parse_args()
    args.here = args.here or args.tiny
    if args.tiny:
        torch.set_num_threads(1)  # a model of this size gains nothing from more
    if not args.tiny and not torch.cuda.is_available():
        options.error("torch finds no CUDA device here; --tiny runs on the CPU")
    return args


def _outcome(found: Mapping[str, Any]) -> str:
    return found.get("failed") or f"{len(found['figures'])} figures, {found['seconds']:.1f} s"


def text_of(data: Mapping[str, Any]) -> str:
    """All figures as a table, those without a value at its end."""
    rows: list[list[str]] = []
    missing: list[list[str]] = []
    for name, found in data["stages"].items():
        for one in found["figures"]:
            cells = [name, one["name"], _number(one), _goal(one), one["open"] or _said(one)]
            (missing if one["open"] else rows).append(cells)
        if "failed" in found:
            missing.append([name, "(the stage)", "open", "", found["failed"]])
    for figure, (needs, goal) in NEEDS_MORE.items():
        text = "" if goal is None else f"{goal:g}"
        missing.append(["-", figure, "open", text, f"needs {needs}"])
    return table(["stage", "figure", "value", "goal", ""], [*rows, *missing])


def _number(one: Mapping[str, Any]) -> str:
    value = one["value"]
    if value is None:
        return "open" if one["open"] else "-"
    return f"{value:,.0f} {one['unit']}" if value >= 1000 else f"{value:.3g} {one['unit']}"


def _goal(one: Mapping[str, Any]) -> str:
    return "" if one["goal"] is None else f"{'<=' if one['most'] else '>='} {one['goal']:g}"


def _said(one: Mapping[str, Any]) -> str:
    return {None: "", True: "met", False: "missed"}[one["is_met"]]


if __name__ == "__main__":
    sys.exit(main())
