"""Conversations with tools that take their time: how close to the ideal, what is reused, and TRL.

A conversation is a few turns of a policy; in each it says 10 words and more, the number drawn from
a geometric distribution, and calls a tool, whose answer it is shown before the next. The model is a
small Qwen2 that talks so by its weights, without a hook on any side (`chain_folder`).

`share_of_ideal`: 64 conversations of 6 turns are held at once, and each answer of a tool takes 0 to
500 ms, drawn for each conversation and turn. The ideal time over the measured one, the median over
rounds. The ideal is what generating takes where no tool has a wait, or the longest chain of
dependent work if that is longer: over conversations, the sum of its own waits and of its own
sampled tokens times the time per token. Both come from a call of `converse` with the same random
numbers and no waits, just before: the time of that call, and that time over the sampled tokens of
the conversation that has most. So reading prompts and answers is in the time per token, and all 64
are in the batch that it is measured with. An engine whose steps are shorter while some wait, as
vLLM's are, may come to more than 1.

`prefix_reused`: of the tokens before a second or later turn that an earlier turn of the same
conversation has read or sampled, the share that was not computed again. vLLM finds whole blocks of
32 tokens, so what ends in the middle of one is computed again; and of what an earlier turn sampled,
no engine holds the last token. Weights are loaded anew before each call, as in a run, and what
conversations share in their first turns does not count. The metric of the same name divides by all
tokens that are read, the first turns' and new ones included (`metric`).

`ratio`: seconds that the conversations of an update take with TRL's `GRPOTrainer` and an
`environment_factory`, over those that they take here with GRPO and the torch engine, in-process;
that is the ratio of conversations per second. 16 questions x 4 samples x 4 turns, the same
folder of weights and tokenizer, the same chat template, schema of the tool and answers, temperature
1, float32. An answer takes 0 to 100 ms (`ratio`), or, in every second update, no time
(`ratio_no_waits`). TRL awaits the calls of one conversation after those of another, and begins the
next turns when all are there; each turn it computes the whole text again. It generates with
Hugging Face's dynamic cache, its default; with a static one, or with continuous batching, three
updates on one thread had not ended after 150 s, tried once each. `step_ratio` and
`step_ratio_no_waits` are of whole updates, training included; TRL trains on 16 rows at once. Each
side is a process of its own, the two in turns; the first update is not counted, nor are imports
and model building. What each samples is random, so mean lengths may differ by 10 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from agents_case import LONGEST_S, NUM_PROMPTS, NUM_SAMPLES, NUM_TURNS, WARM_UP
from agents_ideal import ENGINES, Held, ideal_s, talk_of
from agents_task import chain_folder
from bench import parser, report, spread, table
from vs_trl import trl_python

HERE = Path(__file__).resolve().parent
HIDDEN, LAYERS = 192, 2
NUM_CONVERSATIONS, MOST_TURNS, TOOL_S = 64, 6, 0.5
SIDES = ("ours", "trl")
TIMEOUT_S = 900.0


def held_with(engine: str, folder: Path, rounds: int) -> list[tuple[Held, Held]]:
    """Calls without waits and with them, in turns, after one that is not counted."""
    given = (engine, folder, NUM_CONVERSATIONS, MOST_TURNS, TOOL_S)
    with talk_of(*given) as talk:
        talk.hold(waits=False)
        return [(talk.hold(waits=False), talk.hold(waits=True)) for _ in range(rounds)]


def of_engine(pairs: Sequence[tuple[Held, Held]]) -> dict[str, Any]:
    """What an engine's calls come to."""
    ideals = [ideal_s(held, together.seconds) for together, held in pairs]
    shares = [ideal / held.seconds for ideal, (_, held) in zip(ideals, pairs, strict=True)]
    waiting = [held for _, held in pairs]
    return {
        "share_of_ideal": statistics.median(shares),
        "each_share": shares,
        "no_waits_s": spread([together.seconds for together, _ in pairs]),
        "waits_s": spread([held.seconds for held in waiting]),
        "ideal_s": spread(ideals),
        "longest_wait_s": max(waiting[0].wait_s),
        "mean_wait_s": statistics.fmean(waiting[0].wait_s),
        "tokens": spread(waiting[0].own_tokens),
        "prefix_reused": sum(h.reused for h in waiting) / sum(h.known for h in waiting),
        "metric": statistics.median(held.prefix_reused for held in waiting),
    }


def measure(side: str, folder: Path, updates: int, threads: int) -> dict[str, Any]:
    """Run one process and read its measurement.

    Raises:
        RuntimeError: If the process fails; the end of what it wrote is in the message.
    """
    python = trl_python() if side == "trl" else Path(sys.executable)
    out = folder / f"{side}.json"
    command = [python, HERE / f"agents_{side}_side.py", folder, out, "--threads", str(threads)]
    done = subprocess.run(
        [*command, "--updates", str(updates)],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        cwd=folder,
        env=os.environ | {"TRL_EXPERIMENTAL_SILENCE": "1"},
    )
    if done.returncode:
        raise RuntimeError(f"{side} failed:\n{done.stderr[-3000:]}")
    return json.loads(out.read_text())


def against_trl(folder: Path, rounds: int, updates: int, threads: int) -> dict[str, Any]:
    """Both sides in turns: seconds by kind of update, and ratios.

    Raises:
        RuntimeError: If mean lengths differ so much that times cannot be compared.
    """
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side, done in runs.items():
            done.append(measure(side, folder, WARM_UP + updates, threads))
            print(side, done[-1]["steps"], flush=True)
    length = {side: statistics.fmean(run["mean_tokens"] for run in runs[side]) for side in SIDES}
    if abs(length["ours"] / length["trl"] - 1) > 0.1:
        raise RuntimeError(f"mean lengths differ by more than 10 %: {length}; not comparable")
    result: dict[str, Any] = {"mean_tokens": length, "runs": runs}
    for first, kind in enumerate(("waits", "no_waits")):  # updates after the warm-up alternate
        for what in ("rollout_s", "step_s"):
            times = {
                side: [step[what] for run in runs[side] for step in run["steps"][first::2]]
                for side in SIDES
            }
            result[f"{kind}_{what}"] = {side: spread_of(times[side]) for side in SIDES}
            ours, other = (statistics.median(times[side]) for side in SIDES)
            name = ("" if what == "rollout_s" else "step_") + "ratio"
            result[name + ("" if kind == "waits" else "_no_waits")] = other / ours
    return result


def spread_of(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most: there are few."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def show_engines(found: dict[str, dict[str, Any]]) -> None:
    """Print the table of the engines."""
    rows: list[list[str]] = []
    for engine, one in found.items():
        times = [f"{one[key]['median']:.2f}" for key in ("no_waits_s", "waits_s", "ideal_s")]
        shares = [f"{one['share_of_ideal']:.3f}", f"{min(one['each_share']):.3f}"]
        shares += [f"{max(one['each_share']):.3f}"]
        reused = [f"{one['prefix_reused']:.3f}", f"{one['metric']:.3f}"]
        waits = f"{one['mean_wait_s']:.2f}, {one['longest_wait_s']:.2f}"
        rows.append([engine, *times, waits, *shares, *reused])
    head = ["engine", "s without waits", "s with waits", "ideal s", "waits mean, most s"]
    head += ["share of ideal", "least", "most", "prefix reused", "metric"]
    print(f"\n{NUM_CONVERSATIONS} conversations, {MOST_TURNS} turns\n{table(head, rows)}")


def show_trl(found: dict[str, Any]) -> None:
    """Print the table of the two sides."""
    num, rows = NUM_PROMPTS * NUM_SAMPLES, list[list[str]]()
    for kind in ("waits", "no_waits"):
        for side in SIDES:
            rollout, step = found[f"{kind}_rollout_s"][side], found[f"{kind}_step_s"][side]
            cells = [f"{rollout['least']:.2f}-{rollout['most']:.2f}"]
            cells += [f"{num / rollout['median']:.2f}", f"{step['median']:.2f}"]
            length = f"{found['mean_tokens'][side]:.1f}"
            rows.append([kind, side, f"{rollout['median']:.2f}", *cells, length])
        end = "" if kind == "waits" else "_no_waits"
        ratio, step = found[f"ratio{end}"], found[f"step_ratio{end}"]
        rows.append([kind, "ratio", "", "", f"{ratio:.2f}", f"{step:.2f}", ""])
    head = ["tools", "side", "rollout s", "least-most", "conversations/s", "update s", "tokens"]
    print(f"\n{num} conversations, {NUM_TURNS} turns\n{table(head, rows)}")


def main() -> None:
    """Measure what is asked for and print the tables."""
    options: argparse.ArgumentParser = parser((__doc__ or "").splitlines()[0])
    options.add_argument("--engines", nargs="*", choices=ENGINES, default=ENGINES)
    options.add_argument("--rounds", type=int, default=3, help="with and without waits, an engine")
    options.add_argument("--trl-rounds", type=int, default=2, help="processes a side; 0 for none")
    options.add_argument("--updates", type=int, default=2, help="timed ones of each; 2 or more")
    options.add_argument("--threads", type=int, default=2)
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    result: dict[str, Any] = {"compared": __doc__, "model": {"hidden": HIDDEN, "layers": LAYERS}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chain_folder(folder, hidden=HIDDEN, layers=LAYERS)
        engines = {each: of_engine(held_with(each, folder, args.rounds)) for each in args.engines}
        if engines:
            show_engines(engines)
            result |= {
                "engines": engines,
                "share_of_ideal": {name: one["share_of_ideal"] for name, one in engines.items()},
                "prefix_reused": {name: one["prefix_reused"] for name, one in engines.items()},
            }
        if args.trl_rounds:
            found = against_trl(folder, args.trl_rounds, args.updates, args.threads)
            show_trl(found)
            result |= found | {"longest_tool_s": LONGEST_S}
    report(result, args.json)


if __name__ == "__main__":
    main()
