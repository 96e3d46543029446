"""What each schedule makes of two cores: one generates, one trains, with heavy-tailed lengths.

GRPO on Ray, 32 prompts x 4 samples per step, one update per step. Two processes of one CPU thread
each: an engine that samples, and the trainer, which also scores. Lengths are a log-normal whose
longest of 128 is 8 times the mean, independent in each row, and the same for all schedules; see
`asynchrony_case.py`. The sizes are chosen so that generating and training take about equally long.
The schedules run in turns, a few steps of each per round, with all their processes up; steps are
timed when they are handed to the caller, after warm-up steps that every turn begins with.

`streaming_speedup`: how many times as long a synchronous step takes as a streaming one, the median
over pairs of the same step, whose lengths are the same; with its quartiles.

`share_of_ideal`: the time that a schedule's steps would take if nothing but generating and training
took any, over the time that they took. Generation of step s begins when that of step s - 1 has
ended and the weights of step s - 1 - k are there; training when that of step s - 1 and generation
of step s have ended. What both take is what they took in the same turn, so with the other core as
busy as that schedule keeps it. All that the scheduler, Ray, publishing and loading weights cost is
not in the ideal. A median over rounds. Streaming has none: it has no stages.

`share_of_slower`: the mean time of the slower stage over the mean time of a step.

"partial" is one-step-off with responses that grow by at most twice the mean length in a step. Its
steps train on the rows that have ended, more or fewer than 128, so that schedules are compared by
rows per second. No step's longest response holds it up, and what is unfinished when a turn ends is
not counted.

`--timeline` prints what the two cores did in the last step of each schedule.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from asynchrony_case import CASES, NUM_PROMPTS, NUM_SAMPLES, Case, NumberedPrompts
from bench import parser, report, spread, table
from penstock.algorithms.grpo import grpo_step
from penstock.dataflow.graph.graph import Graph
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime.engine import Engine, StepResult
from penstock.dataflow.runtime.placement import DeviceGroup, Placement
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.workers.executors.on_ray.executor import RayExecutor, shutdown_ray

GENERATE, TRAIN = "actor.generate", "actor.train"
WARM_UP = 3
PARTS = NUM_PROMPTS // 2
SYNCHRONOUS, STREAMING = "synchronous", "streaming"


def schedules(parts: int, mean_tokens: int) -> dict[str, Schedule]:
    """What is compared, in the order of the table.

    Args:
        parts: In which a step's groups flow on where they stream.
        mean_tokens: Mean length of a response.
    """
    return {
        SYNCHRONOUS: Schedule(),
        STREAMING: Schedule(streaming=parts),
        "one-step-off": Schedule(max_lag=1),
        "k=4": Schedule(max_lag=4),
        "partial": Schedule(max_lag=1, segment_tokens=2 * mean_tokens),
    }


@dataclass(frozen=True)
class Turn:
    """Some steps of one schedule, one after another.

    Attributes:
        max_lag: The schedule's.
        steps: What each reported.
        done_s: When each was handed over.
    """

    max_lag: int
    steps: Sequence[StepResult]
    done_s: Sequence[float]

    @property
    def step_s(self) -> list[float]:
        """How long after the one before it each timed step was there."""
        return [end - start for start, end in pairwise(self.done_s[WARM_UP - 1 :])]

    @property
    def rows_per_s(self) -> float:
        """Rows trained on in a second of the timed steps."""
        rows = sum(step.num_rows.get(GENERATE, 0) for step in self.steps[WARM_UP:])
        return rows / sum(self.step_s)

    @property
    def generate_s(self) -> list[float]:
        """What generating took, of every step."""
        return [busy(step, generating=True) for step in self.steps]

    @property
    def train_s(self) -> list[float]:
        """What training and all that leads to it took, of every step."""
        return [busy(step, generating=False) for step in self.steps]

    @property
    def share_of_ideal(self) -> float:
        """See the top of this file; timed steps."""
        ends = ideal(self.generate_s, self.train_s, self.max_lag)
        return (ends[-1] - ends[WARM_UP - 1]) / sum(self.step_s)

    @property
    def share_of_slower(self) -> float:
        """See the top of this file; timed steps."""
        slower = max(statistics.fmean(x[WARM_UP:]) for x in (self.generate_s, self.train_s))
        return slower / statistics.fmean(self.step_s)


def busy(step: StepResult, *, generating: bool) -> float:
    """Seconds that the tasks of a step took, those that generate or all others."""
    own = [span for span in step.spans if (span.node == GENERATE) == generating]
    return sum(span.end_s - span.start_s for span in own)


def ideal(generate_s: Sequence[float], train_s: Sequence[float], max_lag: int) -> list[float]:
    """When each step ends if two stages wait for nothing but each other.

    Args:
        generate_s: What generating takes, by step.
        train_s: What training takes.
        max_lag: Versions by which the weights that generate may be behind.

    Example:
        >>> ideal([2, 2, 2], [1, 3, 1], 0), ideal([2, 2, 2], [1, 3, 1], 1)
        ([3.0, 8.0, 11.0], [3.0, 7.0, 8.0])
    """
    generated_s, ends = 0.0, list[float]()
    for step, (g, t) in enumerate(zip(generate_s, train_s, strict=True)):
        needed = step - 1 - max_lag
        weights_s = ends[needed] if needed >= 0 else 0.0
        generated_s = max(generated_s, weights_s) + g
        ends.append(max(generated_s, ends[-1] if ends else 0.0) + t)
    return ends


def placement(graph: Graph) -> Placement:
    """Generation on a group of one process, all else on another."""
    names = [node.name for node in graph.nodes if node.name not in graph.sources]
    nodes = {name: "rollout" if name == GENERATE else "train" for name in names}
    return Placement((DeviceGroup("train"), DeviceGroup("rollout")), nodes)


class Comparison:
    """The engines of all schedules, up at the same time.

    Args:
        case: What they run.
        chosen: The schedules.
    """

    def __init__(self, case: Case, chosen: dict[str, Schedule]) -> None:
        self._case, graph = case, build(grpo_step, cfg=case.grpo)
        self._engines = {
            name: Engine(
                graph,
                placement(graph),
                workers=case.workers,
                schedule=schedule,
                executor=RayExecutor(1),
            )
            for name, schedule in chosen.items()
        }

    def turns(self, num_rounds: int, num_steps: int) -> dict[str, list[Turn]]:
        """Schedule -> its turns, one in each round."""
        found: dict[str, list[Turn]] = {name: [] for name in self._engines}
        with ExitStack() as stack:
            for engine in self._engines.values():
                stack.enter_context(engine)
            for number in range(num_rounds):
                first = number * (WARM_UP + num_steps)
                source = NumberedPrompts(self._case.prompt_tokens, first)
                for name, engine in self._engines.items():
                    found[name].append(_turn(engine, source, WARM_UP + num_steps))
                    print(_line(number, name, found[name][-1]), flush=True)
        return found


def _turn(engine: Engine, source: NumberedPrompts, num_steps: int) -> Turn:
    steps: list[StepResult] = []
    done_s: list[float] = []
    for step in engine.run({"prompts": source}, num_steps):
        steps.append(step)
        done_s.append(time.perf_counter())
    return Turn(engine.schedule.max_lag, steps, done_s)


def _line(number: int, name: str, turn: Turn) -> str:
    return (
        f"round {number}, {name}: {statistics.fmean(turn.step_s):.2f} s per step, "
        f"generating {statistics.fmean(turn.generate_s[WARM_UP:]):.2f}, "
        f"training {statistics.fmean(turn.train_s[WARM_UP:]):.2f}"
    )


def timeline(turn: Turn) -> str:
    """What each task of the last step did, in seconds after the first began."""
    spans = sorted(turn.steps[-1].spans, key=lambda span: (span.end_s, span.start_s))
    first = min(span.start_s for span in spans)
    rows = [
        [span.node, "" if span.chunk is None else span.chunk, f"{span.start_s - first:.3f}",
         f"{span.end_s - first:.3f}", f"{1e3 * (span.end_s - span.start_s):.0f}"]
        for span in spans
    ]  # fmt: skip
    return table(["task", "part", "from", "to", "ms"], rows)


def summed_up(turns: dict[str, list[Turn]]) -> dict[str, Any]:
    """Schedule -> its figures, and what they come to."""
    found: dict[str, Any] = {}
    for name, own in turns.items():
        found[name] = {
            "step_s": spread([s for turn in own for s in turn.step_s]),
            "rows_per_s": statistics.median(turn.rows_per_s for turn in own),
            "generate_s": statistics.fmean(s for turn in own for s in turn.generate_s[WARM_UP:]),
            "train_s": statistics.fmean(s for turn in own for s in turn.train_s[WARM_UP:]),
            "share_of_slower": statistics.median(turn.share_of_slower for turn in own),
            "each_step_s": [turn.step_s for turn in own],
        }
        if name != STREAMING:
            shares = [turn.share_of_ideal for turn in own]
            found[name] |= {"share_of_ideal": statistics.median(shares), "each_share": shares}
    ratios = [
        one / other
        for before, after in zip(turns[SYNCHRONOUS], turns[STREAMING], strict=True)
        for one, other in zip(before.step_s, after.step_s, strict=True)
    ]
    return {
        "streaming_speedup": statistics.median(ratios),
        "streaming_speedup_spread": spread(ratios),
        "share_of_ideal": {
            name: one["share_of_ideal"] for name, one in found.items() if "share_of_ideal" in one
        },
        "share_of_slower": found["k=4"]["share_of_slower"],
        "schedules": found,
    }


def show(name: str, result: dict[str, Any]) -> None:
    """Print the table of an engine."""
    rows: list[list[str]] = []
    base = result["schedules"][SYNCHRONOUS]["rows_per_s"]
    for schedule, one in result["schedules"].items():
        step = one["step_s"]
        share = f"{one['share_of_ideal']:.3f}" if "share_of_ideal" in one else ""
        cells = [f"{step['median']:.2f}", f"{step['quartile_1']:.2f}-{step['quartile_3']:.2f}"]
        cells += [f"{one['rows_per_s']:.1f}", f"{one['rows_per_s'] / base:.2f}"]
        cells += [f"{one['generate_s']:.2f}"]
        rows.append([schedule, *cells, f"{one['train_s']:.2f}", share])
    head = ["schedule", "s/step", "quartiles", "rows/s", "faster", "generate s", "train s"]
    head += ["of ideal"]
    ratio = result["streaming_speedup_spread"]
    print(f"\n{name} generates\n{table(head, rows)}")
    print(
        f"streaming, step by step: {ratio['median']:.2f} times as fast as synchronous (quartiles "
        f"{ratio['quartile_1']:.2f}-{ratio['quartile_3']:.2f}); a step of k=4 is "
        f"{result['share_of_slower']:.3f} of it the slower stage\n"
    )


def measure(args: argparse.Namespace, engine: str) -> dict[str, Any]:
    """All schedules with one engine; prints their table."""
    case = CASES[engine]
    turns = Comparison(case, schedules(args.parts, case.mean_tokens)).turns(args.rounds, args.steps)
    if args.timeline:
        for name, own in turns.items():
            print(f"\n{name}\n{timeline(own[-1])}")
    result = summed_up(turns)
    show(engine, result)
    return {**result, "parts": args.parts, "case": asdict(case)}


def main() -> None:
    """Run the schedules and print what they come to."""
    options = parser(__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--engine", choices=[*CASES, "both"], default="both")
    options.add_argument("--steps", type=int, default=6, help="timed steps of a turn")
    options.add_argument("--rounds", type=int, default=4, help="turns of each schedule")
    options.add_argument("--parts", type=int, default=PARTS, help="in which a step streams")
    options.add_argument("--timeline", action="store_true", help="print a step of each schedule")
    args = options.parse_args()
    engines = list(CASES) if args.engine == "both" else [args.engine]
    result: dict[str, Any] = {"rows_per_step": NUM_PROMPTS * NUM_SAMPLES}
    try:
        for engine in engines:
            result[engine] = measure(args, engine)
    finally:
        shutdown_ray()
    report(result, args.json)


if __name__ == "__main__":
    main()
