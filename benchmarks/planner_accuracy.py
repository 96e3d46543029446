"""Step times as the planner predicts them, against steps as they run, in two placements each.

The steps are those of `planner_accuracy_case.py`: PPO and GRPO on two ranks of this machine, on
Ray, either split (actor and reference on one rank, the others on the other) or with everything on
both. What a machine gives changes from minute to minute, so calibration and measurement are
interleaved: a step of one placement, a step of the other, each call of a calibration once, and
again. The calls are those of `penstock profile`, at the two of its widths next to the step's;
peaks, links and the dispatch of a call come from `penstock profile` at the beginning.

Ends with exit code 1 if the mean error is above 10 %, an error above 20 %, or if the planner names
the wrong one of two placements that differ by more than 10 %. Needs a machine that does nothing
else.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from bench import parser, report, table
from penstock.configs.schema import ProfileConfig
from penstock.dataflow.runtime.engine import Engine
from penstock.launch.profile.profile import profile
from penstock.launch.profile.rank import calls_of_width
from penstock.launch.stages.stage_result import node_seconds
from penstock.planner.cost.calibration import Calibration, Constants
from penstock.planner.cost.calibration_fit import fit_constants
from penstock.planner.cost.engine_model import RoleEngines
from penstock.planner.inputs.cluster import ClusterSpec
from penstock.planner.plan.plan import Plan, Prediction
from penstock.planner.plan.planner import plan_step
from penstock.workers.engines.torch_engine.declaration import TORCH
from penstock.workers.executors.on_ray.executor import RayExecutor, shutdown_ray
from planner_accuracy_case import CASES, Case
from planner_accuracy_ranks import CalibrationRanks

MEAN_ERROR, MOST_ERROR = 0.1, 0.2
WIDTHS = (64, 128, 256, 512)
"""Of the models that are timed for a calibration."""
DIFFERENT = 0.1
"""Share of the step time by which two placements must differ to be told apart."""
WARM_UP = 1
ROWS = 16
"""Of a timed training call, as `penstock profile` has it."""


@dataclass
class Measured:
    """One placement of a case, as it ran and as it was predicted."""

    plan: Plan
    steps_s: list[float] = field(default_factory=list[float])
    nodes_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    @property
    def prediction(self) -> Prediction:
        """Of the plan."""
        assert self.plan.prediction is not None
        return self.plan.prediction

    @property
    def predicted_s(self) -> float:
        """Of a step."""
        return self.prediction.step_time_s

    @property
    def measured_s(self) -> float:
        """Median of the steps."""
        return statistics.median(self.steps_s)

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1.0

    def as_data(self) -> dict[str, Any]:
        """For the result file."""
        predicted = self.prediction.durations_s
        return {
            "predicted_s": self.predicted_s,
            "measured_s": self.measured_s,
            "error": self.error,
            "steps_s": self.steps_s,
            "nodes": {
                name: {"predicted_s": predicted.get(name), "measured_s": statistics.median(taken)}
                for name, taken in self.nodes_s.items()
            },
        }


def planned(case: Case, cluster: ClusterSpec, constants: Constants) -> dict[str, Plan]:
    """The best plan of a case with each placement."""
    models = dict.fromkeys(case.workers(), case.shape)
    return {
        name: plan_step(
            case.graph(),
            models,
            cluster,
            case.workload,
            max_lag=0,
            constants=constants,
            engines=RoleEngines(TORCH.planned),
            pins=pins,
        )
        for name, pins in case.pins.items()
    }


def run(case: Case, found: Mapping[str, Measured], ranks: CalibrationRanks, num_steps: int) -> None:
    """Run all placements of a case, a step of each in turn, and the calls of a calibration."""
    engines = {
        name: Engine(
            (graph := case.graph()),
            one.plan.placement(graph),
            workers=case.workers(),
            executor=RayExecutor(num_threads=1),
        )
        for name, one in found.items()
    }
    total = num_steps + WARM_UP
    try:
        streams = {name: e.run({"prompts": case}, total) for name, e in engines.items()}
        for step in range(total):
            for name, stream in streams.items():
                begin = time.perf_counter()
                result = next(stream)
                taken = time.perf_counter() - begin
                if step >= WARM_UP:
                    found[name].steps_s.append(taken)
                    for node, seconds in node_seconds(result.spans).items():
                        found[name].nodes_s.setdefault(node, []).append(seconds)
            if step >= WARM_UP:
                ranks.sample()
    finally:
        for engine in engines.values():
            engine.close()


def widths_of(case: Case) -> tuple[int, int]:
    """The two widths that a calibration for a case is made at."""
    upper = next((i for i, width in enumerate(WIDTHS) if width >= case.shape.hidden_size), -1)
    upper = max(upper % len(WIDTHS), 1)
    return WIDTHS[upper - 1], WIDTHS[upper]


def compared(case: Case, machine: Calibration, num_steps: int) -> dict[str, Any]:
    """Run, calibrate and predict one case both ways, and print it."""
    calls = [c for width in widths_of(case) for c in calls_of_width(width, ROWS, case.dtype)]
    plans = planned(case, machine.cluster, machine.constants)
    found = {name: Measured(plan) for name, plan in plans.items()}
    ranks = CalibrationRanks(calls)
    try:
        run(case, found, ranks, num_steps)
    finally:
        ranks.close()
    timed = [c.timed(taken) for c, taken in zip(calls, ranks.medians_s, strict=True)]
    fit = fit_constants(timed, machine.cluster, machine.constants, TORCH.planned)
    constants = fit.found.at(case.shape.hidden_size)
    for name, plan in planned(case, machine.cluster, constants).items():
        assert plan.placement(case.graph()) == plans[name].placement(case.graph())
        found[name].plan = plan
    return {**_compared(case, found), "constants": fit.found.model_dump(mode="json")}


def _compared(case: Case, found: Mapping[str, Measured]) -> dict[str, Any]:
    predicted = min(found, key=lambda name: found[name].predicted_s)
    measured = sorted(found, key=lambda name: found[name].measured_s)
    fast, slow = (found[name].measured_s for name in measured)
    print(f"\n{case.name}: {predicted} should be faster, {measured[0]} is")
    data = {name: one.as_data() for name, one in found.items()}
    print(table(["node", "placement", "predicted s", "measured s", "error"], [
        [node, name, *_times(times["predicted_s"], times["measured_s"])]
        for name, one in data.items()
        for node, times in [*one["nodes"].items(), ("the step", one)]
    ]), flush=True)  # fmt: skip
    return {
        "case": case.name,
        "placements": data,
        "faster_predicted": predicted,
        "faster_measured": measured[0],
        "differ_by": slow / fast - 1.0,
        "named_right": predicted == measured[0] or slow / fast - 1.0 <= DIFFERENT,
    }


def _times(predicted: float | None, measured: float) -> list[str]:
    if predicted is None:
        return ["-", f"{measured:.3f}", "-"]
    return [f"{predicted:.3f}", f"{measured:.3f}", f"{predicted / measured - 1:+.0%}"]


def summary(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Errors over all steps and placements, printed."""
    rows = [
        [case["case"], name, *_times(one["predicted_s"], one["measured_s"])]
        for case in cases
        for name, one in case["placements"].items()
    ]
    print("\n" + table(["step", "placement", "predicted s", "measured s", "error"], rows))
    errors = [abs(one["error"]) for case in cases for one in case["placements"].values()]
    right = sum(case["named_right"] for case in cases)
    mean, worst = statistics.mean(errors), max(errors)
    print(
        f"\n{len(cases)} steps in two placements each: mean error {mean:.1%}, largest {worst:.1%}; "
        f"the faster placement named right, or within {DIFFERENT:.0%}: {right} of {len(cases)}"
    )
    return {"mean_error": mean, "max_error": worst, "named_right": right, "num_cases": len(cases)}


def main() -> int:
    """Measure the machine and the cases."""
    options = parser(__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--steps", type=int, default=3, help="steps of each placement")
    options.add_argument("--only", nargs="*", default=[], metavar="TEXT", help="cases named so")
    args = options.parse_args()
    load = os.getloadavg()[0]
    torch.set_num_threads(1)
    machine = profile(ProfileConfig(num_ranks=2, num_threads=1, widths=[64, 128], seconds=0.2))
    chosen = [c for c in CASES if not args.only or any(text in c.name for text in args.only)]
    cases = [compared(case, machine, args.steps) for case in chosen]
    shutdown_ray()
    found = summary(cases)
    if load > 1:
        print(f"the load was {load:.1f} at the start: on a busy machine no time means anything")
    result = {
        **found,
        "cases": cases,
        "load_at_start": load,
        "machine_measured": machine.model_dump(mode="json", exclude={"calls"}),
    }
    report(result, args.json)
    good = found["mean_error"] <= MEAN_ERROR and found["max_error"] <= MOST_ERROR
    return 0 if good and found["named_right"] == len(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
