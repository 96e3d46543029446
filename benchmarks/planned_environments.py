"""The automatic plan of environments, and of a slow verifier, against every placement of a grid.

Each task is measured by `penstock profile`'s own function, then run for some steps under every
placement of a grid that is listed here, under the automatic plan and under the default, everything
on one rank: in turn, several rounds of it. For each placement the predicted seconds of a step stand
beside the measured ones. Placements that promise the same weights must end with the same. The sixth
task is a GRPO step whose verifier runs programs in the sandbox: its model is measured as well.

It wants an idle machine and takes up to fifteen minutes. With `--state FILE` it goes on where it
was interrupted. `--tiny` runs a part of the grid in one process, in seconds, to try the script.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from bench import parser, report, table
from penstock.configs.schema import ProfileConfig, WorkloadConfig
from penstock.launch.cli.hydra_app import compose
from penstock.launch.inputs.run import Run, executor_kind, resolved
from penstock.launch.placement.acting import acting_plan
from penstock.launch.placement.machine import PlannedMachine, analytic_cpus, planned_machine
from penstock.launch.placement.models import PlanInputs, with_models
from penstock.launch.profile.profile import profile as profile_machine
from penstock.launch.profile.task import profile_task, run_steps, task_profile_text
from penstock.launch.stages.prepare import prepare
from penstock.planner.inputs.cluster import part
from penstock.planner.inputs.task_profile import ActingPins, Inference, TaskProfile
from penstock.planner.plan.plan import Plan, one_group_plan
from penstock.planner.plan.planner import plan_step
from penstock.planner.search.pins import Pins

ROUNDS = 3
STEPS = 12

PPO = ("algorithm=env_ppo", "algorithm.per_step.rows=8", "algorithm.cfg.horizon=32")
PLAY = ("algorithm=self_play", "algorithm.per_step.rows=32")
TIMED = ("task=gymnasium", "task.id=timed_env:TimedCartPole-v0")
VERIFIED = "GRPO with a slow verifier"
TASKS = {
    "fast numpy": (*PPO, "task=cartpole"),
    "0.5 ms a step": (*PPO, *TIMED, "task.options={step_s: 5.0e-4, computes: true}"),
    "5 ms sleeping": (*PPO, *TIMED, "task.options={step_s: 5.0e-3, computes: false}"),
    "EnvPool game": (*PLAY, "task=envpool_game", "task.id=ConnectFour-v1"),
    "self-play": (*PLAY, "task=connect_four"),
    VERIFIED: (
        *("algorithm=grpo", "task=chain_sum", "model=tiny"),
        "algorithm.roles.actor.start=model",
        *("algorithm.per_step.prompts=4", "algorithm.cfg.sampling.num_samples=4"),
        "algorithm.roles.reward.options={verifier: 'timed_verifier:verify'}",
    ),
}
CALL_GROUPS = ("actor", "actor.generate", "reward.score")
INFERENCE: tuple[Inference, ...] = ("inline", "copied", "served")


@dataclass(frozen=True)
class Placement:
    """A placement of the grid."""

    inference: Inference
    num_ranks: int
    num_groups: int
    num_overlapped: int

    def __str__(self) -> str:
        overlap = f" x{self.num_overlapped}" if self.num_overlapped > 1 else ""
        return f"{self.inference} {self.num_ranks}, {self.num_groups} groups{overlap}"


def grid(*, overlaps: bool) -> list[Placement]:
    """Three kinds of inference, 1 or 2 actors, 1 or 2 groups, overlapped or not; 12 of them.

    A process acts in one group at least. Games cannot be overlapped, so they have 4 groups as well.
    """
    sizes = (1, 2) if overlaps else (2, 4)
    return [
        Placement(inference, ranks, groups, overlapped)
        for inference, ranks, groups, overlapped in product(INFERENCE, (1, 2), sizes, (1, 2))
        if ranks <= groups and overlapped <= (groups // ranks if overlaps else 1)
    ]


@dataclass(frozen=True)
class Verifying:
    """A placement of the verifier's grid."""

    apart: tuple[str, ...]  # call groups that share no group with what is not among them
    num_devices: int
    num_processes: int

    def __str__(self) -> str:
        which = f"{' and '.join(self.apart)} apart" if self.apart else f"all on {self.num_devices}"
        return f"{which}, {self.num_processes} processes"


def verifying_grid() -> list[Verifying]:
    """Everything on 1 or 2 ranks, sampling or verifying on a rank of its own; 1 to 4 processes."""
    ways = [((), 1), ((), 2), (("actor.generate",), 2), (("reward.score",), 2)]
    return [Verifying(apart, size, n) for apart, size in ways for n in (1, 2, 4)]


def verifying_plans(
    run: Run, profile: TaskProfile, calibration: str, folder: Path
) -> dict[str, Plan]:
    """Plans of the grid, and the one that `placement=auto` makes."""
    files = {"calibration": folder / "calibration.json", "task_profile": folder / "profile.json"}
    files["calibration"].write_text(calibration)
    files["task_profile"].write_text(profile.model_dump_json())
    run = with_models(run.having(**{key: str(file) for key, file in files.items()}))
    machine, inputs = planned_machine(run), PlanInputs(run)
    assert isinstance(machine, PlannedMachine)
    models = inputs.models({})
    engines, others = run.engines.planned(run.executor.transport)
    found: dict[str, Plan] = {}
    for one in verifying_grid():
        rest = tuple(name for name in CALL_GROUPS if name not in one.apart)
        made = plan_step(
            inputs.graph,
            models,
            part(machine.cluster, one.num_devices),
            inputs.workload(WorkloadConfig()),
            max_lag=0,
            constants=machine.constants(models),
            engines=engines,
            others=others,
            pins=Pins(
                together=(rest,),
                apart=tuple((name, rest[0]) for name in one.apart),
                num_processes={"reward": one.num_processes},
            ),
            task=profile,
        )
        found[str(one)] = made.model_copy(update={"cluster": machine.cluster})
    found["automatic"] = prepare(run).placed
    return found


def run_of(task: str, *, tiny: bool) -> Run:
    """The run of a task, on Ray unless `tiny`."""
    words = [*TASKS[task], "tracker=none"]
    words += [] if task == VERIFIED else ["model=mlp", "task.group_size=auto"]
    words += ["executor=in_process" if tiny else "executor=ray", "evaluation.num_episodes=0"]
    composed = compose("run", words)
    composed.pop("resume")
    return resolved(composed)


def acting_plans(run: Run, profile: TaskProfile, *, tiny: bool) -> dict[str, Plan]:
    """Plans of the grid, and the automatic one."""
    cluster, places = analytic_cpus(), grid(overlaps=profile.overlaps)
    if tiny:
        places = [one for one in places if one.inference == "inline" and one.num_ranks == 1]
    pinned = {str(one): ActingPins(**asdict(one)) for one in places}
    pinned["automatic"] = ActingPins(inference="inline", num_ranks=1) if tiny else ActingPins()
    return {name: acting_plan(run, profile, cluster, pins=own) for name, own in pinned.items()}


def compared(
    task: str, state: dict[str, Any], save: Any, rounds: int, *, tiny: bool
) -> dict[str, Any]:
    """All placements of one task, measured in turn."""
    run, own = run_of(task, tiny=tiny), state.setdefault(task, {})
    if "profile" not in own:
        own["profile"] = profile_task(run, 0.05 if tiny else 2.0).model_dump(mode="json")
        save()
    profile = TaskProfile.model_validate_json(json.dumps(own["profile"]))
    print(f"\n{task}\n{task_profile_text(profile)}")
    if task == VERIFIED:
        if "calibration" not in own:
            section = ProfileConfig(widths=[128], dtypes=["float32"])
            own["calibration"] = profile_machine(section).model_dump_json()
            save()
        with tempfile.TemporaryDirectory() as folder:
            plans = verifying_plans(run, profile, own["calibration"], Path(folder))
    else:
        plans = acting_plans(run, profile, tiny=tiny)
    plans["one rank"] = one_group_plan()
    times: dict[str, list[float]] = own.setdefault("times", {name: [] for name in plans})
    weights: dict[str, str] = own.setdefault("weights", {})
    for number in range(rounds):
        for name, plan in plans.items():
            if len(times[name]) <= number:
                found = run_steps(run, plan, 2 if tiny else STEPS)
                weights[name] = found.weights
                times[name].append(found.step_s)
                save()
    return summary(task, plans, {name: statistics.median(x) for name, x in times.items()}, weights)


def summary(
    task: str, plans: dict[str, Plan], seconds: dict[str, float], weights: dict[str, str]
) -> dict[str, Any]:
    """Compare the automatic plan with the best of the grid, and predictions with measurements."""
    rows: list[dict[str, Any]] = []
    for name, plan in plans.items():
        expected = plan.prediction.step_time_s if plan.prediction else None
        error = expected / seconds[name] - 1 if expected else None
        row = {"placement": name, "measured_s": seconds[name], "predicted_s": expected}
        rows.append({**row, "error": error, "weights": weights[name][:12]})
    in_grid = [row for row in rows if row["placement"] not in ("automatic", "one rank")]
    best = min(in_grid, key=lambda row: row["measured_s"])
    # Groups of other sizes draw other episodes, and two ranks that train add in another order.
    same: dict[tuple[int | None, int], set[str]] = {}
    for name, plan in plans.items():
        if name != "one rank" or task == VERIFIED:
            home = plan.nodes.get("actor.train", plan.default_group or plan.groups[0].name)
            key = plan.group_size, plan.group(home).num_ranks
            same.setdefault(key, set()).add(weights[name])
    return {
        "task": task,
        "placements": rows,
        "best": best["placement"],
        "chosen": str(plans["automatic"].role_options) + f" {plans['automatic'].nodes}",
        "ranks": {group.name: group.num_ranks for group in plans["automatic"].groups},
        "automatic_over_best": best["measured_s"] / seconds["automatic"],
        "automatic_over_one_rank": seconds["one rank"] / seconds["automatic"],
        "worst_error": max(abs(row["error"]) for row in in_grid),
        "within_20_percent": sum(abs(row["error"]) <= 0.2 for row in in_grid),
        "same_weights": all(len(found) == 1 for found in same.values()),
    }


def main(words: list[str] | None = None) -> None:
    """Measure, and print tables."""
    options = parser(__doc__ or "")
    options.add_argument("--tiny", action="store_true", help="a part of the grid, in one process")
    options.add_argument("--tasks", nargs="+", choices=TASKS, help="some of the tasks")
    options.add_argument("--state", type=Path, help="where measured times are kept, to go on")
    options.add_argument("--rounds", type=int, default=ROUNDS, help=f"of the grid ({ROUNDS})")
    args = options.parse_args(words)
    rounds: int = 1 if args.tiny else args.rounds
    here = str(Path(__file__).parent)  # Ray's processes make environments by name
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    if here not in sys.path:
        sys.path.insert(0, here)
    file: Path | None = args.state
    state: dict[str, Any] = {}
    if file is not None and file.is_file():
        state = json.loads(file.read_text())

    def save() -> None:
        if file is not None:
            file.write_text(json.dumps(state))

    names = args.tasks or (["fast numpy"] if args.tiny else list(TASKS))
    try:
        found = [compared(name, state, save, rounds, tiny=args.tiny) for name in names]
    finally:
        if not args.tiny:
            executor_kind("ray").end()
    for one in found:
        cells = [
            (
                row["placement"],
                f"{1e3 * row['measured_s']:.1f} ms",
                "" if row["predicted_s"] is None else f"{1e3 * row['predicted_s']:.1f} ms",
                "" if row["error"] is None else f"{row['error']:+.0%}",
                row["weights"],
            )
            for row in one["placements"]
        ]
        print(f"\n{one['task']}")
        print(table(("placement", "measured", "predicted", "error", "weights"), cells))
    head = ("task", "over the best", "over one rank", "worst error", "within 20 %", "same weights")
    cells = [
        (
            one["task"],
            f"{one['automatic_over_best']:.2f}",
            f"{one['automatic_over_one_rank']:.2f}",
            f"{one['worst_error']:.0%}",
            one["within_20_percent"],
            one["same_weights"],
        )
        for one in found
    ]
    print("\nthe automatic plan's steps a second\n" + table(head, cells))
    report({"rounds": rounds, "steps": STEPS, "tasks": found}, args.json)


if __name__ == "__main__":
    main()
