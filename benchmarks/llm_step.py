"""A GRPO step of a real language model here and with TRL: samples per second and peak memory.

SmolLM2-135M-Instruct on `task=instructions`: 12 prompts x 8 samples x at most 40 new tokens at
temperature 0.8, one AdamW update per step at a learning rate of 1e-5, no KL term, the loss averaged
over the tokens of a response and then over responses. Each side trains in a process of its own,
in turns, one at a time, two threads, on the same weights, the same prompts in the same order with
the same tokens, and the same reward. Steps are timed after one warm-up step; imports, model
building, the first table and saving are not in the time. Peak memory is that of the whole process;
ours includes the checkpoint and the model that it saves at its end, TRL's saving is off.

Ours is the run of `make smollm2` (`experiment=smollm2`): master weights, gradients and moments in
float32, products in bfloat16 where the CPU is faster so. TRL's are

- "trl bfloat16": weights, gradients and moments in bfloat16 (`ratio`, `memory_ratio`);
- "trl float32": all in float32 (`ratio_float32`, `memory_ratio_float32`);
- "trl autocast": weights in float32, products in bfloat16 (`ratio_autocast`, ...).

They train on 16 rows at once, which was as fast as 96 and took a third of the memory; gradient
checkpointing, logging and saving are off. `--tune` measures 16, 48 and 96 rows for each of them.

Two shares say how much room there is. `train_peak_share` is the FLOP that a step needs per second
of training, over the fastest matrix product measured on this CPU in the same precision. A step
needs, forward and backward (3 times forward): 2 FLOP per weight of the layers and distinct token
(each prompt counted once for its 8 samples), 2 per weight of the vocabulary's matrix and sampled
token, and 4 per pair of tokens that attend to each other, head, dimension and layer.
`decode_bandwidth_share` is the bytes of the weights times the tokens of the longest response per
second of generating (reading the prompts included), over the bytes per second that copying memory
reads and writes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bench import parser, report, table
from gpu_case import Meter, train_flops
from llm_case import (
    MAX_NEW_TOKENS,
    NUM_PROMPTS,
    NUM_SAMPLES,
    ROWS,
    Prompt,
    read_curve,
    write_case,
)
from llm_sides import Model, OursRun, job_of, prompts_of, run_ours, run_trl, updates_of, words
from penstock.launch.run_dir.samples import read_samples
from penstock.planner.inputs.model_shape import DTYPE_BYTES, shape_of

WARM_UP = 1
TIMEOUT_S = 3600.0
WEIGHTS = ("bfloat16", "float32", "autocast")
ROWS_AT_ONCE = 16
COPIED_FLOATS = 1 << 27  # 512 MiB, far more than a cache holds
MAX_LENGTH_DIFFERENCE = 0.1


def machine_peaks() -> dict[str, float]:
    """FLOP/s of products in either precision, and bytes copied per second; two threads."""
    torch.set_num_threads(2)
    meter, found = Meter("cpu"), dict[str, float]()
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        rates: list[float] = []
        for width in (1024, 2048, 4096):
            left = torch.randn(width, width).to(dtype)
            rates.append(2 * width**3 / meter.seconds(lambda left=left: left @ left))
        found[name] = max(rates)
    source, target = torch.ones(COPIED_FLOATS), torch.empty(COPIED_FLOATS)
    found["copied_bytes"] = 2 * source.nbytes / meter.seconds(lambda: target.copy_(source))
    return found


def shares(
    model: Model,
    run: OursRun,
    case: Sequence[Sequence[Prompt]],
    dtype: str,
    peaks: dict[str, float],
) -> dict[str, float]:
    """What our timed updates reach of what the machine can do; see the top of this file.

    Args:
        model: What was trained.
        run: The run.
        case: Its prompts.
        dtype: In which products are computed.
        peaks: Of `machine_peaks`.
    """
    architecture = json.loads((model.folder / "config.json").read_text())
    shape = shape_of(architecture, dtype=dtype)
    timed = updates_of(run)[WARM_UP:]
    flops = 0.0
    for update in timed:
        step = int(update["step"])
        rows = iter(read_samples(run.folder, [step]))
        responses = [[next(rows).length for _ in range(NUM_SAMPLES)] for _ in case[step]]
        flops += train_flops(shape, [prompt.num_tokens for prompt in case[step]], responses)
    weights_bytes = shape.active_params() * DTYPE_BYTES[dtype]
    read_bytes = weights_bytes * sum(update["longest"] for update in timed)
    train_s = sum(update["train_s"] for update in timed)
    generate_s = sum(update["generate_s"] for update in timed)
    return {
        "train_s": train_s / len(timed),
        "generate_s": generate_s / len(timed),
        "train_flop": flops / len(timed),
        "train_peak_share": flops / train_s / peaks[dtype],
        "decode_bandwidth_share": read_bytes / generate_s / peaks["copied_bytes"],
    }


def speed(updates: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of one process: samples per second of its timed updates, and the mean length."""
    timed = updates[WARM_UP:]
    return {
        "samples_per_s": ROWS * len(timed) / sum(update["seconds"] for update in timed),
        "each_update": [ROWS / update["seconds"] for update in timed],
        "length_mean": statistics.fmean(update["length"] for update in timed),
        "reward_mean": statistics.fmean(update["reward"] for update in timed),
    }


class Comparison:
    """Runs either side in a scratch folder.

    Args:
        folder: The scratch folder.
        model: What to train.
        num_updates: Timed updates of our side.
    """

    def __init__(self, folder: Path, model: Model, num_updates: int) -> None:
        self._folder, self._model, self._number = folder, model, 0
        self._typed = words(model, WARM_UP + num_updates, 0)
        job = job_of(self._typed)
        self.dtype = job.model.dtype
        self.case = prompts_of(job)

    def ours(self, peaks: dict[str, float]) -> dict[str, Any]:
        """One process of ours."""
        run = run_ours(self._scratch(), self._typed, TIMEOUT_S)
        found = shares(self._model, run, self.case, self.dtype, peaks)
        return speed(updates_of(run)) | {"peak_rss_mib": run.peak_rss_mib} | found

    def trl(self, weights: str, num_updates: int, rows_at_once: int) -> dict[str, Any]:
        """One process of TRL's."""
        scratch = self._scratch()
        scratch.mkdir()
        case, curve = scratch / "case.json", scratch / "curve.jsonl"
        write_case(case, self.case[: WARM_UP + num_updates])
        options = ["--weights", weights, "--rows-at-once", str(rows_at_once)]
        versions = run_trl(self._model, case, curve, options, TIMEOUT_S)
        updates = read_curve(curve)
        return speed(updates) | {"peak_rss_mib": updates[-1]["peak_rss_mib"]} | versions

    def _scratch(self) -> Path:
        self._number += 1
        return self._folder / str(self._number)


def summed_up(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Side -> medians over its processes, and the least and most of any update; and the ratios.

    Raises:
        RuntimeError: If mean lengths differ so much that speeds cannot be compared.
    """
    sides: dict[str, dict[str, Any]] = {}
    for side, done in runs.items():
        each = [rate for run in done for rate in run["each_update"]]
        medians = {
            key: statistics.median(run[key] for run in done)
            for key in ("samples_per_s", "peak_rss_mib", "length_mean", "reward_mean")
        }
        sides[side] = {**medians, "slowest_update": min(each), "fastest_update": max(each)}
    ours, result = sides["ours"], dict[str, Any]()
    for weights in WEIGHTS:
        other = sides.get(f"trl {weights}")
        if other is None:
            continue
        if abs(ours["length_mean"] / other["length_mean"] - 1) > MAX_LENGTH_DIFFERENCE:
            raise RuntimeError(f"mean lengths differ by more than 10 %: {sides}; not comparable")
        name = "" if weights == WEIGHTS[0] else f"_{weights}"
        result[f"ratio{name}"] = ours["samples_per_s"] / other["samples_per_s"]
        result[f"memory_ratio{name}"] = ours["peak_rss_mib"] / other["peak_rss_mib"]
    for key in ("train_peak_share", "decode_bandwidth_share", "train_s", "generate_s"):
        result[key] = statistics.median(run[key] for run in runs["ours"])
    return {**result, "sides": sides}


def compare(args: argparse.Namespace, comparison: Comparison) -> dict[str, Any]:
    """Every side in turns; prints the table."""
    peaks = machine_peaks()
    runs: dict[str, list[dict[str, Any]]] = {"ours": []}
    for _ in range(args.rounds):
        runs["ours"].append(comparison.ours(peaks))
        for weights in args.weights:
            done = runs.setdefault(f"trl {weights}", [])
            done.append(comparison.trl(weights, args.trl_updates, ROWS_AT_ONCE))
    found = summed_up(runs)
    head = ["side", "samples/s", "slowest", "fastest update", "peak MiB", "length", "reward"]
    print(table(head, [[side, *_cells(values)] for side, values in found["sides"].items()]))
    print(
        f"products {peaks['bfloat16'] / 1e9:.0f} GFLOP/s in bfloat16 and "
        f"{peaks['float32'] / 1e9:.0f} in float32, copies {peaks['copied_bytes'] / 1e9:.1f} GB/s, "
        "all measured"
    )
    print({key: round(value, 3) for key, value in found.items() if isinstance(value, float)})
    return {**found, "peaks": peaks, "dtype": comparison.dtype, "runs": runs}


def _cells(side: dict[str, Any]) -> list[str]:
    keys = ("samples_per_s", "slowest_update", "fastest_update")
    rates = [f"{side[key]:.2f}" for key in keys]
    return [
        *rates,
        f"{side['peak_rss_mib']:.0f}",
        f"{side['length_mean']:.1f}",
        f"{side['reward_mean']:.2f}",
    ]


def tune(args: argparse.Namespace, comparison: Comparison) -> None:
    """Measure TRL with each kind of weights and 16, 48 and 96 rows at once."""
    rows: list[list[str]] = []
    for weights in args.weights:
        for rows_at_once in (16, 48, 96):
            got = comparison.trl(weights, args.trl_updates, rows_at_once)
            memory = f"{got['peak_rss_mib']:.0f}"
            rows.append([weights, str(rows_at_once), f"{got['samples_per_s']:.2f}", memory])
            print(*rows[-1], flush=True)
    print(table(["TRL's weights", "rows at once", "samples/s", "peak MiB"], rows))


def main() -> None:
    """Compare, print the table and the ratios."""
    options = parser((__doc__ or "").splitlines()[0])
    options.add_argument("--rounds", type=int, default=2, help="processes per side")
    options.add_argument("--updates", type=int, default=4, help="timed ones of each of ours")
    options.add_argument("--trl-updates", type=int, default=2, help="timed ones of each of TRL's")
    options.add_argument("--weights", nargs="+", choices=WEIGHTS, default=WEIGHTS[:2])
    options.add_argument("--model", type=Path, help="a folder of another model, to try this out")
    options.add_argument("--tune", action="store_true", help="measure TRL's settings instead")
    args = options.parse_args()
    updates = max(args.updates, args.trl_updates)
    with tempfile.TemporaryDirectory() as name:
        comparison = Comparison(Path(name), Model(args.model), updates)
        if args.tune:
            tune(args, comparison)
            return
        result = compare(args, comparison)
    size = {"prompts": NUM_PROMPTS, "samples_per_prompt": NUM_SAMPLES, "new_tokens": MAX_NEW_TOKENS}
    report({"compared": __doc__, **size, **result}, args.json)


if __name__ == "__main__":
    main()
